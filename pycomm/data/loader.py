"""pycomm.data.DataLoader: torch's DataLoader with automatic sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils import data

from pycomm import collectives, default_group
from pycomm._arguments import flag, function, integer, refuse
from pycomm.data.sampler import InfiniteSampler, ShardedSampler, rank_and_size
from pycomm.data.shared import Transformed, shared_copy
from pycomm.data.streams import Divided, as_stream, choose_divide
from pycomm.default_group import default
from pycomm.errors import InvalidArgument

# torch's positional arguments after the data set.
NAMES = (
    *("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context"),
)

# Of the workers that decode a data set.
WORKERS = ("num_workers", "multiprocessing_context", "worker_init_fn", "timeout")


class DataLoader(data.DataLoader[Any]):
    """torch's DataLoader, in which each rank reads its own shard.

        loader = pycomm.data.DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
        for epoch in range(10):
            for x, y in loader: ...

    Takes torch's arguments; batch_size is per rank. Without `sampler` and `batch_sampler` it makes
    a ShardedSampler, seeded by `generator` if given, and shuffles every epoch differently. Then the
    constructor is collective: the generators of all ranks must have one initial seed. In place
    of torch's SequentialSampler and RandomSampler, also within a BatchSampler or InfiniteSampler,
    it uses a ShardedSampler of the same order. Samplers that know the ranks are used unchanged:
    ShardedSampler, and those with `num_replicas`, as torch's DistributedSampler.

    The data set may be a stream: a function that returns an iterator, such as a generator function,
    or an iterable. It yields the same samples in every rank and worker, and each sample is used in
    one of them. An iterable, such as an IterableDataset, may divide its samples itself: `divide`
    says whether it does.

    With drop_last=True all ranks get the same number of batches; of a stream, every worker omits
    its last incomplete batch. With pad=True they do too. Otherwise some may get more: then train
    within model.join().

    Args:
        dataset: torch's, or a stream.
        pad: repeat samples from the start, so that every rank gets the same number; `padding` is
            the number of repeats at the end of this rank's. Not for streams.
        divide: of a stream: the loader divides its samples among "both" ranks and workers, "ranks"
            (the stream differs by worker), "workers" (it differs by rank) or "none" (by both).
            None: "both" for a function; several ranks or workers that read an iterable need a
            value.
        shared: decode the data set now, and keep one copy in memory that all ranks of a host and
            their workers read. Collective: the ranks of a host, with `num_workers` each, decode a
            share each. Samples are CPU tensors, NumPy arrays and numbers, or tuples, lists and
            dicts of them, with the same shapes and dtypes. Random augmentation in the data set
            would be the same in every epoch: pass it as `transform`.
        transform: applied to each sample that this rank reads, in its worker.
        *args, **kwargs: torch's.

    Raises:
        InvalidArgument: an argument that is not torch's has another type. Or the rank in the
            environment is invalid, or a sampler cannot be divided among the ranks: each would read
            all samples. Or `divide` is missing, or an argument is not for this data set, or
            `shared` cannot store a sample. Or initial seeds of generators differ (on all ranks), or
            one is given before pycomm.init().
        Mismatch: `shared`, and the ranks' data sets differ.
        Error: `shared`, and another rank failed.
        ValueError: torch's, for arguments that do not fit together.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        pad: bool = False,
        divide: str | None = None,
        shared: bool = False,
        transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        pad, shared = flag("pad", pad), flag("shared", shared)
        if transform is not None:
            function("transform", transform, "a function, or None")
        given = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        # torch takes only Python's integers.
        whole = {name: int(v) for name, v in given.items() if isinstance(v, np.integer)}
        named: dict[str, Any] = {**given, **whole}
        rank, size = rank_and_size(None, None)
        workers = named.get("num_workers", 0)
        drop_last = bool(named.get("drop_last"))
        self._sharded: ShardedSampler | None = None
        self._epoch = self._start = 0
        if (stream := as_stream(dataset)) is not None:
            if pad or shared:
                name = "pad" if pad else "shared"
                raise InvalidArgument(f"{name}=True needs a data set with a length and indices")
            divide = choose_divide(stream, divide, size, workers)
            own = isinstance(stream, data.IterableDataset) and divide == "none"
            if not own or transform is not None:
                dataset = Divided(stream, divide, (rank, size), drop_last, transform)
        else:
            if not hasattr(type(dataset), "__getitem__"):
                refuse("dataset", dataset, "a data set with indices, or a stream")
            if divide is not None:
                raise InvalidArgument("divide= is for a stream: a sampler divides this data set")
            if shared:
                options = {name: named[name] for name in WORKERS if name in named}
                dataset = shared_copy(dataset, default(), **options)
            if transform is not None:
                dataset = Transformed(dataset, transform)
            if size > 1:
                place = {"drop_last": drop_last, "pad": pad, "rank": rank, "size": size}
                self._divide_samplers(dataset, named, place)
            elif named.get("shuffle") and len(dataset) == 0:
                named["shuffle"] = False  # torch's sampler refuses to shuffle nothing
        super().__init__(dataset, **named)

    @property
    def padding(self) -> int:
        """The number of repeats at the end of this rank's samples; exclude them from metrics."""
        return 0 if self._sharded is None else self._sharded.padding

    def _divide_samplers(self, dataset: Any, named: dict[str, Any], place: dict[str, Any]) -> None:
        """Sets the sampler of this rank in torch's arguments."""
        for name in ("batch_sampler", "sampler"):
            if (sampler := named.get(name)) is not None:
                named[name] = self._divided(sampler, place)
                break
        else:
            named["sampler"] = self._shard(
                dataset, bool(named.pop("shuffle", False)), named.get("generator"), place
            )
        if place["pad"] and self._sharded is None:
            raise InvalidArgument(
                f"pad=True cannot change a {type(sampler).__name__}, which divides its samples "
                "itself: pass pad to the sampler"
            )

    def _shard(self, dataset: Any, shuffle: bool, made: Any, place: dict[str, Any]) -> Any:
        """The sampler of this rank, whose epochs set_epoch() sets."""
        seed = 0 if made is None else made.initial_seed()
        if shuffle and made is not None:
            _check_seed(seed)
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

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Sets the epoch of the next iteration, as after a restart; by default counted from 0.

            loader.set_epoch(*divmod(step, len(loader)))  # the batch of this step is the next one

        Args:
            epoch: from 0; selects the order of the samples.
            start: how many of this rank's batches to omit in the next iteration.

        Raises:
            InvalidArgument: one of them is no integer, or `start` is negative; or `start` is above
                0, and the loader made no ShardedSampler.
        """
        epoch, start = integer("epoch", epoch), integer("start", start, 0)
        if start > 0 and self._sharded is None:
            raise InvalidArgument(
                f"set_epoch: start={start} needs a sampler of this loader: not a stream, one rank "
                "or a sampler that knows the ranks; call its own set_epoch"
            )
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Any:
        """Iterates over one epoch."""
        if self._sharded is not None:
            batch = getattr(self.batch_sampler, "batch_size", 1)
            self._sharded.set_epoch(self._epoch, self._start * batch)
        self._epoch, self._start = self._epoch + 1, 0
        return super().__iter__()


def _check_seed(seed: int) -> None:
    """Collective. Raises InvalidArgument on all ranks unless they have one seed."""
    if not default_group.is_initialized():
        raise InvalidArgument(
            "DataLoader: the seeds of generators are compared over all ranks: call pycomm.init() "
            "before, or pass sampler=pycomm.data.ShardedSampler(dataset, seed=...)"
        )
    seeds = collectives.all_gather(np.array([seed], np.uint64).view(np.int64))
    if len({int(one) for one in seeds.flatten()}) > 1:
        raise InvalidArgument(
            f"DataLoader: generators have different initial seeds, {seed} on this rank: each rank "
            "would shuffle differently, so samples would be omitted: seed all alike"
        )
