"""Ctrl-C to `pycomm launch` while it starts or its ranks do: all end, and it says so in one line.

A module marks each process that reached the moment of the test by a file with its pid, and waits.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT
from test_launch import CLEAN, LIMIT_S

MARK = "import os, signal, sys, time\nopen(f'reached.{os.getpid()}', 'x').close()\n"
WAITS = MARK + "time.sleep(600)  # a signal ends it\n"
# In a rank's process, before its first line of pycomm's: until the signal is pending.
STARTS = (
    "import sys\nif 'pycomm.launch.rank' in sys.orig_argv:\n    "
    + MARK.replace("\n", "\n    ")
    + "while signal.SIGINT not in signal.sigpending():\n        time.sleep(0.01)  # polls\n"
)
MOMENTS = {  # module, its content, processes, lines that the ranks print
    "launcher imports torch": ("torch", WAITS, 1, []),
    "ranks start": ("sitecustomize", STARTS, 2, []),
    "ranks import": (
        *("slow", WAITS, 2),
        ["begin", "rank 0 was interrupted while it imported modules"],
    ),
}


def reached(folder: Path) -> dict[int, int]:
    """Process ids and pidfds of the processes that reached the moment."""
    found = {}
    for file in folder.glob("reached.*"):
        pid = int(file.suffix[1:])
        with contextlib.suppress(ProcessLookupError):  # it ended: the test fails
            found[pid] = os.pidfd_open(pid)
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt_during_the_start_is_one_line(moment: str, tmp_path: Path) -> None:
    module, content, count, prints = MOMENTS[moment]
    (tmp_path / f"{module}.py").write_text(content)
    (tmp_path / "prog.py").write_text("print('begin', flush=True)\nimport slow\n")
    work = tmp_path / "work"
    work.mkdir()
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*(sys.executable, "-m", "pycomm", "launch", "--nproc", "2"), str(tmp_path / "prog.py")],
        cwd=work,
        env={**CLEAN, "PYTHONPATH": path, "TMPDIR": str(work)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    waiting: dict[int, int] = {}
    try:
        end = time.monotonic() + LIMIT_S
        while len(list(work.glob("reached.*"))) < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "the processes did not start"
            time.sleep(0.01)  # polls: a file sends no notifications
        waiting = reached(work)
        assert len(waiting) == count
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 128 + signal.SIGINT
        assert stderr.splitlines() == ["pycomm launch: stopped by SIGINT"]
        shown = [line for line in stdout.splitlines() if line[:1] not in "+|p"]
        assert shown == prints
        for pidfd in waiting.values():
            with pytest.raises(ProcessLookupError):  # it ended, and its parent collected it
                signal.pidfd_send_signal(pidfd, 0)
        left = {file.name.partition(".")[0] for file in work.iterdir()}
        assert left <= {"reached", "log"}
    finally:
        process.kill()
        for pidfd in waiting.values():
            with contextlib.suppress(ProcessLookupError):  # it ended, as it should
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        process.communicate(timeout=60)
