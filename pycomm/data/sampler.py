"""Which samples a rank reads: ShardedSampler, and InfiniteSampler, which goes on for ever.

    8 samples, 3 ranks        rank 0      rank 1      rank 2
    order="strided"           0 3 6       1 4 7       2 5         every third
    order="contiguous"        0 1 2       3 4 5       6 7         a piece each, the last the rest
    the first with pad=True   0 3 6       1 4 7       2 5 0       as torch's DistributedSampler
    ... with drop_last=True   0 3         1 4         2 5

Called by users and by loader.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from pycomm import config, group
from pycomm.errors import InvalidArgument

__all__ = ["InfiniteSampler", "ShardedSampler", "place"]


def place(rank: int | None, size: int | None) -> tuple[int, int]:
    """Rank and size: those given, else the default group's, else what the environment says.

    Raises:
        InvalidArgument: one alone is given, or they do not fit.
    """
    if (rank is None) != (size is None):
        raise InvalidArgument(f"rank={rank}, size={size}: give both or none")
    if rank is not None and size is not None:
        if not 0 <= rank < size:
            raise InvalidArgument(f"rank={rank} of size={size}: ranks end at {size - 1}")
        return operator.index(rank), operator.index(size)
    if group.is_initialized():
        return group.rank(), group.size()
    here = config.environment()
    return here.rank, here.size


class ShardedSampler(Sampler[int]):
    """The indices of this rank: over all ranks each index of the data comes once.

    Args:
        data: what has a length, the same on every rank.
        shuffle: in an order that `seed` and the epoch give, the same on every rank.
        seed: the same on every rank.
        order: "strided": rank r takes r, r + size, ...; "contiguous": pieces of ceil(n / size), of
            which the last are shorter, or empty.
        pad: repeat from the start, so that every rank has ceil(n / size); `padding` says how many
            of the last entries of this rank are such repeats.
        drop_last: leave the end away instead, so that every rank has floor(n / size).
        rank, size: None: the default group's; before init(), what the environment says.
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
        if order not in ("strided", "contiguous"):
            raise InvalidArgument(f'order={order!r}: "strided" or "contiguous"')
        if pad and drop_last:
            raise InvalidArgument("pad=True and drop_last=True: one or the other")
        self.rank, self.size = place(rank, size)
        self.epoch = 0
        self._data, self._shuffle, self._seed = data, shuffle, seed
        self._strided, self._pad, self._drop_last = order == "strided", pad, drop_last

    def set_epoch(self, epoch: int) -> None:
        """The order of this epoch, the same on every rank; no effect without `shuffle`."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many indices this rank gets."""
        return len(self._positions())

    @property
    def padding(self) -> int:
        """How many of this rank's last indices are repeats, which no metric should count."""
        count = len(self._data)
        return sum(position >= count for position in self._positions())

    def __iter__(self) -> Iterator[int]:
        """The indices of the present epoch."""
        count = len(self._data)
        if not self._shuffle:
            return iter([position % count for position in self._positions()])
        made = torch.Generator().manual_seed(operator.index(self._seed + self.epoch))
        order = torch.randperm(count, generator=made).tolist()
        return iter([order[position % count] for position in self._positions()])

    def _positions(self) -> range:
        """This rank's places in the order of all; from len(data) on they stand for repeats."""
        count = len(self._data)
        each = -(-count // self.size)
        if self._drop_last:
            each = count // self.size
        end = each * self.size if self._pad or self._drop_last else count
        if self._strided:
            return range(self.rank, end, self.size)
        return range(min(end, each * self.rank), min(end, each * (self.rank + 1)))


class InfiniteSampler(Sampler[Any]):
    """Epoch after epoch of another sampler without an end, so that a loader never stops reading.

    Each epoch is announced to a sampler that has set_epoch().
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """Goes on for ever, unless the sampler is empty."""
        epoch = getattr(self._sampler, "epoch", 0)
        while True:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            nothing = True
            for index in self._sampler:
                nothing = False
                yield index
            if nothing:
                return
            epoch += 1
