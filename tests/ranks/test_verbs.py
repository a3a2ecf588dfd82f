"""The verbs, for arrays of any layout."""

import weakref
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

import pycomm
from pycomm import Group, _core, errors
from pycomm._core import DTYPES
from pycomm._training.communicators import CommunicatorPool
from pycomm.testing import run_ranks

TRANSPORTS = ["local", "shm", "tcp"]
NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]
SHAPES = [(), (0,), (5,), (3, 4), (70_001,)]


def data(rank: int, shape: tuple[int, ...], dtype: str = "int64") -> Any:
    """Numbers that distinguish ranks and positions, and 0 and 1 for a bool."""
    count = int(np.prod(shape))
    return (
        ((np.arange(count) * 7 + rank * 31) % 101 % (2 if dtype == "bool" else 101))
        .astype(dtype)
        .reshape(shape)
    )


def odd(x: Any) -> Any:
    """The same elements in a noncontiguous layout, if there is one."""
    if x.ndim == 0 or x.size == 0:
        return x.copy()
    room = np.full((*x.shape, 3), 99, x.dtype)
    room[..., 1] = x
    return room[..., 1]


def result(call: Any, async_op: bool) -> Any:
    return call.result() if async_op else call


def every_verb(group: Group, dtype: str, async_op: bool, make: Any) -> None:
    """Each verb by each root, with `out` allocated and given, compared with NumPy."""
    n, me = group.size, group.rank
    assert (pycomm.size(), pycomm.rank(), len(group.peer_info())) == (n, me, n)
    for shape in SHAPES:
        if dtype != "int64" and shape == (70_001,):
            continue
        each = [data(r, shape, dtype) for r in range(n)]
        rows = [np.stack([data(r * n + i, shape, dtype) for i in range(n)]) for r in range(n)]
        options = {"group": group, "async_op": async_op}
        for root in range(n):
            x = make(each[me])
            got = result(pycomm.reduce(x, root, "max", **options), async_op)
            assert got is x
            wanted = np.maximum.reduce(each) if me == root else each[me]
            assert np.array_equal(x, wanted)

            x = make(each[me])
            for out in (None, make(np.zeros((n, *shape), dtype))):
                got = pycomm.gather(x, root, out if me == root else None, **options)
                got = result(got, async_op)
                assert got is None if me != root else np.array_equal(got, each)
                assert out is None or me != root or got is out
            assert np.array_equal(x, each[me])

            x = make(rows[me])
            for given in (x, x if me == root else None):
                out = make(np.zeros(shape, dtype)) if given is None or shape == (5,) else None
                got = result(pycomm.scatter(given, root, out, **options), async_op)
                assert np.array_equal(got, rows[root][me])
                assert got.shape == shape
                assert out is None or got is out
            assert np.array_equal(x, rows[me])

            got = result(pycomm.broadcast(make(each[me]), root, **options), async_op)
            assert np.array_equal(got, each[root])

        most = np.maximum.reduce
        x = make(each[me])
        assert np.array_equal(result(pycomm.all_gather(x, **options), async_op), each)
        got = result(pycomm.all_reduce(x, "max", **options), async_op)
        assert np.array_equal(got, most(each))
        x = make(rows[me])
        got = result(pycomm.reduce_scatter(x, "max", **options), async_op)
        assert np.array_equal(got, most(rows)[me])
        for out in (None, make(np.zeros((n, *shape), dtype))):
            got = result(pycomm.all_to_all(x, out, **options), async_op)
            assert np.array_equal(got, [row[me] for row in rows])
            assert out is None or got is out
        assert np.array_equal(x, rows[me])


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_verb_at_every_root(n: int, async_op: bool) -> None:
    run_ranks(n, every_verb, "int64", async_op, np.copy)


@pytest.mark.parametrize("async_op", [False, True])
def test_every_verb_with_arrays_that_are_not_contiguous(async_op: bool) -> None:
    run_ranks(3, every_verb, "int64", async_op, odd)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_verb_over_every_transport(transport: str) -> None:
    run_ranks(3, every_verb, "int64", False, np.copy, transport=transport)


def test_a_receive_that_waits_keeps_no_arrays_of_other_calls() -> None:
    def fn(group: Group) -> int:
        late = np.zeros(1)
        if group.rank == 0:
            waiting = pycomm.recv(late, 1, tag=9, group=group, async_op=True)
        arrays = []
        for _ in range(200):
            x = np.ones(2)
            pycomm.all_reduce(x, group=group, async_op=True).wait()
            arrays.append(weakref.ref(x))
            del x
        if group.rank == 0:
            waiting.wait()
        else:
            pycomm.send(late, 0, tag=9, group=group)
        return sum(array() is not None for array in arrays)

    assert max(run_ranks(2, fn)) < 50


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_verb_for_each_dtype(dtype: str) -> None:
    run_ranks(2, every_verb, dtype, False, np.copy)


def lengths_of(case: str, n: int) -> list[int]:
    return {
        "equal": [4] * n,
        "rising": list(range(n)),
        "one": [0] * (n - 1) + [9],
        "none": [0] * n,
        "large": [60_001 * (r % 2) + r for r in range(n)],
    }[case]


@pytest.mark.parametrize("case", ["equal", "rising", "one", "none", "large"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_gather_v(case: str, n: int) -> None:
    lengths = lengths_of(case, n)
    each = [data(r, (length, 3), "float32") for r, length in enumerate(lengths)]

    def fn(group: Group) -> None:
        for make in (np.copy, odd):
            x = make(each[group.rank])
            parts = pycomm.all_gather_v(x, group=group)
            assert isinstance(parts, list)
            memory = [part.__array_interface__["data"][0] for part in parts if part.size]
            assert memory == sorted(memory)
            assert len({id(part.base) for part in parts}) == 1
            given = [make(np.zeros_like(one)) for one in each]
            for async_op in (False, True):
                out = result(
                    pycomm.all_gather_v(x, given, group=group, async_op=async_op), async_op
                )
                assert out is given
                for one, part, wanted in zip(out, parts, each, strict=True):
                    assert np.array_equal(one, wanted)
                    assert np.array_equal(part, wanted)
                    one[...] = 0
            assert np.array_equal(x, each[group.rank])

    run_ranks(n, fn)


def test_all_gather_v_of_each_dtype_and_kind() -> None:
    torch = pytest.importorskip("torch")

    def fn(group: Group) -> None:
        for dtype in DTYPES:
            x = torch.ones(group.rank + 1, 2, dtype=getattr(torch, dtype))
            parts = pycomm.all_gather_v(x, group=group)
            assert [tuple(part.shape) for part in parts] == [(1, 2), (2, 2), (3, 2)]
            assert all(part.dtype == x.dtype and bool((part == 1).all()) for part in parts)
            out = [torch.zeros(2, i + 1, dtype=x.dtype).t() for i in range(3)]
            pycomm.all_gather_v(x, out, group=group)
            assert all(bool((part == 1).all()) for part in out)
            gathered = pycomm.gather(x[:1], 1, group=group)
            assert gathered is None or gathered.shape == (3, 1, 2)
            rows = torch.arange(3).to(x.dtype).reshape(3, 1)
            assert torch.equal(pycomm.scatter(rows, 2, group=group), rows[group.rank])
            swapped = pycomm.all_to_all(rows, group=group)
            assert torch.equal(swapped, rows[group.rank].expand(3, 1))

    run_ranks(3, fn)


@on_ranks(3)
def test_all_gather_v_whose_rows_differ_is_a_mismatch_on_every_rank(group: Group) -> None:
    cases = [
        (np.zeros((2, 3 + group.rank // 2)), "rank 0 3 float64, rank 2 4 float64"),
        (np.zeros((2, 2, 3) if group.rank else (2, 3, 2)), "another shape"),
        (np.zeros(2, "int32" if group.rank == 1 else "uint8"), "rank 1 1 int32"),
    ]
    for x, message in cases:
        with pytest.raises(errors.Mismatch, match=message):
            pycomm.all_gather_v(x, group=group)
    parts = pycomm.all_gather_v(np.zeros(group.rank), group=group)
    assert [len(part) for part in parts] == [0, 1, 2]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    "verb", ["all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"]
)
def test_an_input_may_share_memory_with_the_output(verb: str, async_op: bool) -> None:
    """At every place: apart, in this rank's row, in another one, and across two; with shared memory
    and without."""

    def fn(group: Group, first: int) -> Any:
        me, root, options = group.rank, 1, {"group": group, "async_op": async_op}
        memory = np.arange(20, dtype=np.int32) + 100 * me
        rows, row = memory[4:16].reshape(3, 4), memory[first : first + 4]
        if verb == "all_to_all":
            call = pycomm.all_to_all(rows, memory[first // 2 :][:12].reshape(3, 4), **options)
        elif verb == "all_gather":
            call = pycomm.all_gather(row, rows, **options)
        elif verb == "gather":
            call = pycomm.gather(row, root, rows if me == root else None, **options)
        elif verb == "scatter":
            call = pycomm.scatter(rows if me == root else None, root, row, **options)
        else:
            call = pycomm.reduce_scatter(rows, "max", row, **options)
        found = result(call, async_op)
        return None if found is None else found.tolist()

    def numbers(rank: int, start: int) -> list[int]:
        return [100 * rank + start + i for i in range(4)]

    for first in range(0, 17, 2):
        gathered = [numbers(rank, first) for rank in range(3)]
        by = "tcp" if first % 4 == 0 else "local"
        for me, found in enumerate(run_ranks(3, fn, first, transport=by)):
            row = 4 + 4 * me
            wanted = {
                "all_gather": gathered,
                "gather": gathered if me == 1 else None,
                "reduce_scatter": numbers(2, row),
                "scatter": numbers(1, row),
                "all_to_all": [numbers(rank, row) for rank in range(3)],
            }
            assert found == wanted[verb], (first, me)


def test_all_gather_v_into_its_own_input() -> None:
    def fn(group: Group) -> Any:
        me = group.rank
        parts = [np.full(2, me), np.full(2, me), np.full(2, me)]
        pycomm.all_gather_v(parts[2 - me], parts, group=group)
        return [int(p[0]) for p in parts]

    assert run_ranks(3, fn) == [[0, 1, 2]] * 3


@on_ranks(2)
def test_wrong_arguments_raise_before_data_is_sent(group: Group) -> None:
    me = group.rank
    x, flat = np.ones(4, np.float32), np.float32(1)
    rows = np.ones((2, 3))
    cases = [
        (lambda: pycomm.reduce(x, 2), "rank 2"),
        (lambda: pycomm.reduce(x, -1), "rank -1"),
        (lambda: pycomm.reduce(x, 0, "median"), "median"),
        (lambda: pycomm.gather(x, 5), "rank 5"),
        (lambda: pycomm.gather(x, me, np.ones(8, np.float32)), "shape"),
        (lambda: pycomm.gather(x, me, np.ones((2, 4))), "dtype"),
        (lambda: pycomm.gather(x, 1 - me, np.ones((2, 4), np.float32)), "out is for rank"),
        (lambda: pycomm.scatter(x), "shape"),
        (lambda: pycomm.scatter(rows, 7), "rank 7"),
        (lambda: pycomm.scatter(None, me), "rank . must pass x"),
        (lambda: pycomm.scatter(None, 1 - me), "x or out"),
        (lambda: pycomm.scatter(rows, me, np.ones(2)), "shape"),
        (lambda: pycomm.scatter(rows, me, np.ones(3, int)), "dtype"),
        (lambda: pycomm.all_to_all(x), "shape"),
        (lambda: pycomm.all_to_all(flat), "shape"),
        (lambda: pycomm.all_to_all(rows, np.ones((2, 2))), "shape"),
        (lambda: pycomm.all_to_all(rows, np.ones((2, 3), int)), "dtype"),
        (lambda: pycomm.all_gather_v(flat), "scalar"),
        (lambda: pycomm.all_reduce(x, algorithm="magic"), "magic"),
        (lambda: pycomm.all_reduce(x, "median"), "median"),
        (lambda: pycomm.all_reduce(x, timeout_s=0), "timeout_s"),
        (lambda: pycomm.all_reduce(x, timeout_s=float("nan")), "timeout_s"),
        (lambda: pycomm.broadcast(x, 2), "rank 2"),
        (lambda: pycomm.broadcast(x, -1), "rank -1"),
        (lambda: pycomm.send(x, 5), "rank 5"),
        (lambda: pycomm.send(x, 1 - me, tag=-1), "tag"),
        (lambda: pycomm.all_gather(x, np.ones(8, np.float32)), "shape"),
        (lambda: pycomm.all_gather(x, np.ones((2, 4))), "dtype"),
        (lambda: pycomm.reduce_scatter(x), "shape"),
        (lambda: pycomm.reduce_scatter(flat), "shape"),
        (lambda: pycomm.reduce_scatter(rows, out=np.ones(4)), "shape"),
        (lambda: pycomm.set_num_threads(0), "invalid n: got 0"),
    ]
    for call, message in cases:
        with pytest.raises(errors.InvalidArgument, match=message):
            call()
    for out in (x, [x], [x, None], [x, np.ones(3, np.float32)], [x, np.ones(4)]):
        with pytest.raises(errors.InvalidArgument):  # the lengths are known by then
            pycomm.all_gather_v(x, out, group=group)
    with pytest.raises(errors.Unsupported, match="avg"):
        pycomm.reduce(np.ones(3, int), 0, "avg")
    with pytest.raises(errors.Unsupported, match="avg"):
        pycomm.all_reduce(np.ones(3, int), "avg")
    assert float(pycomm.all_reduce(x)[0]) == 2.0


@on_ranks(3)
def test_reduce_writes_no_other_array(group: Group) -> None:
    x = np.arange(1000.0)
    x.flags.writeable = group.rank == 1
    pycomm.reduce(x, 1, group=group)
    assert np.array_equal(x, np.arange(1000.0) * (3 if group.rank == 1 else 1))


def test_values_of_all_ranks() -> None:
    def fn(group: Group) -> Any:
        mine = {"rank": group.rank, "names": ["x"] * group.rank, "raw": b"\0" * 10_000 * group.rank}
        return pycomm.all_gather_object(mine, group=group)

    wanted = [{"rank": r, "names": ["x"] * r, "raw": bytes(10_000 * r)} for r in range(3)]
    assert run_ranks(3, fn) == [wanted] * 3
    assert run_ranks(1, fn) == [wanted[:1]]


@on_ranks(3)
def test_unsupported_value_is_reported_on_every_rank(group: Group) -> None:
    value = {"loss": 1j} if group.rank == 1 else 1.5
    with pytest.raises(errors.InvalidArgument, match=r"rank 1: value\['loss'\]") as caught:
        pycomm.all_gather_object(value, group=group)
    assert (caught.value.peer, pycomm.all_gather_object(group.rank, group=group)) == (1, [0, 1, 2])


@on_ranks(3, transport="tcp")
def test_exchanged_counts_are_not_gathered_again(group: Group) -> None:
    """Frames that an all_to_all sends: without counts, with counts, and with counts of a
    CommunicatorPool."""
    x, out = np.ones(12, np.float32), np.zeros(12, np.float32)
    counts = [12 // group.size] * group.size

    def exchange(counts_fit: bool) -> None:
        call = _core.Call("all_to_all", counts=[*counts, *counts], counts_fit=counts_fit)
        assert call.run(group.core, x, out)

    calls = [
        lambda: pycomm.all_to_all(x.reshape(group.size, -1), group=group),
        lambda: exchange(False),
        lambda: CommunicatorPool(group, 1).all_to_all_v(x, out, counts, counts).wait(),
    ]
    frames = []
    for made in calls:
        before = group.stats().frames_sent
        made()
        frames.append(group.stats().frames_sent - before)
    assert (out == 1).all()
    with pytest.raises(errors.Mismatch):  # some compare the counts and others do not
        exchange(group.rank == 0)
    pycomm.barrier(group=group)  # a rank that leaves before another has met rank 0 is lost to it
    without, compared, known = frames
    assert known == without < compared
