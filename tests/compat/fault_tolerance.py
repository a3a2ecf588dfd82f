"""PyTorch's tests of reconfigure (test/distributed/test_c10d_fault_tolerance.py) with any backend.

    python tests/compat/fault_tolerance.py [--backend pycomm] [--file FILE]

They need torch 2.14. Wheels of torch do not contain the file: without --file it is downloaded from
PyTorch's repository, as of the installed version. It is not changed; its function that makes the
tests of a backend is called for this one. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import unittest
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
NAME = "test_c10d_fault_tolerance"
URL = f"https://raw.githubusercontent.com/pytorch/pytorch/v%s/test/distributed/{NAME}.py"
DOWNLOAD_S = 60


def downloaded(version: str) -> Path:
    """The file as of a version of torch, in build/torch_tests."""
    path = ROOT / "build" / "torch_tests" / version / f"{NAME}.py"
    if not path.exists():
        with urllib.request.urlopen(URL % version, timeout=DOWNLOAD_S) as reply:
            text = reply.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return path


def load(file: Path, backend: str) -> Any:
    """The class of the tests. Its ranks are forked: a new process would not find the class."""
    if backend == "pycomm":
        importlib.import_module("pycomm.torch_backend")  # registers it
    sys.path.insert(0, str(file.resolve().parent))
    module: Any = importlib.import_module(NAME)
    made = module._make_fault_tolerance_test_class(backend, "cpu")
    fork = multiprocessing.get_context("fork").Process
    made._spawn_processes = lambda self: self._start_processes(fork)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the tests and prints their results; 0 if none failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="pycomm", help="its name in torch.distributed")
    parser.add_argument("--file", type=Path, help="PyTorch's file of tests")
    given = parser.parse_args(argv)
    file = given.file or downloaded(torch.__version__.partition("+")[0])
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(load(file, given.backend))
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    left_out = len(result.skipped)
    failed = len(result.failures) + len(result.errors)
    passed = result.testsRun - left_out - failed
    print(f"{given.backend}: {passed} passed, {failed} failed, {left_out} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
