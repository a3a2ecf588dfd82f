"""Streams in a DataLoader: each sample in one worker of one rank, and nothing lost or repeated."""

import gc
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from pycomm.data import DataLoader
from pycomm.errors import InvalidArgument

COUNT = 23


def stream() -> Iterator[int]:
    return iter(range(COUNT))


def endless() -> Iterator[int]:
    return itertools.count()


class Plain:
    """An iterable that is no data set of torch's."""

    def __iter__(self) -> Iterator[int]:
        return stream()


class Same(IterableDataset):
    """The same samples in each rank and worker."""

    def __iter__(self) -> Iterator[int]:
        return stream()


class ByWorker(IterableDataset):
    """Divides its samples among the workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return itertools.islice(stream(), info.id, None, info.num_workers)


class Range(IterableDataset):
    """Divided by a worker_init_fn, as in torch's documentation."""

    def __init__(self) -> None:
        self.first, self.step = 0, 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, COUNT, self.step))


def set_range(worker: int) -> None:
    info = get_worker_info()
    info.dataset.first, info.dataset.step = worker, info.num_workers


class ByRank(IterableDataset):
    """Divides its samples among the ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(stream(), self.rank, None, 2)


class ByBoth(ByRank):
    """Divides its samples among the ranks and workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return itertools.islice(super().__iter__(), info.id, None, info.num_workers)


def read(monkeypatch: Any, ranks: int, make: Any, **options: Any) -> list[list[int]]:
    """The batches of each rank's loader, one rank after another."""
    found = []
    for rank in range(ranks):
        for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        loader = DataLoader(make(rank), **options)
        found.append([batch.tolist() for batch in itertools.islice(loader, 100)])
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda _: stream, {}),
        (lambda _: Plain(), {"divide": "both"}),
        (lambda _: Same(), {"divide": "both"}),
        (ByRank, {"divide": "workers"}),
    ],
    ids=["function", "iterable", "dataset", "by rank"],
)
def test_each_sample_is_read_once(monkeypatch: Any, make: Any, options: Any, workers: int) -> None:
    batches = read(monkeypatch, 2, make, batch_size=2, num_workers=workers, **options)
    samples = [list(itertools.chain(*rank)) for rank in batches]
    assert sorted(itertools.chain(*samples)) == list(range(COUNT))
    assert abs(len(samples[0]) - len(samples[1])) <= max(1, workers)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda _: ByWorker(), {"divide": "ranks"}),
        (lambda _: Range(), {"divide": "ranks", "worker_init_fn": set_range}),
        (ByBoth, {"divide": "none"}),
    ],
    ids=["get_worker_info", "worker_init_fn", "both"],
)
def test_a_stream_that_divides_itself_is_read_once(
    monkeypatch: Any, make: Any, options: Any
) -> None:
    batches = read(monkeypatch, 2, make, num_workers=2, **options)
    samples = [list(itertools.chain(*rank)) for rank in batches]
    assert sorted(itertools.chain(*samples)) == list(range(COUNT))


@pytest.mark.parametrize("make", [lambda _: Same(), lambda _: Plain()], ids=["dataset", "iterable"])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (2, 2)])
def test_an_iterable_that_may_divide_itself_needs_an_answer(
    monkeypatch: Any, make: Any, ranks: int, workers: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"divide= is missing: {ranks} ranks with num_work"):
        read(monkeypatch, ranks, make, num_workers=workers)


def test_one_reader_needs_no_answer(monkeypatch: Any) -> None:
    made = (lambda _: Same(), lambda _: Plain())
    for make, workers in itertools.product(made, (0, 1)):
        batches = read(monkeypatch, 1, make, batch_size=50, num_workers=workers)
        assert batches == [[list(range(COUNT))]]


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_get_the_same_number_of_batches(monkeypatch: Any, workers: int) -> None:
    """23 samples of 2 ranks: without drop_last, rank 0 has a batch more."""
    counts = {}
    for drop_last in (False, True):
        options = {"batch_size": 3, "num_workers": workers, "drop_last": drop_last}
        batches = read(monkeypatch, 2, lambda _: stream, **options)
        counts[drop_last] = [len(rank) for rank in batches]
        samples = list(itertools.chain(*itertools.chain(*batches)))
        assert len(samples) == len(set(samples))
    if not workers:
        options = {"batch_size": 1, "drop_last": True}
        assert [len(b) for b in read(monkeypatch, 2, lambda _: stream, **options)] == [11, 11]
    first, second = counts[True]
    assert first == second > 0


def test_an_infinite_reader_is_divided(monkeypatch: Any) -> None:
    batches = read(monkeypatch, 2, lambda _: endless, batch_size=1, num_workers=2)
    samples = list(itertools.chain(*itertools.chain(*batches)))
    assert sorted(samples) == list(range(200))


def test_epochs_call_the_function_again() -> None:
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [sorted(loader) for _ in range(2)]
    del loader  # ends the workers
    gc.collect()
    assert epochs == [list(range(COUNT))] * 2


def negative(x: int) -> int:
    assert x % 2 == 1, "a sample of the other rank"
    return -x


def test_transform_is_applied_to_own_samples_only(monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for options in ({}, {"batch_size": None}, {"drop_last": True}):
        loader = DataLoader(stream, transform=negative, **options)
        assert [int(x) for x in loader] == [-x for x in range(1, COUNT, 2)]
    assert [int(x) for x in DataLoader(range(6), transform=negative)] == [-1, -3, -5]


def test_a_spawned_worker_reads_a_stream() -> None:
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(Plain(), batch_size=50, num_workers=1, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [list(range(COUNT))]


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (stream(), {}, "can be read only once"),
        (stream, {"divide": "all"}, "invalid divide: got 'all'"),
        (stream, {"pad": True}, "pad=True needs a data set with a length"),
        (stream, {"shared": True}, "shared=True needs a data set with a length"),
        (range(5), {"divide": "both"}, "divide= is for a stream"),
    ],
)
def test_invalid_arguments(dataset: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        DataLoader(dataset, **options)


def test_attributes_are_those_of_the_stream() -> None:
    data = Range()
    loader = DataLoader(data, divide="both", transform=torch.tensor)
    loader.dataset.first = 20
    assert data.first == 20
    assert loader.dataset.step == 1
    assert [int(x) for x in loader] == [20, 21, 22]
    with pytest.raises(AttributeError, match="unknown"):
        _ = loader.dataset.unknown
