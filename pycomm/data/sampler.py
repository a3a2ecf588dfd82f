"""The samples of each rank: ShardedSampler, and InfiniteSampler, which repeats it without end.

8 samples, 3 ranks        rank 0      rank 1      rank 2
order="strided"           0 3 6       1 4 7       2 5         every third
order="contiguous"        0 1 2       3 4 5       6 7         a block each, the last the rest
the first with pad=True   0 3 6       1 4 7       2 5 0       as torch's DistributedSampler
... with drop_last=True   0 3         1 4         2 5
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from pycomm import config, default_group
from pycomm._arguments import flag, integer, one_of, refuse, shown
from pycomm.errors import InvalidArgument


def rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank and size: as given, else of the default group, else of the environment.

    Raises:
        InvalidArgument: only one of them is given, or they do not fit.
    """
    if (rank is None) != (size is None):
        raise InvalidArgument(f"rank={shown(rank)}, size={shown(size)}: pass both or neither")
    if rank is not None and size is not None:
        rank, size = integer("rank", rank), integer("size", size, 1)
        if not 0 <= rank < size:
            refuse("rank", rank, f"0 to {size - 1}")
        return rank, size
    if default_group.is_initialized():
        return default_group.rank(), default_group.size()
    here = config.environment()
    return here.rank, here.size


class ShardedSampler(Sampler[int]):
    """The indices of this rank; over all ranks each index of the data occurs once.

    Args:
        data: any object with a length, the same on every rank.
        shuffle: use an order derived from `seed` and the epoch, the same on every rank.
        seed: the same on every rank.
        order: "strided": rank r gets r, r + size, ...; "contiguous": blocks of ceil(n / size), the
            last of which are shorter or empty.
        pad: repeat from the start, so that every rank gets ceil(n / size) indices; `padding` is the
            number of repeats at the end of this rank's.
        drop_last: omit the end instead, so that every rank gets n // size indices.
        rank, size: None: of the default group; before init(), of the environment.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self,
        data: Sized,
        shuffle: bool = True,
        seed: int = 0,
        order: str = "strided",
        pad: bool = False,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        one_of("order", order, ("strided", "contiguous"))
        if not hasattr(type(data), "__len__"):
            refuse("data", data, "an object with a length")
        pad, drop_last = flag("pad", pad), flag("drop_last", drop_last)
        if pad and drop_last:
            raise InvalidArgument("pad=True and drop_last=True: pass only one of them")
        self.rank, self.size = rank_and_size(rank, size)
        self.epoch = self._start = 0
        self._data, self._shuffle = data, flag("shuffle", shuffle)
        self._seed = integer("seed", seed)
        self._strided, self._pad, self._drop_last = order == "strided", pad, drop_last

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Sets the epoch, which selects the order with `shuffle`, and where it starts.

        Args:
            epoch: from 0; the same on every rank.
            start: how many of this rank's indices to omit, as after a restart within the epoch.

        Raises:
            InvalidArgument: one of them is no integer, or `start` is negative.
        """
        self.epoch, self._start = integer("epoch", epoch), integer("start", start, 0)

    def __len__(self) -> int:
        """The number of indices of this rank in a whole epoch."""
        return len(self._positions())

    @property
    def padding(self) -> int:
        """The number of repeated indices at the end of this rank's; exclude them from metrics."""
        count = len(self._data)
        return sum(position >= count for position in self._positions())

    def __iter__(self) -> Iterator[int]:
        """The indices of the current epoch."""
        count, positions = len(self._data), self._positions()[self._start :]
        if not self._shuffle:
            return iter([position % count for position in positions])
        made = torch.Generator().manual_seed(operator.index(self._seed + self.epoch))
        order = torch.randperm(count, generator=made).tolist()
        return iter([order[position % count] for position in positions])

    def _positions(self) -> range:
        """This rank's positions in the order of all samples; from len(data) on they are repeats."""
        count = len(self._data)
        each = -(-count // self.size)
        if self._drop_last:
            each = count // self.size
        end = each * self.size if self._pad or self._drop_last else count
        if self._strided:
            return range(self.rank, end, self.size)
        return range(min(end, each * self.rank), min(end, each * (self.rank + 1)))


class InfiniteSampler(Sampler[Any]):
    """Repeats another sampler epoch after epoch, so that a loader never stops reading.

    Calls set_epoch() of the sampler, if it has one, before each epoch but the first.

    Args:
        sampler: the sampler of one epoch.

    Raises:
        InvalidArgument: `sampler` is not iterable.
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        if not hasattr(type(sampler), "__iter__"):
            refuse("sampler", sampler, "a sampler")
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """The indices without end; ends only if the sampler is empty."""
        epoch = getattr(self.sampler, "epoch", 0)
        while True:
            nothing = True
            for index in self.sampler:
                nothing = False
                yield index
            if nothing:
                return
            epoch += 1
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
