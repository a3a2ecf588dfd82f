"""Processes whose default torch group uses pycomm, for the tests of the backend.

One pool of spawned processes serves all files, since importing torch costs more than most tests;
each test sends them one function, which runs with a fresh default group (file store). The fixture
`both` also runs it on gloo, and compares. test_c10d*.py and other tests that train with torch
import the fixtures.
"""

import faulthandler
import functools
import inspect
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import Test, with_parameters

from pycomm import torch_backend

IN_PLACE = ", replaced"  # after a backend: pycomm in place of gloo
REPLACED = "gloo" + IN_PLACE
LIMIT_S = 180  # of one function in all processes
CALL_S = 120  # of a call: the other ranks may be slow to start
STACKS_S = 150  # a function that still runs prints the stacks of its threads to stderr


def _serve(rank: int, size: int, pipe: Connection) -> None:
    """The main function of a pool process: runs each function with a fresh default group."""
    torch.set_num_threads(1)
    while True:
        task = pipe.recv()
        if task is None:
            return
        fn, args, path, requested = task
        backend = requested.removesuffix(IN_PLACE)
        faulthandler.dump_traceback_later(STACKS_S)
        try:
            if backend != requested:
                torch_backend.replace("gloo")
            dist.init_process_group(
                backend,
                init_method=f"file://{path}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=CALL_S),
            )
            try:
                if requested == "gloo":
                    dist.barrier()  # a rank that ends before all are connected fails the others
                result = fn(*args)
            finally:
                dist.destroy_process_group()
                torch_backend.restore("gloo")
            pipe.send((True, result))
        except BaseException:  # any error is returned to the test
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()


class Ranks:
    """Processes that run a function with torch's default group on pycomm."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self.calls, self.broken = size, 0, False
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, folder: Path, backend: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank. A process that fails, dies or is late fails the test."""
        self.calls += 1
        self.broken = True
        for pipe in self.pipes:
            pipe.send((fn, args, str(folder / f"store{self.size}_{self.calls}"), backend))
        end = time.monotonic() + LIMIT_S
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                failures.append(f"rank {rank} of {self.size} did not answer within {LIMIT_S} s")
                continue
            fine, result = pipe.recv()
            results.append(result)
            if not fine:
                failures.append(f"rank {rank} of {self.size}:\n{result}")
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        self.broken = False
        return results

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Pools:
    """The pool of each size, created on first use and again after a failure."""

    def __init__(self) -> None:
        self.pools: dict[int, Ranks] = {}

    def of(self, size: int, before: Any) -> Ranks:
        pool = self.pools.get(size)
        if pool is None or pool.broken:
            with before.keep_new():
                if pool is not None:
                    pool.stop()
                pool = self.pools[size] = Ranks(size)
        return pool


POOLS = Pools()  # daemons: they end with this process

Run = Callable[..., list[Any]]


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """run(size, fn, *args) -> results by rank."""
    return lambda size, fn, *args: POOLS.of(size, no_leaks).run(tmp_path, "pycomm", fn, *args)


@pytest.fixture(name="both")
def both_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """both(size, fn, *args) -> results by rank of pycomm, which must equal gloo's.

    The results are tensors and numbers in lists and dicts. Sums of two ranks have one order, so
    that they must be equal bit by bit; sums of more ranks within torch's tolerance for the dtype.
    """

    def run_both(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        ours, theirs = (
            POOLS.of(size, no_leaks).run(tmp_path, backend, fn, *args)
            for backend in ("pycomm", "gloo")
        )
        exact = {"rtol": 0.0, "atol": 0.0} if size == 2 else {}
        torch.testing.assert_close(ours, theirs, equal_nan=True, **exact)
        return ours

    return run_both


def _call(*given: Any) -> None:
    *at, test, arguments = given
    test.__wrapped__(*at, **arguments)


def in_processes(*sizes: int) -> Callable[[Test], Test]:
    """A test whose body runs in each process, with these numbers of processes. The file of the test
    imports run_fixture, from torch_devices.py if the body has a parameter `at`, the rank's device.
    on_ranks.py has the like for threads."""

    def decorate(program: Test) -> Test:
        @functools.wraps(program)
        def test(run: Run, size: int, **given: Any) -> None:
            run(size, _call, test, given)

        own = [name for name in inspect.signature(program).parameters if name != "at"]
        with_parameters(test, ["run", "size", *own])
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


SIZES = pytest.mark.parametrize("size", [2, 3])


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that every sum and product is exact, different on each rank."""
    made = torch.Generator().manual_seed(rank + 100 * len(shape))
    return torch.randint(1, 5, shape, generator=made).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Bitwise equality."""
    assert got.dtype == wanted.dtype, (what, got, wanted)
    assert got.shape == wanted.shape, (what, got, wanted)
    as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (got, wanted)]
    assert torch.equal(*as_bytes), (what, got, wanted)
