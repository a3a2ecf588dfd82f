"""pycomm.data.DataLoader: torch's DataLoader with automatic sharding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils import data

from pycomm.data.sampler import ShardedSampler, rank_and_size

__all__ = ["DataLoader"]

# torch's positional arguments after the data set.
NAMES = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)


class DataLoader(data.DataLoader[Any]):
    """torch's DataLoader, in which each rank reads its own shard.

        loader = pycomm.data.DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
        for epoch in range(10):
            for x, y in loader: ...

    Takes torch's arguments; batch_size is per rank. Without `sampler` and `batch_sampler` it makes
    a ShardedSampler, seeded by `generator` if given, and shuffles every epoch differently. Of an
    IterableDataset this rank gets every size-th sample.

    With drop_last=True all ranks get the same number of batches. Otherwise some may get one more:
    then train within model.join().

    Raises:
        InvalidArgument: the rank in the environment is invalid.
        ValueError: torch's, for arguments that do not fit together.
    """

    def __init__(self, dataset: data.Dataset[Any], *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        # torch takes only Python's integers.
        whole = {name: int(v) for name, v in given.items() if isinstance(v, np.integer)}
        named: dict[str, Any] = {**given, **whole}
        rank, size = rank_and_size(None, None)
        self._sharded: ShardedSampler | None = None
        self._epoch = 0
        if size > 1 and isinstance(dataset, data.IterableDataset):
            dataset = _EveryNth(dataset, rank, size)
        elif size > 1 and named.get("sampler") is None and named.get("batch_sampler") is None:
            made = named.get("generator")
            self._sharded = named["sampler"] = ShardedSampler(
                dataset,  # type: ignore[arg-type]  # it has a length, as torch requires
                shuffle=bool(named.pop("shuffle", False)),
                seed=0 if made is None else made.initial_seed(),
                drop_last=bool(named.get("drop_last")),
                rank=rank,
                size=size,
            )
        super().__init__(dataset, **named)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, as after a restart; by default counted from 0.

        Args:
            epoch: from 0; selects the order of the samples.
        """
        self._epoch = epoch

    def __iter__(self) -> Any:
        """Iterates over one epoch."""
        if self._sharded is not None:
            self._sharded.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()


class _EveryNth(data.IterableDataset[Any]):
    """This rank's samples of a stream that is the same on all ranks."""

    def __init__(self, stream: data.IterableDataset[Any], rank: int, size: int) -> None:
        self._stream, self._rank, self._size = stream, rank, size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._stream), self._rank, None, self._size)
