"""`python -m benchmarks.reliability.flood_rank BACKEND`: a rank of connection_flood.py and
delayed_flood.py. It finds the others by the environment variables of torch, reads the names of
methods of Rank, with arguments, and answers each with its result.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from pycomm.testing import status

FORM_LIMIT_S, CALL_LIMIT_S = 60.0, 60.0
FEW_DESCRIPTORS = 1024
COUNT = 1 << 16  # float32: a gradient of 256 KiB


class Rank:
    """A rank of a group, by pycomm (over tcp) or by gloo."""

    def __init__(self, backend: str) -> None:
        self._ours, self._x = backend == "pycomm", np.ones(COUNT, np.float32)
        if not self._ours:  # to import torch takes seconds
            self._torch: Any = importlib.import_module("torch")
            self._dist: Any = importlib.import_module("torch.distributed")
            self._torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def run(self) -> None:
        """Follows commands; answers a failure with its text."""
        _answer("ready")
        for line in sys.stdin:
            word, *given = line.split()
            try:
                _answer(getattr(self, word)(*map(int, given)))
            except RuntimeError as error:  # the parent reports it
                _answer(f"{type(error).__name__}: {error}")

    def form(self) -> float:
        """Joins; returns the seconds."""
        start = time.monotonic()
        if self._ours:
            limit_s = FORM_LIMIT_S
            self._group = pycomm.init(transport="tcp", timeout_s=limit_s, heartbeat_s=limit_s)
        else:
            self._dist.init_process_group("gloo", timeout=timedelta(seconds=FORM_LIMIT_S))
        return time.monotonic() - start

    def train(self, steps: int) -> float:
        """Some work and an all_reduce in each step; returns the steps per second."""
        start = time.monotonic()
        for _ in range(steps):
            self._x[:] = np.sqrt(np.abs(self._x) + 1.0)
            if self._ours:
                pycomm.all_reduce(self._x, "max")
            else:
                self._dist.all_reduce(self._torch.from_numpy(self._x), self._dist.ReduceOp.MAX)
        return steps / (time.monotonic() - start)

    def held(self) -> dict[str, int]:
        """The open resources of this process."""
        return {
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without the one that reads
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        }

    def cycle(self, dies: int) -> dict[str, int]:
        """Forms, trains and leaves. If `dies`, rank 1 kills itself, which rank 0 survives."""
        self.form()
        self.train(3)
        if dies and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        # PeerLost, or gloo's error. gloo's end waits for the killed rank, in vain.
        expected = (RuntimeError,) if dies else ()
        leave = pycomm.shutdown if self._ours else self._dist.destroy_process_group
        for call in (lambda: self.train(dies * sys.maxsize), leave):
            with contextlib.suppress(*expected):
                call()
        if self._ours:
            del self._group  # a closed group keeps two descriptors until it is destroyed
        return self.held()

    def forked(self, dies: int) -> int:
        """A cycle in a new process, as imports take seconds; returns its exit code."""
        process = os.fork()
        if process == 0:
            try:
                self.cycle(dies)
            except RuntimeError as error:  # rank 0 reports its own
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def unmet(self) -> list[int]:
        """The ranks to which this one has no connection."""
        return [p["rank"] for p in status(self._group)["peers"] if not p["connected"]]

    def meet(self, peer: int) -> float:
        """Sends to a rank and receives its answer; returns the seconds."""
        x, start = np.zeros(1, np.float32), time.monotonic()
        pycomm.send(x, peer, timeout_s=CALL_LIMIT_S)
        pycomm.recv(x, peer, timeout_s=CALL_LIMIT_S)
        return time.monotonic() - start

    def answer(self, peer: int) -> float:
        """The other end of meet(). Receives from any rank, which opens no connection."""
        x = np.zeros(1, np.float32)
        pycomm.recv(x, -1, timeout_s=CALL_LIMIT_S)
        pycomm.send(x, peer, timeout_s=CALL_LIMIT_S)
        return 0.0


def _answer(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    Rank(sys.argv[1]).run()
