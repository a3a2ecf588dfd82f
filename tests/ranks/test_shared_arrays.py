"""Arrays in memory that ranks map: their forms, their lifetime, and the group that creates them."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from pycomm import errors
from pycomm.testing import run_ranks

PAGE = os.sysconf("SC_PAGESIZE")
COUNT = 102_400  # ranks sum equal halves of it: long arrays are cut at 128 elements


def staged(group: pycomm.Group, x: Any) -> bool:
    """Sums `x` over two ranks, and determines from the bytes sent whether slots were used."""
    before = group.stats().bytes_sent
    pycomm.all_reduce(x, group=group)
    sent = group.stats().bytes_sent - before
    assert sent in (x.nbytes, x.nbytes // 2)
    return sent == x.nbytes


@pytest.mark.parametrize("shape", [(), 5, (3, 4), (0, 7), [2, 2, 2], np.int64(3), (np.int64(2), 3)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", bool, np.float16, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_forms(shape: Any, dtype: Any, shared: bool) -> None:
    x = pycomm.empty(shape, dtype, shared=shared)
    like = (torch if isinstance(dtype, torch.dtype) else np).empty(shape, dtype=dtype)
    assert (type(x), x.shape, x.dtype) == (type(like), like.shape, like.dtype)
    x[...] = 1
    assert (x == 1).all()


def test_wrong_arguments() -> None:
    with pytest.raises(errors.InvalidArgument, match="none of them negative"):
        pycomm.empty((3, -1), "float32")
    for shape in (None, (2.5,), "12", ((1, 2), 3)):
        with pytest.raises(errors.InvalidArgument, match="invalid shape"):
            pycomm.empty(shape, "float32")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(errors.InvalidArgument, match="no free range"):
        pycomm.empty(1 << 60, "uint8")
    with pytest.raises(errors.InvalidArgument, match="no free range"):
        pycomm.empty(1 << 62, "float64")


def _summed(group: pycomm.Group) -> list[bool]:
    arrays: list[Any] = [
        pycomm.empty(COUNT, "float32"),
        pycomm.empty(COUNT, torch.float32),
        pycomm.empty((2, COUNT), "int64")[1],  # a part of one
        np.empty(COUNT, "float32"),
        pycomm.empty(4 * COUNT + 1, "uint8")[1:].view("float32"),  # misaligned
        pycomm.empty(COUNT, "float32") if group.rank == 0 else np.empty(COUNT, "float32"),
    ]
    found = []
    for x in arrays:
        x[...] = group.rank + 1
        found.append(staged(group, x))
        assert (x == 3).all()
    return found


@pytest.mark.parametrize("where", ["local", "shm"])
def test_only_arrays_that_all_ranks_map_are_summed_in_place(where: str) -> None:
    for found in run_ranks(2, _summed, transport=where, processes=where == "shm"):
        assert found == [False, False, False, True, True, True]


def _in_a_subgroup(group: pycomm.Group) -> bool:
    x = pycomm.empty(COUNT, "float32")
    x[:] = group.rank
    part = group.split(group.rank // 2)
    assert part is not None
    result = staged(part, x)
    assert (x == (1 if group.rank < 2 else 5)).all()
    part.close()
    return result


def test_arrays_work_in_every_group() -> None:
    assert run_ranks(4, _in_a_subgroup, transport="shm", processes=True) == [False] * 4


def resident_shared() -> int:
    """Bytes of shared memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssShmem")).split()[1]) << 10


def test_memory_is_freed_with_the_array() -> None:
    keep = pycomm.empty(1, "uint8")  # so that the heap stays
    before = resident_shared()
    x = pycomm.empty(64 << 20, "uint8")
    x.fill(1)
    view = x[5:]
    del x
    gc.collect()
    assert resident_shared() - before > 63 << 20  # a page of an earlier test may be freed meanwhile
    del view
    gc.collect()
    assert resident_shared() - before < 1 << 20
    assert keep.size == 1
    left = [p.name for p in Path("/dev/shm").iterdir() if "pycomm" in p.name]
    assert left == []


def test_forked_child_does_not_free_arrays_of_its_parent() -> None:
    x = pycomm.empty(PAGE, "uint8")
    x.fill(1)
    child = os.fork()
    if child == 0:
        own = pycomm.empty(PAGE, "uint8")
        own.fill(2)
        fine = bool((x == 1).all())
        del x, own
        gc.collect()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x == 1).all()
    other = pycomm.empty(PAGE, "uint8")
    other.fill(3)
    assert (x == 1).all()


def _buckets(group: pycomm.Group) -> int:
    torch.manual_seed(0)
    model = pycomm.DataParallel(torch.nn.Linear(300, 300), group=group)
    before = group.stats().bytes_sent
    model(torch.ones(2, 300) * (group.rank + 1)).sum().backward()
    weight = next(model.parameters()).grad
    assert weight is not None
    assert torch.equal(weight, torch.full_like(weight, 3.0))
    return group.stats().bytes_sent - before


def test_gradient_buckets_are_summed_in_place() -> None:
    gradients = (300 * 300 + 300) * 4
    for sent in run_ranks(2, _buckets, transport="shm", processes=True):
        assert gradients // 2 - 4 * 128 <= sent < gradients  # cut at 128 elements


def _any_access_mode(group: pycomm.Group) -> None:
    rank, size = group.rank, group.size
    for count in (6_000, 300_000):
        ranks = np.arange(size, dtype="float32")[:, None] + np.arange(count, dtype="float32") % 89
        # The first determines which rank may read which, the others try reading and slots.
        for _ in range(9):
            x, root = ranks[rank].copy(), ranks[rank].copy()
            pycomm.all_reduce(x, group=group)
            np.testing.assert_array_equal(x, ranks.sum(0))
            pycomm.broadcast(root, 1, group=group)
            np.testing.assert_array_equal(root, ranks[1])
            np.testing.assert_array_equal(pycomm.all_gather(ranks[rank], group=group), ranks)
            row = pycomm.reduce_scatter(ranks, group=group)
            np.testing.assert_array_equal(row, size * ranks[rank])


@pytest.mark.parametrize("size", [2, 3])
def test_private_arrays_of_processes(size: int) -> None:
    run_ranks(size, _any_access_mode, transport="shm", processes=True)
