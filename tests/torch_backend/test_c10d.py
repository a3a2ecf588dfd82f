"""Every verb of torch.distributed on the backend "pycomm" against a simple model, in real
processes.

The functions `_...` run in the processes of torch_ranks.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import SIZES, Run, in_processes, run_fixture, same, values  # noqa: F401 - a fixture

from pycomm.errors import InvalidArgument, Unsupported

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool, torch.uint16, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (7,), (33, 5), (70_001,)]


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def _reduced(op: str, values: list[torch.Tensor]) -> torch.Tensor:
    result = values[0].clone()
    for value in values[1:]:
        result = OPS[op](result, value)
    return result


@in_processes(2, 3)
def test_all_reduce_of_every_dtype_and_op() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
            for op in OPS:
                if op.startswith("B") and dtype not in INTEGERS:
                    continue
                if dtype in COMPLEX and op != "SUM":
                    continue
                got = values(rank, shape, dtype)
                dist.all_reduce(got, getattr(dist.ReduceOp, op))
                wanted = _reduced(op, [values(r, shape, dtype) for r in range(size)])
                same(got, wanted, (shape, dtype, op))
    for dtype in [torch.float32, torch.complex64]:
        got = values(rank, (9,), dtype)
        dist.all_reduce(got, dist.ReduceOp.AVG)
        torch.testing.assert_close(
            got, sum(values(r, (9,), dtype) for r in range(size)) / size, rtol=1e-6, atol=0
        )
    scaled = values(rank, (9,), torch.float32)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    same(scaled, 0.5 * _reduced("SUM", [values(r, (9,), torch.float32) for r in range(size)]), 0)
    wide = torch.tensor([2**63 + rank, 1], dtype=torch.uint64)
    dist.all_reduce(wide, dist.ReduceOp.BOR)
    assert wide.tolist() == [2**63 + (1 if size == 2 else 3), 1]


@in_processes(2, 3)
def test_data_movement_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        for dtype in MOVED:
            every = [values(r, shape, dtype) for r in range(size)]
            for src in range(size):
                got = every[rank].clone()
                dist.broadcast(got, src)
                same(got, every[src], ("broadcast", shape, dtype))
            outputs = [torch.empty_like(every[0]) for _ in range(size)]
            dist.all_gather(outputs, every[rank])
            for got, wanted in zip(outputs, every, strict=True):
                same(got, wanted, ("all_gather", shape, dtype))
            if shape:
                flat = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_into_tensor(flat, every[rank])
                same(flat.view(torch.uint8), torch.cat([e.view(torch.uint8) for e in every]), shape)
            listed = [torch.empty_like(e) for e in every] if rank == 1 else None
            dist.gather(every[rank], listed, dst=1)
            for got, wanted in zip(listed or [], every if listed else [], strict=True):
                same(got, wanted, ("gather", shape, dtype))
            if hasattr(dist, "gather_single"):  # from torch 2.14 on
                flat = torch.empty((size, *shape), dtype=dtype) if rank == 1 else None
                dist.gather_single(every[rank], flat, dst=1)
                for got, wanted in zip([] if flat is None else flat, every, strict=rank == 1):
                    same(got, wanted, ("gather_single", shape, dtype))
            got = torch.empty_like(every[0])
            dist.scatter(got, [e.clone() for e in every] if rank == 0 else None, src=0)
            same(got, every[rank], ("scatter", shape, dtype))


@in_processes(2, 3)
def test_reduce_and_reduce_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES:
        full = (size, *shape)
        every = [values(r, full, torch.float32) for r in range(size)]
        total = _reduced("SUM", every)
        for dst in range(size):
            got = every[rank].clone()
            dist.reduce(got, dst)
            same(got, total if rank == dst else every[rank], ("reduce", shape))
        out = torch.empty(shape)
        dist.reduce_scatter(out, list(every[rank].clone()))
        same(out, total[rank], ("reduce_scatter", shape))
        flat, out = every[rank].flatten(), torch.empty(total[rank].numel())
        dist.reduce_scatter_tensor(out, flat)
        same(out, total[rank].flatten(), ("reduce_scatter_tensor", shape))
        own = flat.chunk(size)[rank] if flat.numel() else flat
        dist.reduce_scatter_tensor(own, flat)  # in place
        same(own, total[rank].flatten(), ("in place", shape))


@in_processes(2, 3)
def test_all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows, width in [(0, 3), (1, 1), (4, 5), (3, 40_000)]:
        every = [values(r, (size * rows, width), torch.float32) for r in range(size)]
        got = torch.empty_like(every[rank])
        dist.all_to_all_single(got, every[rank])
        wanted = torch.cat([e[rank * rows : (rank + 1) * rows] for e in every])
        same(got, wanted, ("single", rows, width))
        outputs = [torch.empty(rows, width) for _ in range(size)]
        dist.all_to_all(
            outputs,
            [e.contiguous() for e in every[rank].split(rows)]
            if rows
            else [torch.empty(0, width) for _ in range(size)],
        )
        same(torch.cat(outputs), wanted, ("list", rows, width))
    # Rank a sends a + b rows to rank b.
    splits = [rank + peer for peer in range(size)]
    uneven = torch.full((sum(splits), 2), float(rank))
    got = torch.empty_like(uneven)
    dist.all_to_all_single(got, uneven, splits, splits)
    same(got, torch.cat([torch.full((rank + p, 2), float(p)) for p in range(size)]), "uneven")


@in_processes(2, 3)
def test_coalesced_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [[values(r, s, torch.float32) for s in ((3,), (5, 2))] for r in range(size)]
    mine = [x.clone() for x in every[rank]]
    with dist._coalescing_manager():
        for x in mine:
            dist.all_reduce(x)
    for i, got in enumerate(mine):
        same(got, _reduced("SUM", [e[i] for e in every]), "all_reduce")
    gathered = [torch.empty(size * x.shape[0], *x.shape[1:]) for x in mine]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, x in zip(gathered, every[rank], strict=True):
            dist.all_gather_into_tensor(out, x)
    manager.wait()
    for i, got in enumerate(gathered):
        same(got, torch.cat([e[i] for e in every]), "all_gather")
    lists = [[torch.empty_like(x) for x in mine] for _ in range(size)]
    dist.all_gather_coalesced(lists, every[rank])
    for listed, wanted in zip(lists, every, strict=True):
        for got, each in zip(listed, wanted, strict=True):
            same(got, each, "all_gather_coalesced")
    scattered = [torch.empty_like(x) for x in mine]
    with dist._coalescing_manager():
        for out, x in zip(scattered, gathered, strict=True):
            dist.reduce_scatter_tensor(out, x)
    for i, got in enumerate(scattered):
        same(got, size * every[rank][i], "reduce_scatter")


@in_processes(2, 3)
def test_any_layout_is_correct() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) // 2
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[::2],
        lambda x: x.t(),
        lambda x: x[1:, 2:5],
        lambda x: x[:, 3],
        lambda x: x.unsqueeze(1).transpose(0, 2),
    ]
    for view in views:
        memory = torch.full((8, 9), -7.0)
        marked = memory.clone()
        view(memory).fill_(rank + 1)
        view(marked).fill_(total)
        dist.all_reduce(view(memory))
        same(memory, marked, "all_reduce: elements beside the view")
        view(marked).fill_(1)
        dist.broadcast(view(memory.fill_(-7).clone()), 0)  # on a copy: only the layout matters
        view(memory).fill_(rank + 1)
        dist.broadcast(view(memory), 0)
        same(memory, marked, "broadcast: elements beside the view")
        outs = [view(torch.full((8, 9), -7.0)) for _ in range(size)]
        dist.all_gather(outs, view(torch.full((8, 9), float(rank))))
        assert all((out == r).all() for r, out in enumerate(outs))
    conjugate = torch.full((3,), complex(1, rank + 1)).conj()
    # torch's own layers above the backend reject conjugate views, or reduce a copy and drop it.
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([conjugate]).wait()
    assert conjugate.tolist() == [complex(size, -total)] * 3
    flat = torch.arange(size * 4.0)
    dist.all_gather_into_tensor(flat, flat[1:5])  # the input overlaps other elements
    assert flat.tolist() == [1.0, 2.0, 3.0, 4.0] * size


@in_processes(2, 3)
def test_refused_calls_move_no_data() -> None:
    """Every error is raised before data moves: the group works afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    narrow = torch.ones(1)
    with pytest.raises(InvalidArgument, match="share memory"):
        dist.all_reduce(narrow.expand(4))
    with pytest.raises(InvalidArgument, match="share memory"):
        dist.all_gather([narrow.expand(4) for _ in range(size)], torch.ones(4))
    with pytest.raises(InvalidArgument, match="elements"):
        dist.all_gather_into_tensor(torch.empty(4 * size + 1), torch.ones(4))
    with pytest.raises(Unsupported, match="dense"):
        dist.group.WORLD._get_backend(torch.device("cpu")).broadcast([torch.ones(2).to_sparse()])
    with pytest.raises(Unsupported, match="complex"):
        dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.PRODUCT)
    assert narrow.item() == 1
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [size * (size - 1) / 2] * 3


@in_processes(2, 3)
def test_send_and_recv() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(torch.arange(5.0), 1)
        dist.send(torch.tensor(3), 1, tag=7)
    elif rank == 1:
        x, y = torch.empty(10)[::2], torch.tensor(0)
        assert dist.recv(x, 0) == 0
        dist.recv(y, 0, tag=7)
        assert x.tolist() == [0, 1, 2, 3, 4]
        assert y.item() == 3
    # Everyone sends more than any buffer holds before anyone asks to receive.
    right, left = (rank + 1) % size, (rank - 1) % size
    out, got = torch.full((3_000_000,), float(rank)), torch.empty(3_000_000)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, got, left)]
    )
    for work in works:
        work.wait()
    assert (got == left).all()


@in_processes(2, 3)
def test_exchange_by_isend_and_irecv() -> None:
    """All ranks receive before any sends, and make a collective in between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(size) if r != rank]
    for count in (1, 1000, 1_000_000):
        got = {r: torch.empty(count) for r in others}
        receives = {r: dist.irecv(x, r) for r, x in got.items()}
        dist.barrier()
        assert not any(work.is_completed() for work in receives.values())
        dist.barrier()
        sent = torch.full((count,), float(rank))
        sends = [dist.isend(sent, r) for r in others]
        for r in reversed(others):
            receives[r].wait()
            assert (got[r] == r).all()
        for work in sends:
            work.wait()


@in_processes(2, 3)
def test_object_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (10**rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    assert [g["rank"] for g in gathered] == list(range(size))
    assert len(gathered[-1]["text"]) == 10 ** (size - 1)
    shared = [mine, 5] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == [{"rank": 0, "text": "x"}, 5]
    on_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, on_root, dst=0)
    assert on_root is None or [g["rank"] for g in on_root] == list(range(size))
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"for {r}" for r in range(size)] if rank == 0 else None)
    assert received == [f"for {rank}"]
    dist.barrier()
