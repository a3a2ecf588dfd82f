"""The source files that the tests of the repository read."""

from pathlib import Path

from paths import ROOT


def tree(*folders: str, ends: tuple[str, ...]) -> list[Path]:
    """The files in these folders of the repository with one of these suffixes."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in ends]
    return sorted(found)


CPP = tree("csrc", ends=(".cpp", ".h", ".hpp", ".cu", ".cuh"))
PYTHON = tree("pycomm", ends=(".py",))
