"""MPI as a peer: its library, its launcher, and its calls on our arrays. Only processes that its
own mpiexec started can use an MPI, and a process can load only one; so each MPI has a run of its
own, and all contestants of that run use the processes that it starts
(`python -m pycomm.bench.collectives.mpi`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm._process_pool import RankFailed
from pycomm.bench.collectives.peers import PACKAGES
from pycomm.bench.collectives.verbs import Arrays, Call, Form, point_to_point
from pycomm.bench.support.processes import Rank

LIBRARIES = {"mpich": "MPICH", "openmpi": "Open MPI", "intelmpi": "Intel(R) MPI"}
"""The name in each library's version string."""

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
KEY_VARIABLE = "BENCHMARK_KEY"


def missing(name: str, prefix: Path | None) -> str:
    """The reason why the MPI `name` cannot be measured here, or "".

    `prefix` is the folder in which it is installed; None: this environment.
    """
    wanted = [PACKAGES[name], "mpi4py"] if prefix is None else ["mpi4py"]
    absent = [package for package in wanted if not _is_installed(package)]
    if absent:
        return f"{name} is not installed: pip install {' '.join(absent)}"
    parts = [_mpiexec(prefix), *([] if prefix is None else [_library(prefix)])]
    return next((f"{part} is missing" for part in parts if not part.exists()), "")


def run(
    source: tuple[str, Path | None],
    body: Callable[..., None],
    args: tuple[Any, ...],
    size: int,
    on_message: Callable[[int, Any], None],
) -> None:
    """As pycomm.bench.support.processes.run, on processes that the mpiexec of an MPI starts.

    `source` is its name and prefix, as in missing(). Raises RankFailed with the output of mpiexec
    if a rank fails.
    """
    name, prefix = source
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener(str(Path(folder, "socket")), authkey=key.encode()))
        command = [str(_mpiexec(prefix)), *_options(name), "-n", str(size)]
        command += [sys.executable, "-m", __name__, name, str(listener.address)]
        environment = {**os.environ, **_environment(prefix), KEY_VARIABLE: key}
        with (
            tempfile.TemporaryFile("w+") as output,
            subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
        ):
            try:
                ranks = _meet(listener, process, size, (store.port, body, args))
                _listen(ranks, on_message)
                failed = process.wait() != 0
            except EOFError:  # a rank ended before the last answer
                process.wait()
                failed = True
            finally:
                process.kill()
            if failed:
                output.seek(0)
                raise RankFailed(
                    f"{name}'s mpiexec ended with {process.returncode}\n{output.read()}"
                )


def call(arrays: Arrays) -> Call:
    """The operation through mpi4py, on NumPy's view of the arrays, in MPI.COMM_WORLD."""
    from mpi4py import MPI

    case, root, copies = arrays.case, arrays.case.root, arrays.case.copies
    if arrays.dtype in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"MPI has no type for {case.dtype}")
    if case.redop == "avg" or (case.verb == "reduce_scatter" and copies):
        raise NotImplementedError("MPI has no such form")
    op, world, same = getattr(MPI, case.redop.upper()), MPI.COMM_WORLD, MPI.IN_PLACE
    following, previous = arrays.neighbours
    root_copies = copies and arrays.is_root

    def overlap(x: Any, out: Any) -> None:
        requests = [world.Irecv(out, previous), world.Isend(x, following)]
        arrays.compute()
        MPI.Request.Waitall(requests)

    def reduce(x: Any, _: object) -> None:
        world.Reduce(same if arrays.is_root else x, x if arrays.is_root else None, op, root)

    def gather(x: Any, out: Any) -> None:
        world.Gather(same if root_copies else x, out if arrays.is_root else None, root)

    def scatter(x: Any, out: Any) -> None:
        world.Scatter(x if arrays.is_root else None, same if root_copies else out, root)

    if case.verb.startswith("p2p_"):
        views = {id(one): one.numpy() for one in (arrays.input, arrays.output, arrays.answer)}
        return point_to_point(
            arrays,
            lambda x, peer: world.Isend(views[id(x)], peer),
            lambda x, peer: world.Irecv(views[id(x)], peer),
        )
    forms: dict[str, Form] = {
        "all_reduce": lambda x, _: world.Allreduce(same, x, op),
        "reduce": reduce,
        "broadcast": lambda x, _: world.Bcast(x, root),
        "all_gather": lambda x, out: world.Allgather(same if copies else x, out),
        "all_gather_v": world.Allgatherv,
        "gather": gather,
        "reduce_scatter": lambda x, out: world.Reduce_scatter_block(x, out, op),
        "scatter": scatter,
        "all_to_all": world.Alltoall,
        "send_recv": lambda x, out: world.Sendrecv(x, following, recvbuf=out, source=previous),
        "overlap": overlap,
        "barrier": lambda *_: world.Barrier(),
    }
    return arrays.form(forms[case.verb], torch.Tensor.numpy)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except (
        importlib.metadata.PackageNotFoundError
    ):  # the caller leaves this MPI out, with the reason
        return False
    return True


def _environment(prefix: Path | None) -> dict[str, str]:
    """The variables with which mpi4py and the MPI find the files of `prefix`."""
    if prefix is None:
        return {}
    library = str(_library(prefix))
    return {"MPI4PY_LIBMPI": library, "OPAL_PREFIX": str(prefix), "I_MPI_ROOT": str(prefix)}


def _library(prefix: Path) -> Path:
    """The library itself: in a wheel, which holds no links, libmpi.so is a text."""
    named = sorted((prefix / "lib").glob("libmpi.so.*"), key=lambda path: path.stat().st_size)
    return named[-1] if named else prefix / "lib" / "libmpi.so"


def _mpiexec(prefix: Path | None) -> Path:
    if prefix is not None:
        return prefix / "bin" / "mpiexec"
    beside = Path(sys.executable).with_name("mpiexec")
    return beside if beside.exists() else Path(shutil.which("mpiexec") or beside)


def _options(name: str) -> list[str]:
    # With binding, all threads of a rank would share a processor, also for other contestants.
    free = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return free if name == "openmpi" else []


def _meet(
    listener: Listener, process: subprocess.Popen[bytes], size: int, work: object
) -> dict[Connection, int]:
    """The connections of all ranks, each with its request."""
    ranks: dict[Connection, int] = {}
    listening = listener._listener._socket  # type: ignore[attr-defined]  # to stop when mpiexec ends
    listening.settimeout(0.2)
    while len(ranks) < size:
        try:
            connection = listener.accept()
        except TimeoutError:  # checks whether the ranks are still alive
            if process.poll() is not None:
                raise EOFError from None
            continue
        ranks[connection] = connection.recv()
        connection.send((size, work))
    return ranks


def _listen(ranks: dict[Connection, int], on_message: Callable[[int, Any], None]) -> None:
    """Receives until every rank has sent None, its end. Raises EOFError if one closes before."""
    while ranks:
        for ready in wait(list(ranks)):
            assert isinstance(ready, Connection)
            value = ready.recv()
            if value is None:
                del ranks[ready]
            else:
                on_message(ranks[ready], value)


def _enter(name: str, address: str) -> None:
    from mpi4py import MPI  # initialises MPI between the ranks

    if not MPI.Get_library_version().startswith(LIBRARIES[name]):
        raise RuntimeError(f"mpi4py has loaded {MPI.Get_library_version()}, not {name}")

    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parent = Client(address, authkey=os.environ[KEY_VARIABLE].encode())
    parent.send(rank)
    size, (port, body, args) = parent.recv()
    store = TCPStore("127.0.0.1", port, is_master=False)
    body(Rank(rank, size, store, parent.send), *args)
    torch.distributed.destroy_process_group()
    parent.send(None)


if __name__ == "__main__":
    _enter(*sys.argv[1:])
