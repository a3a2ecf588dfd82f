"""Data sets without indices: the samples of a stream that one reader gets.

7 samples, 2 ranks with 2 workers each: 4 readers

rank, worker       0, 0     0, 1     1, 0     1, 1
divide="both"      0 4      1 5      2 6      3
... even           0        1        2        3        without the incomplete last round
divide="ranks"     0 2 4 6  0 2 4 6  1 3 5    1 3 5    for streams that differ by worker
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils import data

from pycomm._arguments import one_of
from pycomm.errors import InvalidArgument

DIVIDE = ("both", "ranks", "workers", "none")


def as_stream(dataset: Any) -> Callable[[], Iterator[Any]] | Iterable[Any] | None:
    """The data set, if it has no indices: an iterable, or a function that returns an iterator.

    Raises:
        InvalidArgument: an iterator, which could be read once only.
    """
    if isinstance(dataset, data.IterableDataset):
        return dataset
    if isinstance(dataset, data.Dataset) or hasattr(dataset, "__getitem__"):
        return None
    if isinstance(dataset, Iterator):
        raise InvalidArgument(
            f"invalid data set: a {type(dataset).__name__} can be read only once: pass the "
            "function that returns it, which each epoch calls"
        )
    return dataset if callable(dataset) or isinstance(dataset, Iterable) else None


def choose_divide(stream: Any, divide: str | None, ranks: int, workers: int) -> str:
    """The value of `divide=` to use: "both" for a function, "none" for one reader.

    Raises:
        InvalidArgument: it is invalid, or missing: the stream may divide itself.
    """
    if divide is not None:
        return one_of("divide", divide, DIVIDE)
    if not isinstance(stream, Iterable):  # a function
        return "both"
    if ranks * max(1, workers) > 1:
        raise InvalidArgument(
            f"divide= is missing: {ranks} ranks with num_workers={workers} read this "
            f"{type(stream).__name__}, which may divide its samples itself. Pass "
            'divide="both" if it yields the same samples in each of them, "ranks" if it differs '
            'by worker (get_worker_info), "workers" if it differs by rank, "none" if by both'
        )
    return "none"


class Divided(data.IterableDataset[Any]):
    """The samples of a stream that the current reader gets: this rank, or this worker of it.

    Other attributes are those of the stream, also when they are set: a worker_init_fn may change
    `get_worker_info().dataset`.

    Args:
        stream: a result of as_stream().
        divide: one of DIVIDE: what the readers are that get different samples.
        even: omit the incomplete last round, so that all readers get the same number of samples.
        transform: applied to each sample that the reader gets.
    """

    def __init__(
        self,
        stream: Any,
        divide: str,
        place: tuple[int, int],
        even: bool,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        # Not by assignment, which would set attributes of the stream.
        vars(self).update(_stream=stream, _parts=(divide, *place, even, transform))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks for methods before the object has its attributes
            raise AttributeError(name)
        return getattr(vars(self)["_stream"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_stream"], name, value)

    def __iter__(self) -> Iterator[Any]:
        """One epoch; reads the whole stream, and yields this reader's samples."""
        divide, rank, size, even, transform = self._parts
        reader, readers = (rank, size) if divide in ("both", "ranks") else (0, 1)
        worker = data.get_worker_info()
        if worker is not None and divide in ("both", "workers"):
            reader = reader * worker.num_workers + worker.id
            readers *= worker.num_workers
        stream = self._stream
        iterable = stream() if not isinstance(stream, Iterable) else stream
        mine = None
        for number, sample in enumerate(iterable):
            position = number % readers
            if position == reader:
                mine = sample
                if not even:
                    yield sample if transform is None else transform(sample)
            if even and position == readers - 1:  # the round is complete
                yield mine if transform is None else transform(mine)
