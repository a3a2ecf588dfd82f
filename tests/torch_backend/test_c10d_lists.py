"""Lists of overlapping tensors, of several dtypes, and empty lists, in every verb with a list.

The functions `_...` run in the processes of torch_ranks.py. Where gloo has the verb, the fixture
`both` compares with it.
"""

import pytest
import torch
import torch.distributed as dist

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import (  # noqa: F401 - fixtures
    SIZES,
    Run,
    both_fixture,
    in_processes,
    run_fixture,
    same,
    values,
)

from pycomm.errors import InvalidArgument


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _backend() -> dist.ProcessGroup:
    return _group()._get_backend(torch.device("cpu"))


def _all_reduces() -> list[torch.Tensor]:
    """[x, x], overlapping views, neighbours, and columns of one matrix that interleave."""
    rank = dist.get_rank()
    results = []
    for views in (
        lambda x: [x, x],
        lambda x: [x[:8], x[4:]],
        lambda x: [x[4:], x[:8]],
        lambda x: [x[::2], x[:8], x[8:]],
        lambda x: [x[:4], x[4:8], x[8:]],
        lambda x: [x.view(6, 2)[:, 0], x.view(6, 2)[:, 1]],
    ):
        x = values(rank, (12,), torch.float32)
        dist.all_reduce_coalesced(views(x))
        results.append(x)
    return results


@SIZES
def test_all_reduce_of_a_list_whose_tensors_overlap(both: Run, size: int) -> None:
    for results in both(size, _all_reduces):
        total = sum(values(r, (12,), torch.float32) for r in range(size))
        for got in results:
            same(got, total, "every element is summed once")


@in_processes(2)
def test_all_reduce_twice_in_the_coalescing_manager() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank + 1))
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)
    same(x, torch.full((4,), size * (size + 1) / 2), "summed once")


@in_processes(2, 3)
def test_lists_of_pairs_that_overlap() -> None:
    """An output that is an input of the next call in the list; disjoint views of one storage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = _backend()
    every = [values(r, (size,), torch.float32) for r in range(size)]
    memory = every[rank].clone()
    first, second = memory, torch.empty(size)
    _group().allgather_into_tensor_coalesced(
        [first, second], [torch.full((1,), 9.0), memory[:1]]
    ).wait()
    same(first, torch.full((size,), 9.0), "all_gather: what the first call wrote")
    same(second, torch.stack([e[0] for e in every]), "all_gather: read before it was written")
    memory, wanted = every[rank].clone(), sum(every)
    out = torch.zeros(1)
    options = dist.ReduceScatterOptions()
    _group().reduce_scatter_tensor_coalesced(
        [memory[:1], out], [torch.ones(size), memory], options
    ).wait()
    assert memory[0] == size, "reduce_scatter: what the first call wrote"
    same(out, wanted[rank : rank + 1], "reduce_scatter: read before it was written")
    both = torch.zeros(2 * size)
    _group().allgather_into_tensor_coalesced(
        [both[:size], both[size:]], [every[rank][:1], every[rank][1:2]]
    ).wait()
    same(both, torch.cat([torch.stack([e[i] for e in every]) for i in (0, 1)]), "neighbours")
    outputs = [[torch.zeros(2), torch.zeros(2)] for _ in range(size)]
    for of_rank in outputs:
        of_rank[1] = of_rank[0]
    inputs = [torch.full((2,), rank + 0.5), torch.full((2,), 1.0)]
    backend.allgather_coalesced(outputs, inputs).wait()
    for of_rank in outputs:
        same(of_rank[0], torch.ones(2), "the last of the list")


def _outputs() -> list[torch.Tensor]:
    """One tensor as the output for all ranks: the last rank's value remains."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((4,), float(rank))
    one = torch.empty(4)
    dist.all_gather([one] * size, mine)
    results = [one]
    memory = torch.empty(4 + size)
    dist.all_gather([memory[i : i + 4] for i in range(size)], mine)
    results.append(memory[: 3 + size])
    halves = torch.empty(4 * size)
    dist.all_gather(list(halves.view(size, 4)), mine)
    dist.all_gather(list(halves.view(4, size).t()), mine)
    results.append(halves)
    return results


@SIZES
def test_outputs_that_overlap(both: Run, size: int) -> None:
    both(size, _outputs)


@in_processes(2, 3)
def test_exchanges_in_place() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    memory = torch.arange(size, dtype=torch.float32) + 10 * rank
    dist.all_to_all(list(memory.view(size, 1)), list(memory.view(size, 1)))
    wanted = torch.arange(size, dtype=torch.float32) * 10 + rank
    same(memory, wanted, "in place")
    one = torch.empty(1)
    dist.all_to_all([one] * size, list(memory.view(size, 1)))
    assert one == 10 * rank + size - 1, "the last rank's"
    memory = torch.arange(size, dtype=torch.float32)
    dist.reduce_scatter(memory[:1], list(memory.view(size, 1)))
    assert memory[0] == size * rank
    x = torch.ones(2)
    dist.reduce_scatter(torch.empty(2), [x] * size)  # only read


@in_processes(2)
def test_batches_whose_calls_overlap() -> None:
    rank = dist.get_rank()
    backend = _backend()
    x = torch.ones(8)
    matrix = torch.zeros(4, 2)
    for views in ([x, x], [x[:5], x[4:]], [x[::2], x[:3]]):
        backend._start_coalescing()
        for view in views:
            backend.allreduce([view])
        with pytest.raises(InvalidArgument, match="do not overlap"):
            backend._end_coalescing()
    assert (x == 1).all(), "no data was sent"
    for views in ([x[:4], x[4:]], [x[::2], x[1::2]], list(matrix.t())):
        backend._start_coalescing()
        for view in views:
            backend.allreduce([view])
        backend._end_coalescing().wait()
    assert (x == 4).all(), "two ranks, twice"
    peer = 1 - rank
    for one, other in ((x, x), (x[:5], x[4:])):
        ops = [dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, other, peer)]
        with pytest.raises(InvalidArgument, match="do not overlap"):
            dist.batch_isend_irecv(ops)
    twice, first = torch.zeros(8), torch.full((8,), 7.0)
    ops = [dist.P2POp(dist.isend, sent, peer) for sent in (first, x)]
    ops += [dist.P2POp(dist.irecv, twice, peer) for _ in range(2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (twice == 4).all(), "the last of the list stays"
    ops = [dist.P2POp(dist.irecv, part, peer) for part in (twice[:5], twice[:6])]
    with pytest.raises(InvalidArgument, match="do not overlap"):
        dist.batch_isend_irecv(ops)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.isend, x, peer)]
    got = torch.empty(8, 2)
    ops += [dist.P2POp(dist.irecv, column, peer) for column in got.t()]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (got == 4).all()


@in_processes(2, 3)
def test_lists_of_several_dtypes_and_empty_ones_are_refused() -> None:
    size = dist.get_world_size()
    backend = _backend()
    a, b, wide = torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2 * size)
    outputs = [a.clone() for _ in range(size)]
    mixed = [b, *outputs[1:]]
    scatter = dist.ReduceScatterOptions()
    calls = {
        "all_reduce": lambda: backend.allreduce_coalesced([a, b]),
        "all_gather": lambda: backend.allgather([mixed], [a]),
        "all_gather lists": lambda: backend.allgather_coalesced([[a, b]] * size, [a, b]),
        "all_gather outputs": lambda: backend.allgather_coalesced([[a, b]] * size, [a, a]),
        "into": lambda: _group().allgather_into_tensor_coalesced([wide, wide.int()], [a, b]),
        "reduce_scatter": lambda: backend.reduce_scatter([a], [mixed], scatter),
        "from": lambda: _group().reduce_scatter_tensor_coalesced(
            [a, b], [wide, wide.int()], scatter
        ),
        "all_to_all": lambda: backend.alltoall(outputs, mixed),
        "all_to_all outputs": lambda: backend.alltoall(mixed, outputs),
    }
    for what, call in calls.items():
        with pytest.raises(InvalidArgument, match=r"Float and Int|Int and Float") as caught:
            call()
        assert "in one call" in str(caught.value), what
    empty = {
        "all_reduce": lambda: backend.allreduce_coalesced([]),
        "one": lambda: backend.allreduce([]),
        "broadcast": lambda: backend.broadcast([]),
        "all_gather": lambda: backend.allgather([[]], [a]),
        "all_gather inputs": lambda: backend.allgather([outputs], []),
        "all_gather lists": lambda: backend.allgather_coalesced([[]] * size, []),
        "reduce_scatter": lambda: backend.reduce_scatter([a], [[]], scatter),
        "all_to_all": lambda: backend.alltoall([], []),
    }
    for what, call in empty.items():
        try:
            call()
        except InvalidArgument:  # as expected
            continue
        pytest.fail(f"{what}: no InvalidArgument for an empty list")
    dist.all_reduce(a)
    assert (a == size).all(), "the group still works"
