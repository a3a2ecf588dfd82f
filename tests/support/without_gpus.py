"""Runs programs that see no GPU, also where there is one."""

import os
import subprocess
import sys

from paths import ROOT


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python with these arguments in a separate process, as CUDA searches for GPUs once."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
