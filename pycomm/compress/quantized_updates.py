"""The exchange of all updates at a few bits for each value, for LocalSGD with Quantize.

bucket 0: quantize, all-to-all ................ sum, all-gather ........ decode
          bucket 1: quantize, all-to-all ................ sum, all-gather ........ decode
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pycomm._arguments import plain_text
from pycomm._quantize import Quantize
from pycomm.compress.bucket_exchange import BucketExchange, BucketExchanges
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.quantized_residual import QuantizedResidual
from pycomm.compress.updates import MeanUpdates, names_of
from pycomm.elastic.change import GroupChange
from pycomm.group import Group

BUCKET = 1 << 20  # elements; a bucket has whole parameters, so it may be larger
BUCKETS_BETWEEN = 2  # a bucket is summed when this many later ones are on their way


class QuantizedUpdates(MeanUpdates):
    """See UpdateCompressor."""

    more: ClassVar = {**MeanUpdates.more, "exchange": plain_text}
    _residual: QuantizedResidual

    def __init__(
        self,
        options: Quantize,
        parameters: Sequence[Tensor],
        snapshot: Sequence[Tensor],
        group: Group,
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        named = zip(names_of(self._theta), self._theta, strict=True)
        self._residual = QuantizedResidual(named, owner="LocalSGD")
        self._residual.create()
        self._buckets: list[list[int]] = []  # places of the parameters that are exchanged together
        elements = BUCKET
        for place, theta in enumerate(self._theta):
            if elements >= BUCKET or self._theta[place - 1].device != theta.device:
                self._buckets.append([])
                elements = 0
            self._buckets[-1].append(place)
            elements += theta.numel()
        self._exchanges = BucketExchanges(options, self._residual, in_place=False)
        self._started: list[BucketExchange] = []  # of the current exchange, by bucket

    @property
    def ratio(self) -> float:
        return 32 / float(self._options.bits)

    @property
    def groups(self) -> int:
        return 0

    def described_exchange(self) -> dict[str, Any]:
        return self._exchanges.stats()

    def _exchange(self, word: Tensor, lacking: Collection[int]) -> list[Tensor]:
        words = word.new_empty((self._pool.size, len(word)))
        try:
            compared = self._pool.all_gather(word, words)
        finally:  # the parameters are restored also if no transfer can start
            with defer_sigint():
                updates = [self._take_update(bucket) for bucket in self._buckets]
        compared.wait()
        self._compare(list(words))
        means = self._exchange_all(updates)
        self.sent_bytes = len(word) + sum(one.sent_bytes for one in self._started)
        return means

    def _abort(self, reason: str) -> None:
        self._exchanges.abort(reason)
        for exchange in self._started:
            exchange.cancel()

    def _take_update(self, bucket: Sequence[int]) -> Tensor:
        """Computes the update of this rank, and restores the parameters."""
        counts = [self._theta[place].numel() for place in bucket]
        update = torch.empty(sum(counts), device=self._theta[bucket[0]].device)
        parts = torch.split(update, counts)
        for place, part in zip(bucket, parts, strict=True):
            theta, parameter = flat_view(self._theta[place]), flat_view(self._parameters[place])
            torch.sub(theta.float(), parameter.float(), out=part)
            parameter.copy_(theta)
        self._deltas += parts
        return update

    def _exchange_all(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """The mean update of each parameter."""
        self._exchanges.prepare(self._pool)
        started = self._started
        for bucket, update in zip(self._buckets, updates, strict=True):
            named = [self._theta[place] for place in bucket]
            started.append(self._exchanges.make(named, self._pool, self._transaction))
            started[-1].start(update)
            if len(started) > BUCKETS_BETWEEN:
                started[-1 - BUCKETS_BETWEEN].sum_up()
        for exchange in started[-BUCKETS_BETWEEN:]:
            exchange.sum_up()
        means: list[Tensor] = []
        for bucket, update, exchange in zip(self._buckets, updates, started, strict=True):
            mean = torch.empty_like(update)
            exchange.finish(mean)
            means += torch.split(mean, [self._theta[place].numel() for place in bucket])
        return means

    def resume(self, change: GroupChange) -> float:
        norm = super().resume(change)
        self._exchanges.forget()
        return norm

    def save(self) -> dict[str, Any]:
        return {"exchange": self._exchanges.name, **super().save()}

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        super().load(sources)
        self._exchanges.forget(sources[0].get("exchange", "") if len(sources) == 1 else "")

    def _forget(self) -> None:
        super()._forget()
        self._started = []
