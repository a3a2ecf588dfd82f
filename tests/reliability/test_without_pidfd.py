"""If the system forbids pidfds, a rank that dies or is stopped is still detected."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
long syscall(long number, ...) {
  long a[6];
  va_list given;
  va_start(given, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(given, long);
  va_end(given);
  if (number == 434) {  /* pidfd_open */
    errno = EPERM;
    return -1;
  }
  long (*next)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""
RANKS = """
import contextlib, os, signal, sys, time
import numpy as np
import pycomm
from pycomm import errors
from pycomm.testing import run_ranks

def fn(group, sign):
    try:
        os.pidfd_open(os.getpid())
    except PermissionError:  # as it should be here
        pass
    else:
        return "pidfd_open is not forbidden"
    pycomm.barrier(group=group)
    victim = group.peer_info()[1].pid
    if group.rank == 1:
        os.kill(os.getpid(), sign)
    try:
        pycomm.all_reduce(np.ones(4), group=group, timeout_s=60)
    except errors.PeerLost as error:
        return error.peer
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended already
            os.kill(victim, signal.SIGKILL)

if __name__ == "__main__":
    results = run_ranks(2, fn, int(sys.argv[1]), transport=sys.argv[2], processes=True,
                     heartbeat_s=2.0, return_exceptions=True)
    print(results[0])
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sign", [9, 19], ids=["killed", "stopped"])
def test_rank_failures_are_detected_without_pidfds(
    tmp_path: Path, sign: int, transport: str
) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(shim), str(tmp_path / "shim.c"), "-ldl"], check=True
    )
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, str(script), str(sign), transport],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "1\n", done.stdout + done.stderr
