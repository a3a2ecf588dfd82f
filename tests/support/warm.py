"""Processes that multiprocessing spawns are forked from a server that has imported torch.

Each of thousands of ranks would import torch and, for its first optimizer, torch._dynamo: 3 s of a
processor. The server imports nothing of pycomm. Its children have the output, the environment and
the working directory of the process that spawns them, as a new interpreter would. Where something
differs that takes effect only at the start of a process, they are new interpreters.
"""

import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from multiprocessing import context, forkserver, popen_forkserver, process, reduction
from pathlib import Path
from typing import Any

IMPORTED = ["numpy", "torch", "torch._dynamo", "torch.distributed.nn.functional", "warm"]
# Libraries read variables with these prefixes when they are loaded.
AT_START = ("ATEN_", "CUDA_", "GLIBC", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def enable() -> None:
    """Starts the server, for all later processes of "spawn" contexts of this process."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    kept = _kept()
    cold = context.SpawnProcess._Popen  # type: ignore[attr-defined]  # not in its stub

    def popen(started: process.BaseProcess) -> Any:
        return cold(started) if _kept() != kept else _Popen(started)

    context.SpawnProcess._Popen = staticmethod(popen)  # type: ignore[attr-defined]  # not in its stub


def _kept() -> list[object]:
    """What the server's children have from the server."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(AT_START)}
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    place = [os.readlink("/proc/thread-self/ns/net"), os.sched_getaffinity(0), os.nice(0)]
    return [variables, limits, place, sys.executable]


def pycomm(words: list[str], folder: Path, env: dict[str, str], limit_s: float) -> Any:
    """As finished() of `python -m pycomm`, whose launcher imports torch first of all."""
    with tempfile.TemporaryDirectory() as outputs:
        paths = [Path(outputs, name) for name in ("out", "err")]
        started = context.SpawnProcess(target=_pycomm, args=(words, folder, env, paths))
        started.start()
        started.join(limit_s)
        started.kill()  # if it is not done: its exit status is -9
        started.join()
        texts = [path.read_text() for path in paths]
        return subprocess.CompletedProcess(words, started.exitcode or 0, *texts)


def _pycomm(words: list[str], folder: Path, env: dict[str, str], paths: list[Path]) -> None:
    from pycomm.__main__ import main

    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    tempfile.tempdir = None  # the server's
    sys.exit(main(words))


class _Popen(popen_forkserver.Popen):
    """A child of the server."""

    method = "spawn"

    def _launch(self, process_obj: Any) -> None:
        super()._launch(_Started(process_obj, [self.duplicate_for_child(n) for n in (1, 2)]))


class _Started:
    """Unpickled in the environment and with the output of the process that spawns it."""

    def __init__(self, started: Any, streams: list[int]) -> None:
        self._name, self.started, self.streams = started._name, started, streams

    def __reduce__(self) -> Any:
        data = bytes(reduction.ForkingPickler.dumps(self.started))
        return _inherit, (dict(os.environ), self.streams, data)


def _inherit(environment: dict[str, str], streams: list[int], started: bytes) -> Any:
    descriptors = forkserver.get_inherited_fds()  # type: ignore[attr-defined]  # not in its stub
    for number, place in enumerate(streams, 1):
        os.dup2(descriptors[place], number)
        os.close(descriptors[place])
    os.environ.clear()
    os.environ.update(environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # a new interpreter has its own
    return pickle.loads(started)
