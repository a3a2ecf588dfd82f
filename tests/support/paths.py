"""Folders of the repository, for tests and their helpers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
