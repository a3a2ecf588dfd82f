"""The exchange of all updates at a few bits for each value, for LocalSGD with Quantize.

bucket 0: quantize, all-to-all ................ sum, all-gather ........ decode
          bucket 1: quantize, all-to-all ................ sum, all-gather ........ decode
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pycomm._arguments import list_of, plain_text
from pycomm._quantize import Quantize
from pycomm._training.arguments import flat_tensor
from pycomm.compress.bucket_exchange import BucketExchange, BucketExchanges
from pycomm.compress.hierarchical import rank_factor
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.quantized_residuals import QuantizedResiduals
from pycomm.compress.updates import UpdateCompressor, commit_rounded
from pycomm.elastic.change import GroupChange
from pycomm.group import Group

BUCKET = 1 << 20  # elements; a bucket has whole parameters, so it may be larger
KEYS = ("residual", "owner_residual")  # of a state
BUCKETS_BETWEEN = 2  # a bucket is summed when this many later ones are on their way


@dataclass(eq=False)
class _Bucket:
    """Parameters that are exchanged together.

    Attributes:
        places: positions among the model's parameters.
        counts: elements of each.
        device: of all of them.
        exchange: the current one, or the last one if that failed.
        update: float32 [elements], what this rank gave to it.
        restored: the update is in the residual: the exchange failed.
    """

    places: list[int]
    counts: list[int]
    device: torch.device
    exchange: BucketExchange | None = None
    update: Tensor | None = None
    restored: bool = False


class QuantizedUpdates(UpdateCompressor[list[Tensor]]):
    """See UpdateCompressor. `exchange` yields the mean update of each parameter, float32, flat."""

    def __init__(
        self,
        options: Quantize,
        parameters: Sequence[Tensor],
        snapshot: Sequence[Tensor],
        group: Group,
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        self._options = options
        named = ((str(place), x) for place, x in enumerate(self._theta))
        self._residuals = QuantizedResiduals(named, owner="LocalSGD")
        self._buckets: list[_Bucket] = []
        for place, theta in enumerate(self._theta):
            last = self._buckets[-1] if self._buckets else None
            if last is None or sum(last.counts) >= BUCKET or last.device != theta.device:
                self._buckets.append(_Bucket([], [], theta.device))
            self._buckets[-1].places.append(place)
            self._buckets[-1].counts.append(theta.numel())
        self._exchanges = BucketExchanges(options, self._residuals, in_place=False)
        self._residuals.unsent(self._theta, create=True)

    @property
    def ratio(self) -> float:
        return 32 / self._options.bits

    @property
    def groups(self) -> int:
        return 0

    @property
    def residual(self) -> list[Tensor]:
        return self._residuals.views()

    def described_exchange(self) -> dict[str, Any]:
        return self._exchanges.stats()

    @contextlib.contextmanager
    def exchange(self, step: int) -> Iterator[list[Tensor]]:
        self._forget()
        word = self._check_word(step, self._lacking())
        words = word.new_empty((self._pool.size, len(word)))
        try:
            compared = self._pool.all_gather(word, words)
            try:
                with defer_sigint():
                    for bucket in self._buckets:
                        self._take_update(bucket)
            finally:
                compared.wait()
            self._compare(list(words))
            means = self._exchange_all()
            self.sent_bytes = len(word) + sum(one.sent_bytes for one in self._started())
            yield means
        except BaseException as error:  # includes Ctrl-C: the updates must be restored
            self._exchanges.abort(f"{type(error).__name__}: {error}")
            self._roll_back()
            raise

    def _started(self) -> list[BucketExchange]:
        return [bucket.exchange for bucket in self._buckets if bucket.exchange is not None]

    def _new_exchange(self, bucket: _Bucket) -> BucketExchange:
        return self._exchanges.make([self._theta[place] for place in bucket.places], self._pool)

    def _take_update(self, bucket: _Bucket) -> None:
        """Computes the update of this rank, and restores the parameters."""
        update = torch.empty(sum(bucket.counts), device=bucket.device)
        for place, part in zip(bucket.places, torch.split(update, bucket.counts), strict=True):
            theta, parameter = flat_view(self._theta[place]), flat_view(self._parameters[place])
            torch.sub(theta.float(), parameter.float(), out=part)
            parameter.copy_(theta)
        bucket.update, bucket.restored = update, False

    def _exchange_all(self) -> list[Tensor]:
        """The mean update of each parameter."""
        self._exchanges.prepare(self._pool)
        started: list[BucketExchange] = []
        for bucket in self._buckets:
            bucket.exchange = self._new_exchange(bucket)
            started.append(bucket.exchange)
            assert bucket.update is not None  # of _take_update
            bucket.exchange.start(bucket.update)
            if len(started) > BUCKETS_BETWEEN:
                started[-1 - BUCKETS_BETWEEN].sum_up()
        for exchange in started[-BUCKETS_BETWEEN:]:
            exchange.sum_up()
        means: list[Tensor] = []
        for bucket, exchange in zip(self._buckets, started, strict=True):
            mean = torch.empty(sum(bucket.counts), device=bucket.device)
            exchange.finish(mean)
            means += torch.split(mean, bucket.counts)
        return means

    def _roll_back(self) -> None:
        for exchange in self._started():
            exchange.cancel()
        residual = self.residual
        # Each copy of a host's residual gets its rank's update, so their mean gets the mean update.
        share = 1 / rank_factor(self._residuals.by_host, self._pool.rank)
        for bucket in self._buckets:
            if bucket.update is None or bucket.restored:
                continue
            bucket.restored = True
            for place, part in zip(
                bucket.places, torch.split(bucket.update, bucket.counts), strict=True
            ):
                residual[place].add_(part, alpha=share)

    def commit(self, received: list[Tensor]) -> None:
        self._commit_exchanges()
        residual = self.residual
        for place, (mean, factor) in enumerate(zip(received, self.decay, strict=True)):
            if place in self.unused:
                continue
            theta, parameter = flat_view(self._theta[place]), flat_view(self._parameters[place])
            if theta.dtype == torch.float32:
                theta.mul_(factor).sub_(mean)
                parameter.copy_(theta)
            else:
                commit_rounded(theta, parameter, residual[place], mean, factor)
        self._finish()

    def means(self, received: list[Tensor]) -> list[Tensor]:
        self._decay_shared()
        found = [torch.empty_like(x) for x in self._theta]
        for x, mean in zip(found, received, strict=True):
            flat_view(x).copy_(mean)
        for place in self.unused:  # what was received is a part of the residual, which stays
            found[place].zero_()
        return found

    def commit_outer(self) -> None:
        self._commit_exchanges()
        super().commit_outer()

    def commit_missed(self) -> None:
        if all(bucket.restored for bucket in self._buckets):
            self._commit_exchanges()
        self._finish()

    def resume(self, change: GroupChange) -> float:
        self._residuals.resume(change)
        norm = super().resume(change)
        self._exchanges.forget()
        return norm

    more: ClassVar = {"owner_residual": list_of(flat_tensor), "exchange": plain_text}

    def save(self) -> dict[str, Any]:
        return {"exchange": self._exchanges.name, **_as_lists(self._residuals.save())}

    def gather(self, dst: int) -> list[dict[str, Any]] | None:
        found = self._residuals.gather(self._pool.group, dst)
        return None if found is None else [_as_lists(one) for one in found]

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        self._check_sources(sources)
        named = [
            {**source, **{key: _by_place(source.get(key, [])) for key in KEYS}}
            for source in sources
        ]
        self._residuals.load(named, self._pool.group)
        self.decay = list(sources[0]["decay"])
        self._forget()
        self._exchanges.forget(sources[0].get("exchange", "") if len(sources) == 1 else "")

    def _commit_exchanges(self) -> None:
        self._residuals.unused = {self._theta[place] for place in self.unused}
        with self._residuals.kept():
            for exchange in self._started():
                exchange.commit()

    def _forget(self) -> None:
        """Ends the last exchange, which cannot be rolled back any more."""
        for bucket in self._buckets:
            bucket.exchange, bucket.update, bucket.restored = None, None, False

    def _finish(self) -> None:
        self._forget()
        super()._finish()
        if not self._options.error_feedback:
            self._residuals.multiply(0.0)


def _as_lists(found: Mapping[str, Any]) -> dict[str, Any]:
    """The residuals in the order of the parameters."""
    lists = {key: [found[key][str(place)] for place in range(len(found[key]))] for key in KEYS}
    return {**lists, "hosts": found["hosts"]}


def _by_place(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(place): tensor for place, tensor in enumerate(tensors)}
