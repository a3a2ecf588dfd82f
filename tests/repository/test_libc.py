"""The build on a system without glibc ends with one sentence."""

import sys
from pathlib import Path

from finished import finished

ROOT = Path(__file__).resolve().parent.parent.parent
MUSL = """
import platform, runpy, sys
platform.libc_ver = lambda *arguments: ("", "")
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_build_on_musl_ends_with_a_sentence(tmp_path: Path) -> None:
    done = finished([sys.executable, "-c", MUSL, str(tmp_path)], cwd=ROOT, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("pycomm: this Python does not use glibc")
    assert not list(tmp_path.iterdir())
