"""torchft's tests of its process groups, with pycomm in place of gloo.

    python tests/compat/torchft_tests.py [--backend pycomm]

They need the package torchft, which contains them. They are not changed: pycomm's adapter, which is
read from docs/torch_backend.md, takes the place of torchft's ProcessGroupGloo. With `--backend
replaced`, torchft's own class makes its groups with torch's gloo, which pycomm replaces. Ranks are
threads, and process groups are reconfigured. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm import torch_backend

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A rank that left; torchft's list has only the texts of gloo and NCCL.
TEXT = "|has left the group"


def adapter() -> Any:
    """The class ProcessGroupPycomm of the documentation."""
    text = (ROOT / "docs" / "torch_backend.md").read_text()
    (code,) = BLOCK.findall(text.partition("## torchft")[2].partition("\n## ")[0])
    names: dict[str, Any] = {}
    exec(compile(code, "docs/torch_backend.md", "exec"), names)
    return names["ProcessGroupPycomm"]


def tests_of(backend: str) -> unittest.TestSuite:
    """All tests of one process group on the CPU."""
    if backend == "replaced":
        torch_backend.replace("gloo")
    module: Any = importlib.import_module("torchft.process_group_test")
    several: Any = module.NormalGlooMultiPgTest
    if backend == "pycomm":
        module.ProcessGroupGloo = adapter()
    if backend != "gloo":
        check = several.assertRaisesRegex
        several.assertRaisesRegex = lambda self, kind, text: check(self, kind, text + TEXT)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(several)
    suite.addTest(module.ProcessGroupTest("test_gloo_apis_0_cpu"))
    return suite


def main(argv: Sequence[str]) -> int:
    """Runs the tests and prints their results; 0 if none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="pycomm", choices=["pycomm", "replaced", "gloo"])
    backend = parser.parse_args(argv).backend
    result = unittest.TextTestRunner(verbosity=2).run(tests_of(backend))
    failed = len(result.failures) + len(result.errors)
    print(f"{backend}: {result.testsRun - failed} passed, {failed} failed")
    return 0 if result.testsRun > failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
