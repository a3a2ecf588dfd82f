"""Intended differences from gloo: the table of docs/torch_backend.md, on both backends.

A case is a function that all ranks call; its result, or the name of its exception, is compared by
rank. Cases that end the process under gloo, or write outside a tensor, do not run on gloo.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import POOLS

Case = Callable[[int], Any]
BROKEN = "RuntimeError"  # gloo's error for everything
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LIMIT = timedelta(seconds=2)  # for calls that time out under gloo


def _strided(_rank: int) -> Any:
    x = torch.ones(4, 2)
    dist.all_reduce(x[:, 0])
    return x.tolist()


def _two_tensors(_rank: int) -> Any:
    x, y = torch.ones(2), torch.ones(2)
    dist.group.WORLD.allreduce([x, y]).wait()
    return [x.tolist(), y.tolist()]


def _other_op(rank: int) -> Any:
    x = torch.full((2,), 3.0)
    dist.all_reduce(x, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])
    return x.tolist()


def _other_dtype(rank: int) -> Any:
    x = torch.ones(4, dtype=[torch.float32, torch.int32][rank])
    dist.all_reduce(x)
    return (x == 2).all().item()


def _dtypes_of_one_call(_rank: int) -> Any:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2, dtype=torch.int64))


def _longer(rank: int) -> Any:
    if rank == 0:
        return dist.send(torch.ones(2), 1)
    x = torch.zeros(4)
    dist.recv(x, 0)
    return x.tolist()


def _tags(rank: int) -> Any:
    group = dist.new_group(timeout=LIMIT)
    if rank == 0:
        for tag in (1, 2):
            dist.send(torch.full((1,), float(tag)), 1, group, tag)
        return None
    x, y = torch.zeros(1), torch.zeros(1)
    dist.recv(y, 0, group, 2)
    dist.recv(x, 0, group, 1)
    return [x.item(), y.item()]


def _uneven_all_gather(rank: int) -> Any:
    out = [torch.zeros(2), torch.zeros(3)]
    dist.all_gather(out, torch.ones(2 + rank))
    return [x.tolist() for x in out]


def _uneven_all_to_all(rank: int) -> Any:
    out = [torch.zeros(1 + r + rank) for r in range(2)]
    dist.all_to_all(out, [torch.ones(1 + r + rank) for r in range(2)])
    return [len(x) for x in out]


def _integers(_rank: int) -> Any:
    found = []
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        x = torch.ones(2).to(dtype)
        try:
            dist.all_reduce(x)
            found.append(x.tolist())
        except RuntimeError:  # the backend rejects this dtype, which is the result here
            found.append(None)
    return found


def _float8(_rank: int) -> Any:
    dist.broadcast(torch.ones(2).to(torch.float8_e4m3fn), 0)
    return "sent"


def _premul(_rank: int) -> Any:
    x = torch.ones(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
    return x.tolist()


def _average_of_integers(_rank: int) -> Any:
    x = torch.tensor([4])
    try:
        dist.all_reduce(x, dist.ReduceOp.AVG)
    except RuntimeError as error:
        return [type(error).__name__, x.item()]


def _late_rank(rank: int) -> Any:
    group = dist.new_group(timeout=LIMIT)
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            found = [isinstance(error, TimeoutError), "rank 1" in str(error)]
        dist.distributed_c10d._get_default_store().set("late", "over")
        return found
    return dist.distributed_c10d._get_default_store().wait(["late"])


def _monitored(_rank: int) -> Any:
    dist.monitored_barrier()
    return "passed"


def _batch(rank: int) -> Any:
    x, peer = torch.zeros(1), 1 - rank
    ops = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, x, peer)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    return len(works)


def _sparse_max(_rank: int) -> Any:
    dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX)


# For each rank, or one for both: gloo's, pycomm's.
CASES: list[tuple[Case, Any, Any]] = [
    (_strided, [[2, 2], [2, 2], [1, 1], [1, 1]], [[2, 1]] * 4),
    (_two_tensors, [[4, 4], [4, 4]], "InvalidArgument"),
    (_other_op, [6, 6], "Mismatch"),
    (_other_dtype, False, "Mismatch"),
    (_dtypes_of_one_call, BROKEN, "InvalidArgument"),
    (_longer, (None, [1, 1, 0, 0]), (None, "Mismatch")),
    (_tags, (BROKEN, BROKEN), (None, [1, 2])),
    (_uneven_all_gather, BROKEN, [[1, 1], [1, 1, 1]]),
    (_uneven_all_to_all, BROKEN, ([1, 2], [2, 3])),
    (_integers, [None] * 4, [[2, 2]] * 4),
    (_float8, BROKEN, "sent"),
    (_premul, BROKEN, [4, 4]),
    (_average_of_integers, ["RuntimeError", 8], ["Unsupported", 4]),
    (_late_rank, ([False, False], None), ([True, True], None)),
    (_monitored, "passed", "passed" if TORCH >= (2, 14) else "ValueError"),
    (_batch, 2, 1),
    (_sparse_max, BROKEN, "Unsupported"),
]


def _outcome(case: Case) -> Any:
    try:
        return case(dist.get_rank())
    except Exception as error:  # its type is the result
        return type(error).__name__


@pytest.mark.parametrize("backend", ["gloo", "pycomm"])
@pytest.mark.parametrize("row", CASES, ids=lambda row: row[0].__name__.strip("_"))
def test_differences_from_gloo(
    row: tuple[Case, Any, Any], backend: str, tmp_path: Path, no_leaks: Any
) -> None:
    case, gloo, pycomm = row
    wanted = gloo if backend == "gloo" else pycomm
    found = POOLS.of(2, no_leaks).run(tmp_path, backend, _outcome, case)
    assert found == (list(wanted) if isinstance(wanted, tuple) else [wanted, wanted])
