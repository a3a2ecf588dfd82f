"""pycomm.data: each sample on one rank, for all sizes; loaders; one copy per host."""

import itertools
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from properties import SETTINGS
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import pycomm
from pycomm import Group
from pycomm.data import (
    DataLoader,
    InfiniteSampler,
    Prefetcher,
    ScatterLoader,
    ShardedSampler,
    memory,
)
from pycomm.errors import Error, InvalidArgument, Unsupported
from pycomm.testing import run_ranks

ORDERS = st.sampled_from(["strided", "contiguous"])


def shards(count: int, size: int, epoch: int = 0, **options: Any) -> list[ShardedSampler]:
    made = [ShardedSampler(range(count), rank=r, size=size, **options) for r in range(size)]
    for one in made:
        one.set_epoch(epoch)
    return made


@SETTINGS
@given(st.integers(0, 200), st.integers(1, 17), st.booleans(), ORDERS, st.integers(0, 5))
def test_shards_partition_the_data(
    count: int, size: int, shuffle: bool, order: str, epoch: int
) -> None:
    parts = shards(count, size, epoch, shuffle=shuffle, order=order)
    indices = [list(part) for part in parts]
    assert sorted(itertools.chain(*indices)) == list(range(count))
    assert [len(part) for part in parts] == [len(own) for own in indices]
    assert all(part.padding == 0 for part in parts)
    if order == "strided":
        assert max(map(len, indices)) - min(map(len, indices)) <= 1
    else:  # the formula of the docs
        each = -(-count // size)
        wanted = [min(each * (r + 1), count) - min(each * r, count) for r in range(size)]
        assert [len(own) for own in indices] == wanted
        if not shuffle:
            assert list(itertools.chain(*indices)) == list(range(count))


@SETTINGS
@given(st.integers(1, 200), st.integers(1, 17), st.booleans(), ORDERS)
def test_padding_and_dropping(count: int, size: int, shuffle: bool, order: str) -> None:
    padded = shards(count, size, shuffle=shuffle, order=order, pad=True)
    assert {len(list(part)) for part in padded} == {-(-count // size)}
    real = [list(part)[: len(part) - part.padding] for part in padded]
    assert sorted(itertools.chain(*real)) == list(range(count))
    dropped = shards(count, size, shuffle=shuffle, order=order, drop_last=True)
    assert {len(list(part)) for part in dropped} == {count // size}
    most = Counter(itertools.chain(*map(list, dropped)))
    assert not most or max(most.values()) == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_padded_sampler_equals_torch_distributed_sampler(shuffle: bool) -> None:
    data = list(range(11))
    for epoch, (rank, ours) in itertools.product(
        (0, 3), enumerate(shards(11, 4, 3, shuffle=shuffle, pad=True))
    ):
        theirs = DistributedSampler(data, 4, rank, shuffle=shuffle)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_epochs_differ_and_repeat() -> None:
    (one,) = shards(50, 1)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first
    assert list(ShardedSampler(range(50), seed=1)) != first  # single process: rank 0 of 1


@pytest.mark.parametrize(
    "options",
    [{"order": "odd"}, {"pad": True, "drop_last": True}, {"rank": 1}, {"rank": 2, "size": 2}],
)
def test_invalid_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ShardedSampler(range(5), **options)


def test_environment_sets_the_shard_before_init(monkeypatch: Any) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert list(ShardedSampler(range(7), shuffle=False)) == [1, 4]


def test_infinite() -> None:
    inner = shards(5, 2)[0]
    endless = itertools.islice(InfiniteSampler(inner), 12)
    wanted = []
    for epoch in range(4):
        inner.set_epoch(epoch)
        wanted += list(inner)
    inner.set_epoch(0)
    assert list(endless) == wanted
    assert list(InfiniteSampler(SequentialSampler([]))) == []


@pytest.mark.parametrize("options", [{"shuffle": False}, {}, {"pad": True}])
def test_an_epoch_starts_at_a_position(options: Any) -> None:
    for one in shards(20, 3, **options):
        whole, later = list(one), iter(InfiniteSampler(one))
        one.set_epoch(0, 4)
        assert list(one) == whole[4:]
        assert len(one) == len(whole)
        one.set_epoch(1)
        second = list(one)
        one.set_epoch(0, 4)
        assert list(itertools.islice(later, 8)) == (whole[4:] + second)[:8]


@on_ranks(2)
def test_a_loader_starts_at_a_batch(group: Group) -> None:
    data = TensorDataset(torch.arange(26))
    for options in ({"shuffle": True}, {"sampler": RandomSampler(data)}):
        loader = DataLoader(data, batch_size=2, drop_last=True, **options)
        epochs = [[x.tolist() for (x,) in loader] for _ in range(2)]
        step = len(loader) + 3
        loader.set_epoch(*divmod(step, len(loader)))
        assert [x.tolist() for (x,) in loader] == epochs[1][3:]
        loader.set_epoch(0)
        assert [x.tolist() for (x,) in loader] == epochs[0]
    stream = DataLoader(range_of_10, batch_size=2)
    with pytest.raises(InvalidArgument, match="call its own set_epoch"):
        stream.set_epoch(0, 1)


def range_of_10() -> Any:
    return iter(range(10))


def test_loader_shards_the_data() -> None:
    def program(group: Group) -> Any:
        data = TensorDataset(torch.arange(10))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        seen = []
        for _ in range(2):  # epochs
            seen.append([int(i) for (batch,) in loader for i in batch])
        loader.set_epoch(0)
        assert [int(i) for (batch,) in loader for i in batch] == seen[0]
        assert seen[0] != seen[1]
        made = torch.Generator().manual_seed(5)
        seeded = DataLoader(data, batch_size=2, shuffle=True, generator=made)
        assert [int(i) for (batch,) in seeded for i in batch] != seen[0]
        even = [len(x) for (x,) in DataLoader(data, 2, drop_last=True)]
        stream = [int(i) for batch in DataLoader(range_of_10, batch_size=2) for i in batch]
        return seen, even, stream

    results = run_ranks(3, program)
    for epoch in range(2):
        everything = sorted(itertools.chain(*(seen[epoch] for seen, _, _ in results)))
        assert everything == list(range(10))
    assert [even for _, even, _ in results] == [[2]] * 3
    assert [stream for _, _, stream in results] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


class Halves:
    """A sampler that knows the ranks."""

    num_replicas = 2

    def __iter__(self) -> Any:
        return iter([7, 7])


ONE_BATCH = [[0, 2], [1, 3]]
GIVEN: list[tuple[Any, list[list[int]] | None]] = [
    (lambda data: {"sampler": SequentialSampler(data)}, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),
    # Both have one batch: rank 0's fourth sample is dropped.
    (lambda _: {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 2, True)}, ONE_BATCH),
    (lambda data: {"sampler": RandomSampler(data)}, None),
    (lambda data: {"sampler": RandomSampler(data, generator=torch.Generator())}, None),
    (lambda data: {"sampler": ShardedSampler(data, order="contiguous")}, None),
    (lambda data: {"sampler": Halves()}, [[7, 7], [7, 7]]),
]


@pytest.mark.parametrize(("options", "wanted"), GIVEN)
def test_a_given_sampler_is_divided(options: Any, wanted: list[list[int]] | None) -> None:
    def program(group: Group) -> Any:
        data = TensorDataset(torch.arange(10))
        loader = DataLoader(data, **options(data))
        epochs = [[int(i) for (batch,) in loader for i in batch] for _ in range(2)]
        loader.set_epoch(0)
        assert [int(i) for (batch,) in loader for i in batch] == epochs[0]
        if "sampler" in options(data) and type(options(data)["sampler"]) is RandomSampler:
            assert epochs[0] != epochs[1]
        return epochs[0]

    results = run_ranks(2, program)
    if wanted is not None:
        assert results == wanted
    else:
        assert sorted(results[0] + results[1]) == list(range(10))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(10), replacement=True),
        RandomSampler(range(10), num_samples=4),
        WeightedRandomSampler([1.0] * 10, 4),
        SubsetRandomSampler(range(4)),
        BatchSampler(SubsetRandomSampler(range(4)), 2, False),
        InfiniteSampler(SubsetRandomSampler(range(4))),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_every_rank_would_read_whole_is_refused(sampler: Any) -> None:
    def program(group: Group) -> None:
        name = "batch_sampler" if type(sampler) is BatchSampler else "sampler"
        if group.size == 1:
            DataLoader(range(10), **{name: sampler})  # one rank reads everything
            return
        with pytest.raises(InvalidArgument, match=r"Sampler cannot be divided among 2 ranks"):
            DataLoader(range(10), **{name: sampler})

    run_ranks(1, program)
    run_ranks(2, program)


@on_ranks(2)
def test_an_infinite_sampler_is_divided(group: Group) -> None:
    data = TensorDataset(torch.arange(6))
    loader = DataLoader(data, sampler=InfiniteSampler(SequentialSampler(data)))
    found = [int(x) for (x,) in itertools.islice(loader, 5)]
    assert found == [[0, 2, 4, 0, 2], [1, 3, 5, 1, 3]][group.rank]


PADDED: list[tuple[Any, list[list[int]]]] = [
    (lambda _: {}, [[0, 2, 4], [1, 3, 0]]),
    (lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 2, False)},
     [[0, 2, 4], [1, 3, 0]]),
    (lambda data: {"sampler": InfiniteSampler(SequentialSampler(data))},
     [[0, 2, 4, 0, 2, 4], [1, 3, 0, 1, 3, 0]]),
]  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize(("options", "wanted"), PADDED)
def test_padding_gives_all_ranks_the_same_number(
    group: Group, options: Any, wanted: list[list[int]]
) -> None:
    data = TensorDataset(torch.arange(5))
    loader = DataLoader(data, pad=True, **options(data))
    assert loader.padding == group.rank
    assert DataLoader(data, drop_last=True).padding == 0
    found = [int(i) for (x,) in itertools.islice(loader, 6) for i in x]
    assert found == wanted[group.rank]


def test_padding_that_has_no_effect_is_refused() -> None:
    def program(group: Group) -> None:
        for sampler in (ShardedSampler(range(5)), Halves()):
            with pytest.raises(InvalidArgument, match="which divides its samples itself"):
                DataLoader(range(5), pad=True, sampler=sampler)
        with pytest.raises(InvalidArgument, match="pass only one of them"):
            DataLoader(range(5), pad=True, drop_last=True)

    run_ranks(2, program)
    assert DataLoader(range(5), pad=True).padding == 0  # one rank


def test_scattered_batches() -> None:
    def batches() -> Any:
        for rows in (6, 8, 1):
            x = torch.arange(rows * 2.0).reshape(rows, 2)
            yield {"x": x, "y": (torch.arange(rows), "name", 3)}

    def program(group: Group) -> Any:
        loader = ScatterLoader(batches() if group.rank == 1 else None, src=1)
        return list(loader)

    results = run_ranks(3, program)
    for step, whole in enumerate(batches()):
        parts = [results[rank][step] for rank in range(3)]
        assert torch.equal(torch.cat([part["x"] for part in parts]), whole["x"])
        assert torch.equal(torch.cat([part["y"][0] for part in parts]), whole["y"][0])
        assert {part["y"][1:] for part in parts} == {("name", 3)}
        sizes = [len(part["x"]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@on_ranks(2)
def test_loader_error_reaches_every_rank(group: Group) -> None:
    def batches() -> Any:
        yield torch.ones(2)
        raise OSError("the disk is gone")

    with pytest.raises((OSError, RuntimeError), match="the disk is gone"):
        list(ScatterLoader(batches() if group.rank == 0 else None))
    with pytest.raises((InvalidArgument, RuntimeError), match="expected one number"):
        odd = [(torch.ones(2), torch.ones(3))]
        list(ScatterLoader(odd if group.rank == 0 else None))
    with pytest.raises(InvalidArgument, match="on rank 0 only"):
        ScatterLoader(None if group.rank == 0 else [])
    for x in (torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises((Unsupported, RuntimeError), match=r"pass (x\.cpu|torch\.view)"):
            list(ScatterLoader([x] if group.rank == 0 else None))


def test_prefetching_reads_ahead_and_stops() -> None:
    read: list[int] = []
    three = threading.Event()

    def batches() -> Any:
        for i in range(100):
            read.append(i)
            if i == 2:
                three.set()
            yield torch.full((2,), i, dtype=torch.uint8)

    before = threading.active_count()
    got = []
    for batch in Prefetcher(batches(), depth=2, convert=lambda x: x.float() / 2):
        assert three.wait(60)  # two are queued, and one is being made, before the first is done
        got.append(batch)
        if len(got) == 3:
            break
    assert [x.tolist() for x in got] == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    assert len(read) < 10
    assert threading.active_count() == before
    whole = list(Prefetcher([torch.ones(1)] * 5))
    assert len(whole) == 5
    assert len(Prefetcher([1, 2])) == 2


def test_numpy_integers_are_accepted() -> None:
    one, two = np.int64(1), np.int64(2)
    theirs = ShardedSampler(range(9), seed=two, rank=one, size=two)  # type: ignore[arg-type]  # not an int
    ours = ShardedSampler(range(9), seed=2, rank=1, size=2)
    theirs.set_epoch(two)  # type: ignore[arg-type]  # not an int
    ours.set_epoch(2)
    assert list(theirs) == list(ours)
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=two)
    assert [len(x) for (x,) in loader] == [2, 2, 1]


def test_prefetching_forwards_errors() -> None:
    def batches() -> Any:
        yield torch.ones(1)
        raise LookupError("no more")

    pairs = iter(Prefetcher(batches()))
    assert next(pairs).item() == 1
    with pytest.raises(LookupError, match="no more"):
        next(pairs)
    with pytest.raises(InvalidArgument):
        Prefetcher([], depth=0)


def shared(group: Group) -> Any:
    whole = np.arange(1000.0).reshape(10, 100)
    array = pycomm.data.share(whole if group.rank == 0 else None)
    tensor = pycomm.data.share(torch.from_numpy(whole).clone())
    np.testing.assert_array_equal(array, whole)
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    tensor[0, 0] = group.rank + 5.0  # private to this rank from now on
    pycomm.barrier()
    assert tensor[0, 0] == group.rank + 5.0
    with pytest.raises(InvalidArgument, match=r"rank 0, the first on .*, has no array"):
        pycomm.data.share(None)
    objects = np.array([None]) if group.rank == 0 else None
    with pytest.raises(InvalidArgument if group.rank == 0 else Error, match="array of object"):
        pycomm.data.share(objects)
    with (
        mock.patch("os.getpid", os.getppid),  # as in another pid namespace
        pytest.raises(Unsupported, match="cannot open the memory of rank 0"),
    ):
        pycomm.data.share(whole)
    empty = pycomm.data.share(np.empty((0, 3), np.int16))
    assert empty.shape == (0, 3)
    maps = Path("/proc/self/maps").read_text().splitlines()
    inodes = [line.split()[4] for line in maps if "memfd:pycomm_share" in line]
    pycomm.barrier()
    return set(inodes), os.getpid()


def test_one_copy_per_host() -> None:
    (ours, pid), (theirs, other) = run_ranks(2, shared, transport="", processes=True)
    assert pid != other
    assert len(ours & theirs) >= 2  # the same memory: array and tensor


@pytest.mark.timeout(60)
def test_pipe_of_another_process_is_not_waited_for(tmp_path: Path) -> None:
    """In another pid namespace the file may be anything; opening a pipe waits for a writer."""
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="a different process here"):
            memory._mapped((os.getpid(), descriptor, 0, 0), "<f4", [1], False)
    finally:
        os.close(descriptor)
