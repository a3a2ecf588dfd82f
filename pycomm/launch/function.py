"""@pycomm.launcher: runs a function as several processes of one or several hosts.

The processes are spawned, so CUDA in the parent is harmless. This process serves torch's store, for
ranks that use torch, on a free port; rank 0 serves pycomm's store.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing as mp
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, overload

from pycomm import config, default_group
from pycomm.errors import Error, InvalidArgument
from pycomm.launch import failure, meeting, worker_setup

__all__ = ["Launcher", "launcher"]

GRACE_S = 5.0  # for the other ranks to exit after the first failure
_starting = threading.Lock()  # guards the environment, which changes while a process starts


@dataclass(frozen=True)
class Options:
    """The options of launcher()."""

    nproc: int | None = None
    size: int | None = None
    rank_start: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    device: str | None = None


@overload
def launcher(function: Callable[..., Any], /) -> Launcher: ...


@overload
def launcher(
    *,
    nproc: int | None = None,
    size: int | None = None,
    rank_start: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
    device: str | None = None,
) -> Callable[[Callable[..., Any]], Launcher]: ...


def launcher(
    function: Callable[..., Any] | None = None,
    /,
    *,
    nproc: int | None = None,
    size: int | None = None,
    rank_start: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
    device: str | None = None,
) -> Any:
    """Makes a function run as several processes: `@pycomm.launcher` or `@pycomm.launcher(nproc=2)`.

    A call returns the list of the local ranks' results, by rank. Inside, the default group exists:
    pycomm.rank(), pycomm.all_reduce(...). Arguments and results are pickled; NumPy arrays and plain
    values are best. The processes import the function: define it at the top level of a module, and
    in a script call it under `if __name__ == "__main__":`.

    On several hosts run the same program on each, with a different `rank_start`.

    Args:
        nproc: processes on this host; None: one per CUDA device, else one per two processors.
        size: processes on all hosts; None: nproc.
        rank_start: the rank of this host's first process.
        master_addr, master_port: address of torch's store on the host of rank 0. Port 0, on one
            host: any free port.
        device: "cuda": each process uses the device of its local rank; "cpu": none; None: CUDA
            devices if there are any.

    A call of the function raises these errors.

    Raises:
        InvalidArgument: the numbers do not fit, or the function cannot be imported.
        Exception: the first error of a rank, with its rank, host and traceback; the other ranks are
            ended.
    """
    options = Options(nproc, size, rank_start, master_addr, master_port, device)
    if function is not None:
        return Launcher(function, options)
    return lambda wrapped: Launcher(wrapped, options)


class Launcher:
    """A function that runs as several processes. Made by launcher()."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs the function; returns the local ranks' results, by rank.

        Raises:
            Exception: see launcher().
        """
        count, size, devices = _counts(self._options)
        job = pickle.dumps((self._where(), args, kwargs))
        return _Ranks(self._options, count, size, devices).run(job)

    def _where(self) -> tuple[str, str]:
        """Module and name under which the processes import the function.

        Raises:
            InvalidArgument: they could not.
        """
        module, name = self._function.__module__, self._function.__qualname__
        main = sys.modules.get("__main__")
        with contextlib.suppress(AttributeError):
            found: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
            importable = module != "__main__" or hasattr(main, "__file__")
            if found in (self, self._function) and importable:
                return module, name
        raise InvalidArgument(
            f"the processes of @pycomm.launcher cannot import {name}: define it at the top level "
            "of a file"
        )


def _counts(options: Options) -> tuple[int, int, int]:
    """Processes on this host, on all hosts, and the number of CUDA devices to use."""
    devices = 0
    if options.device not in (None, "cpu", "cuda"):
        raise InvalidArgument(
            f'invalid device: got {options.device!r}, expected "cpu", "cuda" or None'
        )
    if options.device != "cpu":
        import torch

        devices = torch.cuda.device_count()
    if options.device == "cuda" and not devices:
        raise InvalidArgument('device="cuda", but this host has no CUDA device')
    count = worker_setup.default_count(devices) if options.nproc is None else options.nproc
    size = count if options.size is None else options.size
    if count < 1 or options.rank_start < 0 or options.rank_start + count > size:
        raise InvalidArgument(
            f"ranks {options.rank_start} to {options.rank_start + count - 1} of {size}: nproc, "
            "rank_start and size do not fit"
        )
    if size > count and options.master_port == 0:
        raise InvalidArgument("several hosts need a rendezvous: pass the same master_port on all")
    return count, size, devices


class _Ranks:
    """The processes of one call."""

    def __init__(self, options: Options, count: int, size: int, devices: int) -> None:
        self._options, self._count, self._size = options, count, size
        self._devices = devices
        self._results: list[Any] = [None] * count
        self._errors: dict[int, BaseException] = {}  # by rank
        self._failures: list[failure.Failure] = []

    def run(self, job: bytes) -> list[Any]:
        """Starts the processes, receives their results and ends them."""
        several = self._size > self._count
        key = config.known_secret()
        host, port, _store = self._meeting(several)
        if several and not key:
            where = f"{host}:{port}"
            print(f"pycomm.launcher: {meeting.missing_secret_warning(where)}", file=sys.stderr)
        key = key or ("" if several else meeting.new_key())
        context = mp.get_context("spawn")
        started: list[Any] = []
        running: dict[Connection, tuple[int, Any]] = {}
        reserved, store_port = self._reserve(several, _store)
        try:
            for local in range(self._count):
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, os.getpid(), local, self._devices > 0, (key, job))
                process = context.Process(target=_enter, args=given)
                variables = self._variables(local, host, port) | meeting.variables(store_port)
                with _environment(variables):
                    process.start()
                theirs.close()
                started.append(process)
                running[ours] = (local, process)
            self._collect(running)
        finally:
            for process in started:
                process.kill()
                process.join()
            if reserved is not None:
                reserved.close()
        if self._failures:
            self._raise()
        return self._results

    def _meeting(self, several: bool) -> tuple[str, int, Any]:
        """Address and port of torch's store, and the store, which the first host serves."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs hide it

        host, port = self._options.master_addr, self._options.master_port
        if not several:
            store = meeting.local_store(port)
            return meeting.LOOPBACK, store.port, store
        first = self._options.rank_start == 0
        listen = "0.0.0.0" if first else host
        store = TCPStore(listen, port, is_master=first, wait_for_workers=False, multi_tenant=first)
        return host, port, store

    def _reserve(self, several: bool, store: Any) -> tuple[socket.socket | None, int]:
        """The port of pycomm's store, and on rank 0's host the socket that reserves it."""
        if self._options.rank_start:
            return None, int(store.get(meeting.PORT_KEY))
        reserved = meeting.reserve_port(several)
        store.set(meeting.PORT_KEY, str(reserved.getsockname()[1]))
        return reserved, reserved.getsockname()[1]

    def _variables(self, local: int, host: str, port: int) -> dict[str, str]:
        rank = self._options.rank_start + local
        return {
            **worker_setup.variables(rank, self._size, local, self._count),
            **worker_setup.threads_for(self._count, None),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _collect(self, running: dict[Connection, tuple[int, Any]]) -> None:
        """Returns when all have ended, or GRACE_S after the first failure."""
        end: float | None = None
        while running:
            ready = wait(list(running), None if end is None else max(0.0, end - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(*running.pop(pipe), pipe)
            if self._failures and end is None:
                end = time.monotonic() + GRACE_S

    def _receive(self, local: int, process: Any, pipe: Connection) -> None:
        try:
            fine, value, error = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the process ended without an answer
            process.join()
            rank = self._options.rank_start + local
            fine, error = False, None
            value = failure.of_exit(rank, process.pid, process.exitcode)
        if fine:
            self._results[local] = value
            return
        self._failures.append(value)
        self._errors[value.rank] = error or Error(str(value), peer=value.rank)

    def _raise(self) -> None:
        """Raises the first failure, as the rank raised it."""
        cause = failure.first(self._failures)
        raise self._errors[cause.rank] from RankFailed(f"{cause}\n\n{cause.trace}")


class RankFailed(Exception):
    """The cause of an error of a launched function: its rank, host and traceback."""


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """A context with additional environment variables, which started processes inherit."""
    with _starting:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _enter(
    pipe: Connection, parent: int, local: int, device: bool, key_and_job: tuple[str, bytes]
) -> None:
    """The main function of a process: sets up the worker, joins, runs the function, sends the
    result."""
    key, job = key_and_job
    config.keep_secret(key)
    answer: tuple[bool, Any, BaseException | None]
    try:
        worker_setup.setup_worker(parent, local, None, device)
        (module, name), args, kwargs = pickle.loads(job)
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        function = found._function if isinstance(found, Launcher) else found
        default_group.init()
        answer = True, function(*args, **kwargs), None
        data = pickle.dumps(answer)
        default_group.shutdown()
    except BaseException as error:  # of any kind: reported below
        mine = failure.of_error(int(os.environ["RANK"]), error)
        with contextlib.suppress(Exception):  # there is no group, or it is broken already
            default_group.default().abort(f"rank {mine.rank} failed with {mine.kind}: {mine.text}")
        data = _failed(mine, error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(data)


def _failed(mine: failure.Failure, error: BaseException) -> bytes:
    """A failure as bytes; an error that cannot be pickled becomes an Error of the same text."""
    try:
        data = pickle.dumps((False, mine, error))
        pickle.loads(data)
    except Exception:  # of the error's own __reduce__ or __init__, which may raise anything
        data = pickle.dumps((False, mine, Error(f"{mine.kind}: {mine.text}")))
    return data
