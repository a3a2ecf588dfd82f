"""The forms of the verbs: coalesced, functional, compiled, sparse, uneven, futures, titles.

The functions `_...` run in the processes of torch_ranks.py. test_c10d.py has the basic verbs on
every dtype, test_c10d_groups.py has groups.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import SIZES, Run, in_processes, run_fixture, same, values  # noqa: F401 - a fixture

from pycomm import torch_backend
from pycomm.errors import InvalidArgument, Mismatch, Unsupported


def _calls() -> float:
    return torch_backend.stats()["calls"]


@in_processes(2, 3)
def test_coalesced_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [[values(r, s, torch.float32) for s in ((3,), (5, 2))] for r in range(size)]
    total = [sum(e[i] for e in every) for i in range(2)]
    mine = [x.clone() for x in every[rank]]
    dist.all_reduce_coalesced(mine)
    for got, wanted in zip(mine, total, strict=True):
        same(got, wanted, "all_reduce_coalesced")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    mine = [x.clone() for x in every[rank]]
    gathered = [torch.empty(size * x.shape[0], *x.shape[1:]) for x in mine]
    backend._start_coalescing()
    backend.allreduce(mine[:1])
    backend.broadcast(mine[1:])
    backend._allgather_base(gathered[0], every[rank][0])
    work = backend._end_coalescing()
    work.wait()
    same(mine[0], total[0], "a mixed batch: all_reduce")
    same(mine[1], every[0][1], "a mixed batch: broadcast")
    same(gathered[0], torch.cat([e[0] for e in every]), "a mixed batch: all_gather")
    with pytest.raises(InvalidArgument, match="without a start"):
        backend._end_coalescing()


@in_processes(2, 3)
def test_batch_isend_irecv() -> None:
    """Every rank sends to every other rank, two tensors with tags, in a rank-specific order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [r for r in range(size) if r != rank]
    got = {(r, tag): torch.empty(1000) for r in others for tag in (0, 5)}
    ops = [dist.P2POp(dist.irecv, x, r, tag=tag) for (r, tag), x in got.items()]
    for r in others[:: 1 if rank % 2 else -1]:
        for tag in (5, 0) if rank % 2 else (0, 5):
            out = torch.full((1000,), 100.0 * rank + tag)
            ops.insert(0 if rank % 2 else len(ops), dist.P2POp(dist.isend, out, r, tag=tag))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for (r, tag), x in got.items():
        assert (x == 100 * r + tag).all()


def _step(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    size = dist.get_world_size(group)
    total = functional.all_reduce(x * 2, "sum", group)
    gathered = functional.all_gather_tensor(total + 1, 0, group)
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    turned = functional.all_to_all_single(gathered, None, None, group)
    both = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    return total, gathered, part / size, turned, *both, functional.broadcast(x, 0, group)


def _compiled(backend: str) -> None:
    x = values(dist.get_rank(), (4, 3), torch.float32)
    wanted = _step(x, dist.group.WORLD)
    compiled = torch.compile(_step, backend=backend, fullgraph=True)
    before = _calls()
    got = compiled(x, dist.group.WORLD)
    for a, b in zip(got, wanted, strict=True):
        same(a + 0, b + 0, backend)
    assert _calls() >= before + 6, "pycomm's engine ran it"


def test_compiled_functional_collectives(run: Run) -> None:
    run(2, _compiled, "aot_eager")


def test_collectives_compiled_by_inductor(run: Run) -> None:
    run(2, _compiled, "inductor")


def _sparse_tensor(rank: int, dtype: torch.dtype, dense: bool) -> torch.Tensor:
    count = rank * 3  # rank 0 has none
    made = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 4, (2, count), generator=made)  # some occur twice
    shape = (count, 2) if dense else (count,)
    numbers = torch.randint(1, 5, shape, generator=made).to(dtype)
    return torch.sparse_coo_tensor(indices, numbers, (4, 4, 2) if dense else (4, 4))


@in_processes(2, 3)
def test_sparse_all_reduce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.int64):
        for dense in (False, True):
            wanted = sum(_sparse_tensor(r, dtype, dense).to_dense() for r in range(size))
            x = _sparse_tensor(rank, dtype, dense)
            dist.all_reduce(x)
            assert x.is_sparse
            same(x.to_dense(), wanted, (dtype, dense))
            x = _sparse_tensor(rank, dtype, dense)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            same(x.to_dense(), wanted, (dtype, dense, "async"))
            same(work.get_future().value()[0].to_dense(), wanted, "future")
    # torch's own layer above the backend reduces a copy of a complex sparse tensor and drops it.
    x = _sparse_tensor(rank, torch.complex64, False)
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([x]).wait()
    wanted = sum(_sparse_tensor(r, torch.complex64, False).to_dense() for r in range(size))
    same(x.to_dense(), wanted, "complex")
    x = torch.eye(3 + rank).to_sparse()
    with pytest.raises(Mismatch, match="another shape"):
        dist.all_reduce(x)
    same(x.to_dense(), torch.eye(3 + rank), "unchanged")
    with pytest.raises(Unsupported, match="summed"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(Unsupported, match="sparse_coo"):
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.eye(3).to_sparse_csr()])
    dense = torch.ones(2)
    dist.all_reduce(dense)
    assert (dense == size).all()


@in_processes(2)
def test_sparse_gradients_through_ddp() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    table = torch.nn.Embedding(10, 3, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1)
    model = torch.nn.parallel.DistributedDataParallel(table)
    model(torch.tensor([rank, rank, 9])).sum().backward()
    grad = table.weight.grad
    assert grad.is_sparse
    wanted = torch.zeros(10, 3)
    for r in range(size):
        wanted[r] += 2 / size
    wanted[9] += 1
    torch.testing.assert_close(grad.to_dense(), wanted)


@in_processes(2, 3)
def test_lists_of_uneven_sizes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for width in (1, 50_000):
        for dtype in (torch.float32, torch.complex64, torch.int8):
            every = [values(r, (r * width, 2), dtype) for r in range(size)]  # rank 0 sends nothing
            outputs = [torch.empty_like(e) for e in every]
            dist.all_gather(outputs, every[rank])
            for got, wanted in zip(outputs, every, strict=True):
                same(got, wanted, ("all_gather", width, dtype))
            views = [torch.zeros(2, e.shape[0], dtype=dtype).t() for e in every]
            dist.all_gather(views, every[rank])
            for got, wanted in zip(views, every, strict=True):
                same(got, wanted, ("all_gather into views", width, dtype))
        parts = [
            [values(10 * r + i, (i * width, 2), torch.float32) for i in range(size)]
            for r in range(size)
        ]
        out = torch.empty(rank * width, 2)
        dist.reduce_scatter(out, [p.clone() for p in parts[rank]])
        same(out, sum(parts[r][rank] for r in range(size)), ("reduce_scatter", width))
        outputs = [torch.empty((r + 1) * width, 2) for r in range(size)]
        dist.all_to_all(
            outputs, [torch.full(((rank + 1) * width, 2), 10.0 * rank + i) for i in range(size)]
        )
        for r, got in enumerate(outputs):
            same(got, torch.full(((r + 1) * width, 2), 10.0 * r + rank), ("all_to_all", width))
    with pytest.raises(InvalidArgument, match="elements"):
        dist.all_gather([torch.empty(r + 2) for r in range(size)], torch.empty(rank + 3))
    with pytest.raises(InvalidArgument, match="splits"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size)


@in_processes(3)
def test_all_to_all_whose_splits_differ_is_a_mismatch_on_every_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    gives, takes = [13] * size, [13] * size
    if rank == 1:
        gives[2] = 17
    message = r"rank 1 \(.* sends 17 elements to rank 2 \(.*, which expects 13;"
    out = torch.full((sum(takes),), -1.0)
    with pytest.raises(Mismatch, match=message):
        dist.all_to_all_single(out, torch.ones(sum(gives)), takes, gives)
    assert (out == -1).all()
    outputs = [torch.full((n,), -1.0) for n in takes]
    with pytest.raises(Mismatch, match=message):
        dist.all_to_all(outputs, [torch.ones(n) for n in gives])
    assert all((x == -1).all() for x in outputs)
    gives[2] = 13
    dist.all_to_all_single(out, torch.full((sum(gives),), float(rank)), takes, gives)
    same(out, torch.arange(float(size)).repeat_interleave(13), "the group continues")


@in_processes(2, 3)
def test_reduce_scatter_and_reduce_of_every_op() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    every = [values(r, (size, 4), torch.float32) for r in range(size)]
    ops: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
        (dist.ReduceOp.SUM, lambda x: x.sum(0)),
        (dist.ReduceOp.MAX, lambda x: x.amax(0)),
        (dist.ReduceOp.MIN, lambda x: x.amin(0)),
        (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
        (dist.ReduceOp.AVG, lambda x: x.mean(0)),
        (dist._make_nccl_premul_sum(0.5), lambda x: x.sum(0) / 2),
        (dist._make_nccl_premul_sum(torch.tensor([2.0])), lambda x: 2 * x.sum(0)),
    ]
    for op, plain in ops:
        wanted = plain(torch.stack([e[rank] for e in every]))
        out = torch.empty(4)
        dist.reduce_scatter(out, list(every[rank]), op)
        torch.testing.assert_close(out, wanted)
        out = torch.empty(4)
        work = dist.reduce_scatter_tensor(out, every[rank].flatten(), op, async_op=True)
        work.wait()
        torch.testing.assert_close(out, wanted)
        x = every[rank].clone()
        dist.reduce(x, 1, op)
        root = plain(torch.stack(every)) if rank == 1 else every[rank]
        torch.testing.assert_close(x, root)
    strided = torch.empty(8)[::2]
    dist.reduce_scatter(strided, [e.clone() for e in every[rank]])
    same(strided.clone(), sum(e[rank] for e in every), "into a view")
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.BAND):
        with pytest.raises((Unsupported, ValueError), match="complex"):
            dist.all_reduce(torch.ones(2, dtype=torch.complex64), op)
    out = torch.empty(2, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, torch.full((2 * size,), 1 + 2j, dtype=torch.complex64))
    assert (out == size * (1 + 2j)).all()


@in_processes(2, 3)
def test_recv_from_any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            x = torch.empty(3)
            source = dist.recv(x, tag=4)
            assert (x == source).all()
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
        x = torch.empty(3)
        work = dist.irecv(x)  # another tag
        work.wait()
        assert work._source_rank() == 1
        assert (x == 7).all()
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=4)
        if rank == 1:
            dist.send(torch.full((3,), 7.0), 0)
    pair = dist.new_group([1, 0])
    if rank == 1:
        assert dist.recv(torch.empty(2), group=pair) == 0, "the rank in the world"
    elif rank == 0:
        dist.send(torch.ones(2), 1, group=pair)
        dist.send(torch.ones(2), 1)
    if rank == 1:
        work = dist.irecv(torch.empty(2), 0)
        work.wait()
        assert work._source_rank() == 0
    with pytest.raises(Unsupported, match="coalesced"):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend._start_coalescing()
        try:
            backend.recv_anysource([torch.empty(1)], 0)
        finally:
            backend._end_coalescing()


@in_processes(2)
def test_lists_of_objects_as_messages() -> None:
    rank = dist.get_rank()
    things = [{"a": rank}, "text", list(range(1000))]
    if rank == 0:
        dist.send_object_list(things, dst=1)
    elif rank == 1:
        got: list[Any] = [None] * 3
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [{"a": 0}, "text", list(range(1000))]
        dist.send_object_list(["back"], dst=0)
    if rank == 0:
        answer: list[Any] = [None]
        dist.recv_object_list(answer, src=1)
        assert answer == ["back"]


@in_processes(2, 3)
def test_futures_have_lists_and_errors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, out = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(size)]
    works = {
        "all_reduce": dist.all_reduce(x.clone(), async_op=True),
        "all_gather": dist.all_gather(out, x, async_op=True),
        "gather": dist.gather(x, out if rank == 0 else None, dst=0, async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    counts = {}
    for name, work in works.items():
        value = work.get_future().wait()
        assert isinstance(value, list), name
        assert all(isinstance(t, torch.Tensor) for t in value), name
        counts[name] = len(value)
    on_root = size if rank == 0 else 0
    assert counts == {"all_reduce": 1, "all_gather": size, "gather": on_root, "barrier": 0}
    work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
    chained = work.get_future().then(lambda f: f.value()[0] + 1)
    with pytest.raises(RuntimeError, match="Mismatch"):
        chained.wait()
    with pytest.raises(Mismatch):
        work.get_future().wait()


def _titles() -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    rank, size = dist.get_rank(), dist.get_world_size()
    x, out = torch.ones(size, 2), [torch.empty(size, 2) for _ in range(size)]
    part = torch.empty(2)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(x)
        dist.reduce(x, 0)
        dist.broadcast(x, 0, async_op=True).wait()
        dist.all_gather(out, x)
        dist.all_gather_into_tensor(torch.empty(size * size, 2), x)
        dist.gather(x, out if rank == 0 else None)
        dist.scatter(x, out if rank == 0 else None)
        dist.reduce_scatter(part, list(x))
        dist.reduce_scatter_tensor(part, x.flatten())
        dist.all_to_all(list(torch.empty(size, 2)), list(x))
        dist.all_to_all_single(torch.empty(size, 2), x)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.recv(x)
    return sorted(f"{e.name} {e.input_shapes}" for e in profiler.events() if "pycomm:" in e.name)


def test_profiler_titles(run: Run) -> None:
    both = [
        "pycomm:all_gather [[2, 2]]",
        "pycomm:all_gather [[2, 2]]",
        "pycomm:all_reduce [[2, 2]]",
        "pycomm:all_to_all [[2, 2]]",
        "pycomm:all_to_all [[2], [2]]",
        "pycomm:barrier []",
        "pycomm:broadcast [[2, 2]]",
        "pycomm:gather [[2, 2]]",
        "pycomm:reduce [[2, 2]]",
        "pycomm:reduce_scatter [[2], [2]]",
        "pycomm:reduce_scatter [[4]]",
    ]
    first, second = run(2, _titles)
    sends = ["pycomm:send [[2, 2]]"] * 2
    receives = ["pycomm:recv [[2, 2]]", "pycomm:recvAnySource [[2, 2]]"]
    assert first == sorted([*both, "pycomm:scatter [[2, 2], [2, 2]]", *sends])
    assert second == sorted([*both, "pycomm:scatter [[2, 2]]", *receives])


@in_processes(2)
def test_sequence_numbers() -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    first = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier(async_op=True).wait()
    dist.all_gather_object([None] * dist.get_world_size(), "x")
    last = backend._get_sequence_number_for_group()
    assert last > first + 2
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, last)
    assert len(set(numbers)) == 1, "ranks count equally"
