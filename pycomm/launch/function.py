"""@pycomm.launcher: runs a function as several processes of one or several hosts.

The processes are spawned, so CUDA in the parent is harmless. This process serves torch's store, for
ranks that use torch, on a free port; rank 0 serves pycomm's store.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, overload

from pycomm import _arguments, config, default_group
from pycomm._arguments import also_named, integer, one_of, plain_text
from pycomm._process_pool import ProcessPool, RankFailed, picklable, send_answer
from pycomm.errors import Error, InvalidArgument
from pycomm.launch import failure, local_rendezvous, worker_setup

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

    def __post_init__(self) -> None:
        if self.nproc is not None:
            integer("nproc", self.nproc, 1)
        if self.size is not None:
            integer("size", self.size, 1)
        integer("rank_start", self.rank_start, 0)
        plain_text("master_addr", self.master_addr)
        integer("master_port", self.master_port, 0, 65535)
        if self.device is not None:
            one_of("device", self.device, ("cpu", "cuda"))


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


@also_named(n_gpus="nproc", world_size="size", master_ip="master_addr", port="master_port")
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
    in a script call it under `if __name__ == "__main__":`. A notebook has no module; there
    pycomm.testing.run_ranks runs a function as threads.

    On several hosts run the same program on each, with a different `rank_start`. MegEngine's names
    of the arguments are accepted too: n_gpus, world_size, master_ip, port.

    Args:
        nproc: processes on this host; None: one per CUDA device, else one per two processors.
        size: processes on all hosts; None: nproc.
        rank_start: the rank of this host's first process.
        master_addr, master_port: address of torch's store on the host of rank 0. Port 0, on one
            host: any free port.
        device: "cuda": each process uses the device of its local rank; "cpu": none; None: CUDA
            devices if there are any.

    Raises:
        InvalidArgument: an argument is invalid. In a call of the function: the numbers do not fit,
            or the function cannot be imported.
        Exception: in a call of the function: the first error of a rank, with its rank, host and
            traceback; the other ranks are ended.
    """
    options = Options(nproc, size, rank_start, master_addr, master_port, device)
    if function is not None:
        _arguments.function("function", function)
        return Launcher(function, options)
    return lambda wrapped: Launcher(_arguments.function("function", wrapped), options)


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
        ranks = _Ranks(self._options)
        return ranks.run(pickle.dumps((self._where(), args, kwargs)))

    def _where(self) -> tuple[str, str]:
        """Module and name under which the processes import the function.

        Raises:
            InvalidArgument: they could not.
        """
        module, name = self._function.__module__, self._function.__qualname__
        main = sys.modules.get("__main__")
        with contextlib.suppress(AttributeError):  # not importable by its name
            found: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
            importable = module != "__main__" or hasattr(main, "__file__")
            if found in (self, self._function) and importable:
                return module, name
        raise InvalidArgument(
            f"the processes of @pycomm.launcher cannot import {name}: define it at the top level "
            "of a file. In a notebook, pycomm.testing.run_ranks(2, function) calls function(group) "
            "on two ranks, as threads"
        )


def _counts(options: Options) -> tuple[int, int, int]:
    """Processes on this host, on all hosts, and the number of CUDA devices to use."""
    devices = 0
    if options.device != "cpu":
        import torch

        devices = torch.cuda.device_count()
    if options.device == "cuda" and not devices:
        raise InvalidArgument('device="cuda", but this host has no CUDA device')
    count = worker_setup.default_count(devices) if options.nproc is None else options.nproc
    size = count if options.size is None else options.size
    if options.rank_start + count > size:
        raise InvalidArgument(
            f"ranks {options.rank_start} to {options.rank_start + count - 1} of {size}: nproc, "
            "rank_start and size do not fit"
        )
    if size > count and options.master_port == 0:
        raise InvalidArgument("several hosts need a rendezvous: pass the same master_port on all")
    if options.nproc is None and size == 1:  # nothing is parallel, which may not be intended
        default = "CUDA device" if devices else f"{worker_setup.CORES_PER_RANK} processors"
        print(
            f"pycomm.launcher: 1 process on this host, the default of one per {default}; "
            "nproc=N sets another number",
            file=sys.stderr,
        )
    if shared := worker_setup.shared_devices(count, devices):
        print(f"pycomm.launcher: {count} ranks {shared}", file=sys.stderr)
    return count, size, devices


class _Ranks:
    """The processes of one call."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count, self._size, self._devices = _counts(options)

    def run(self, job: bytes) -> list[Any]:
        """Starts the processes, receives their results and ends them."""
        several = self._size > self._count
        key = config.known_secret()
        host, port, _store = self._torch_store(several)
        if several and not key:
            where = f"{host}:{port}"
            print(
                f"pycomm.launcher: {local_rendezvous.missing_secret_warning(where)}",
                file=sys.stderr,
            )
        key = key or ("" if several else local_rendezvous.new_key())
        reserved, store_port = self._reserve(several, _store)
        try:
            with ProcessPool(GRACE_S, self._failure_of_exit) as pool:
                for local in range(self._count):
                    port_variable = local_rendezvous.variables(store_port)
                    with _environment(self._variables(local, host, port) | port_variable):
                        pool.start(_enter, os.getpid(), local, self._devices > 0, (key, job))
                pool.collect()
        finally:
            if reserved is not None:
                reserved.close()
        if pool.failures:
            self._raise(pool.failures)
        return [pool.results[local] for local in range(self._count)]

    def _torch_store(self, several: bool) -> tuple[str, int, Any]:
        """Address and port of torch's store, and the store, which the first host serves."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs hide it

        host, port = self._options.master_addr, self._options.master_port
        if not several:
            store = local_rendezvous.local_store(port)
            return local_rendezvous.LOOPBACK, store.port, store
        first = self._options.rank_start == 0
        listen = "0.0.0.0" if first else host
        store = TCPStore(listen, port, is_master=first, wait_for_workers=False, multi_tenant=first)
        return host, port, store

    def _reserve(self, several: bool, store: Any) -> tuple[socket.socket | None, int]:
        """The port of pycomm's store, and on rank 0's host the socket that reserves it."""
        if self._options.rank_start:
            return None, int(store.get(local_rendezvous.PORT_KEY))
        reserved = local_rendezvous.reserve_port(several)
        store.set(local_rendezvous.PORT_KEY, str(reserved.getsockname()[1]))
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

    def _failure_of_exit(self, local: int, process: Any) -> tuple[failure.Failure, Error]:
        rank = self._options.rank_start + local
        found = failure.of_exit(rank, process.pid, process.exitcode)
        return found, Error(str(found), peer=rank)

    def _raise(self, failures: Mapping[int, tuple[failure.Failure, BaseException]]) -> None:
        """Raises the first failure, as the rank raised it; its cause has host and traceback."""
        errors = {found.rank: error for found, error in failures.values()}
        cause = failure.first([found for found, _ in failures.values()])
        raise errors[cause.rank] from RankFailed(f"{cause}\n\n{cause.trace}")


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
    try:
        worker_setup.setup_worker(parent, local, None, device)
        (module, name), args, kwargs = pickle.loads(job)
        found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        function = found._function if isinstance(found, Launcher) else found
        default_group.init()
        answer = pickle.dumps((False, function(*args, **kwargs)))
        default_group.shutdown()
    except BaseException as error:  # of any kind: reported below
        mine = failure.of_error(int(os.environ["RANK"]), error)
        with contextlib.suppress(Exception):  # there is no group, or it is broken already
            default_group.default().abort(f"rank {mine.rank} failed with {mine.kind}: {mine.text}")
        answer = pickle.dumps((True, (mine, picklable(error))))
    send_answer(pipe, answer)
