"""The process of a rank that is a command (`pycomm launch --no-python`): ends as the command ends.

    python -I -S supervisor.py LAUNCHER_PID REPLACEMENTS COMMAND ARGUMENT ...

With REPLACEMENTS of 0 or more (`pycomm launch --replace`, --spares or --min-ranks) it starts the
command again, so many times, if it fails. The new process joins the elastic group, if there is one.
Afterwards it reports the loss to the launcher, which decides, and ends with success; losses.py
describes the files. REPLACEMENTS is -1 otherwise.

All processes of the command end with the launcher: the kernel signals the launcher's death to this
process, and the command's orphans become its children (prctl(2)). Signals are forwarded, except
those of the launcher, which signals the whole process group, and of a terminal. rank.py executes it
in its own process; it uses only the standard library, to stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LAUNCHER_ENDED = signal.SIGRTMIN  # sent by the kernel when the launcher ends
FORWARDED = {
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
SI_KERNEL = 128  # si_code of a terminal's signals, which the command receives as well
CANNOT_EXECUTE = 126  # the shell's exit status for it


def main(launcher: int, replacements: int, command: list[str]) -> NoReturn:
    """Runs the command; ends with its exit status, or by the signal that ended it."""
    waited = {signal.SIGCHLD, LAUNCHER_ENDED, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, int(LAUNCHER_ENDED), 0, 0, 0)
    if os.getppid() != launcher:  # it died before prctl
        sys.exit("pycomm: the launcher ended")
    own = os.getpid()

    def start() -> int:
        child = os.fork()
        if child == 0:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() == own:
                _execute(command, before)
            os._exit(1)
        return child

    child, started, stopped, status = start(), 0, False, None
    while status is None:
        found = signal.sigwaitinfo(waited)
        if found.si_signo == LAUNCHER_ENDED:
            if os.getppid() != launcher:
                _kill_descendants()
                sys.exit(1)
        elif found.si_signo == signal.SIGCHLD:
            status = _reap(child)
            if status and not stopped and started < replacements:
                started += 1
                _prepare_replacement(status, started, replacements)
                child, status = start(), None
        elif found.si_pid == launcher:
            stopped = True
        elif found.si_code != SI_KERNEL:
            os.kill(child, found.si_signo)
    if stopped:  # the launcher waits for this process, and kills the group after its limit
        _wait_for_descendants(launcher, waited)
    if replacements >= 0 and not stopped:
        status = _report_end(status, child)
    _end_as(status)


def _report_end(status: int, child: int) -> int:
    """Writes for the launcher and for processes that wait to join how the last process ended;
    returns the status with which to end."""
    env, file = os.environ, os.environ["PYCOMM_ELASTIC_FILE"]
    if status == 0:
        with open(f"{file}.ended", "a"):
            return 0
    if not os.path.exists(file):  # the first group can no longer form
        return status
    with open(f"{file}.new.{env['RANK']}", "w") as report:
        json.dump(
            {
                "local_rank": int(env["LOCAL_RANK"]),
                "pid": child,
                "exitcode": os.waitstatus_to_exitcode(status),
                "error_file": env["TORCHELASTIC_ERROR_FILE"],
            },
            report,
        )
    os.replace(report.name, f"{file}.lost.{env['RANK']}")
    _print(f"{_name()} ended by {_reason(status)} and is not replaced")
    return 0


def _name() -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return f"rank {rank}" if rank < size else f"spare process {rank - size}"


def _reason(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error"


def _print(text: str) -> None:
    print(f"pycomm launch: {text}", file=sys.stderr, flush=True)


def _prepare_replacement(status: int, number: int, most: int) -> None:
    """Prints why a new process starts, and sets the environment that lets it join the group."""
    _print(
        f"{_name()} ended by {_reason(status)}; starting a new process in its place, {number} of "
        f"at most {most}"
    )
    with contextlib.suppress(OSError):  # the process that ended wrote no report
        os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if os.path.exists(os.environ["PYCOMM_ELASTIC_FILE"]):  # else the first group has yet to form
        os.environ["PYCOMM_ELASTIC_JOINS"] = "1"


def _execute(command: list[str], mask: set[int | signal.Signals]) -> None:
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(name, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        _print(f"cannot execute {command[0]}: {error.strerror}")
        os._exit(CANNOT_EXECUTE)


def _reap(child: int) -> int | None:
    """Collects the status of all children that ended; returns that of `child` if it is among
    them."""
    status = None
    with contextlib.suppress(ChildProcessError):  # no child is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _wait_for_descendants(launcher: int, waited: set[signal.Signals]) -> None:
    while _descendants():
        found = signal.sigwaitinfo(waited)
        if found.si_signo == LAUNCHER_ENDED and os.getppid() != launcher:
            _kill_descendants()
        _reap(0)


def _kill_descendants() -> None:
    """Kills all descendants: orphans become children of this process."""
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:  # none is left
            return


def _descendants() -> list[int]:
    """The descendants that have not ended."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It ended meanwhile.
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, known = list(children.get(os.getpid(), ())), 0
    while known < len(found):
        found += children.get(found[known], ())
        known += 1
    return found


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command wrote its own core dump
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        sys.exit(128 + number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
