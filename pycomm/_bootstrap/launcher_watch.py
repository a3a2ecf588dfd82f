"""Aborts this rank's groups when torch's elastic agent is killed: torchrun's ranks outlive it.

A thread waits for the end of the agent, and of the processes between it and this one. Ranks of
`pycomm launch` end with their launcher: launch/worker_setup.py and launch/supervisor.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from pycomm import config

MOST_ANCESTORS = 16  # there may be wrapper scripts between the agent and a rank


class _State:
    pid = 0  # the process that runs the thread: a forked child has none
    lock = threading.Lock()


def start(abort: Callable[[str], None]) -> None:
    """Starts the thread, once per process, if torchrun started this process.

    Args:
        abort: called once on that thread, with the reason, when the agent or a process between
            them ends.
    """
    if not config.under_torchrun() or config.under_pycomm_launch():
        return
    with _State.lock:
        if _State.pid == os.getpid():
            return
        _State.pid = os.getpid()
        watched = {}
        for pid in _launchers():
            with contextlib.suppress(OSError):  # it ended, or the kernel has no pidfd
                watched[os.pidfd_open(pid)] = pid
        threading.Thread(
            target=_wait, args=(watched, abort), name="pycomm-launcher", daemon=True
        ).start()


def _launchers() -> list[int]:
    """This process's ancestors, from its parent to the agent: the first process without the
    variables that an agent sets for its ranks.
    """
    found = [os.getppid()]
    while config.under_torchrun(found[-1]) and len(found) < MOST_ANCESTORS:
        try:
            stat = Path(f"/proc/{found[-1]}/stat").read_text()
        except OSError:  # it has ended
            break
        found.append(int(stat.rpartition(")")[2].split()[1]))
    return found


def _wait(watched: dict[int, int], abort: Callable[[str], None]) -> None:
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    if watched:
        ended = watched[poll.poll()[0][0]]
        abort(
            f"the launcher of this rank (torchrun, or a process that it started, pid {ended}) ended"
        )
    for descriptor in watched:
        os.close(descriptor)
