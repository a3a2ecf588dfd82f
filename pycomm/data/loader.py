"""pycomm.data.DataLoader: torch's DataLoader with automatic sharding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils import data

from pycomm.data.sampler import InfiniteSampler, ShardedSampler, rank_and_size
from pycomm.errors import InvalidArgument

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
    a ShardedSampler, seeded by `generator` if given, and shuffles every epoch differently. In place
    of torch's SequentialSampler and RandomSampler, also within a BatchSampler or InfiniteSampler,
    it uses a ShardedSampler of the same order. Samplers that know the ranks are used unchanged:
    ShardedSampler, and those with `num_replicas`, as torch's DistributedSampler.
    Of an IterableDataset this rank gets every size-th sample.

    With drop_last=True all ranks get the same number of batches. Otherwise some may get one more:
    then train within model.join().

    Raises:
        InvalidArgument: the rank in the environment is invalid, or a sampler cannot be divided
            among the ranks: each would read all samples.
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
        elif size > 1:
            place = {"drop_last": bool(named.get("drop_last")), "rank": rank, "size": size}
            for name in ("batch_sampler", "sampler"):
                if (sampler := named.get(name)) is not None:
                    named[name] = self._divided(sampler, place)
                    break
            else:
                named["sampler"] = self._shard(
                    dataset, bool(named.pop("shuffle", False)), named.get("generator"), place
                )
        super().__init__(dataset, **named)

    def _shard(self, dataset: Any, shuffle: bool, made: Any, place: dict[str, Any]) -> Any:
        """The sampler of this rank, whose epochs set_epoch() sets."""
        seed = 0 if made is None else made.initial_seed()
        self._sharded = ShardedSampler(dataset, shuffle=shuffle, seed=seed, **place)
        return self._sharded

    def _divided(self, sampler: Any, place: dict[str, Any]) -> Any:
        """The part of a given sampler that this rank reads."""
        if isinstance(sampler, ShardedSampler) or hasattr(sampler, "num_replicas"):
            return sampler
        if isinstance(sampler, InfiniteSampler):
            return InfiniteSampler(self._divided(sampler.sampler, place))
        if type(sampler) is data.SequentialSampler:
            return self._shard(sampler.data_source, False, None, place)
        if (
            type(sampler) is data.RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return self._shard(sampler.data_source, True, sampler.generator, place)
        if type(sampler) is data.BatchSampler:
            inner = self._divided(sampler.sampler, {**place, "drop_last": sampler.drop_last})
            return data.BatchSampler(inner, sampler.batch_size, sampler.drop_last)
        raise InvalidArgument(
            f"a {type(sampler).__name__} cannot be divided among {place['size']} ranks: "
            "pass a pycomm.data.ShardedSampler or give it the attribute num_replicas if it divides "
            "them itself; torch.utils.data.DataLoader lets every rank read all samples"
        )

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
