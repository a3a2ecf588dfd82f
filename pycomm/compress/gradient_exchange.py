"""The exchange of quantized gradients, for the reducers of pycomm.DataParallel and torch's DDP;
pycomm.parallel.exchange has the contract.

    backward  bucket 0: quantize, all-to-all ... sum, all-gather ........ decode, commit
                        bucket 1: quantize, all-to-all ... sum, all-gather
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import Check, dict_of, integer, plain_text, positive, whole
from pycomm._core_api.calls import Work
from pycomm._quantize import Quantize
from pycomm._training.arguments import flat_tensor
from pycomm._training.communicators import CommunicatorPool, tag_of
from pycomm._training.loss_scale import LossScale
from pycomm.compress.bucket_exchange import BucketExchange, BucketExchanges
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.quantized_residual import QuantizedResidual
from pycomm.compress.residual import Transaction, sources_of
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument
from pycomm.group import Group

# A bucket is summed when this many later ones are on their way, so that backward rarely waits.
BUCKETS_BETWEEN = 2

OF_A_RANK: dict[str, Check] = {
    "step": whole,
    "scale": functools.partial(positive, other=""),
    "residual": dict_of(flat_tensor),
    "owner_residual": dict_of(flat_tensor),
}


class GradientExchange:
    """Exchanges the gradients of one backward pass after another.

    Residuals change at the end of a pass, and only if all gradients are finite: then they are so on
    all ranks.

    Attributes:
        idle: this rank has no data and only takes part in a pass of the others.
        scale: of the loss.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        options: Quantize,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.idle, self.scale = False, LossScale(scaler)
        self._options = options
        residual = QuantizedResidual(named, options.error_feedback)
        self._exchanges = BucketExchanges(options, residual, in_place=True)
        self._pool: CommunicatorPool | None = None
        self._passing: list[tuple[BucketExchange, Tensor]] = []
        self._dense: list[tuple[Work, Tensor]] = []
        self._transaction = Transaction()  # of this pass, or of the last one, if it failed
        self._unused: Collection[Tensor] = ()  # in that pass
        # Of a pass that has begun.
        self._buckets: list[tuple[Tensor, Sequence[Tensor]]] | None = None
        self._finite = True  # so far in this pass
        self._step, self._scale = 0, 1.0
        self._sent_bytes = self._dense_bytes = 0

    @property
    def _residual(self) -> QuantizedResidual:
        return self._exchanges.residual

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._communicators().group

    def tag(self, bucket: int) -> None:
        """The next calls are for this bucket of torch's DDP."""
        self._communicators().tag = tag_of(self._step + 1, bucket)

    def attach(
        self, named: Mapping[str, Tensor], pool: CommunicatorPool, others: Mapping[str, Tensor]
    ) -> None:
        """Uses the communicators of DataParallel, whose parameters must be known."""
        for parameter in named.values():
            self._residual.quantizes(parameter)
        self._pool = pool

    def compresses(self, parameter: Tensor) -> bool:
        """Whether the parameter has 16 or 32 bits."""
        return self._residual.quantizes(parameter)

    def add(
        self,
        flat: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lacking: Collection[Tensor] = (),
    ) -> None:
        """Starts the exchange of a bucket, and sums an earlier one. `gradients` fill `flat`."""
        group = self.group
        if self._transaction.undone:  # the last pass failed
            self.cancel()
        if self._buckets is None:
            self._begin()
            self._buckets = []
        self._buckets.append((flat, parameters))
        if group.size == 1 and not self._residual.unsent(parameters):
            return
        self._dense_bytes += flat.nbytes
        if not all(self._residual.quantizes(parameter) for parameter in parameters):
            self._dense.append((self._communicators().all_reduce(flat, "avg"), flat))
            return
        with self._undone_on_error():
            self._exchanges.prepare(self._communicators())
            pool = self._communicators()
            exchange = self._exchanges.make(parameters, pool, self._transaction)
            self._passing.append((exchange, flat))
            exchange.start(flat)
            if len(self._passing) > BUCKETS_BETWEEN:
                self._passing[-1 - BUCKETS_BETWEEN][0].sum_up()

    def average(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """Writes the mean of all ranks to one bucket; finish() commits. For hooks that wait."""
        self.add(flat, parameters, ())
        with self._undone_on_error():
            self._average_started()

    def finish(
        self,
        unused: Collection[Tensor] = (),
        sparse: Sequence[Tensor] = (),
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Writes the mean of all ranks to the gradients, and commits.

        Args:
            unused, sparse: see pycomm.parallel.exchange.
            agree: whether gradients are finite on all ranks, given whether they are in this group.
        """
        self._unused = unused
        with self._undone_on_error():
            self._average_started()
        values = [gradient.values() for gradient in sparse]
        self._finite &= all(bool(one.isfinite().all()) for one in values)
        if agree(self._finite):
            with defer_sigint():
                self._commit()
                self._step += 1
        else:  # so that a scaler skips the step of each optimizer
            self._transaction.undo()
            self._transaction = Transaction()
            for flat, parameters in self._buckets or ():
                for part in torch.split(flat, [parameter.numel() for parameter in parameters]):
                    part[:1] = math.nan
            for one in values:
                one[:1] = math.nan
        self._buckets, self._finite = None, True

    def _average_started(self) -> None:
        """Waits for the buckets that were added, and writes their means."""
        passing, dense = self._passing, self._dense
        self._passing, self._dense = [], []
        for exchange, _ in passing[-BUCKETS_BETWEEN:]:
            exchange.sum_up()
        finite = True
        for exchange, flat in passing:
            finite &= exchange.finish(flat)
            if flat.dtype == torch.float16:  # what is finite in float32 may overflow
                finite &= bool(flat.isfinite().all())
        for work, flat in dense:
            work.wait_for_device()
            finite &= bool(flat.isfinite().all())
        self._finite &= finite
        self._sent_bytes += sum(exchange.sent_bytes for exchange, _ in passing)
        self._sent_bytes += sum(flat.nbytes for _, flat in dense)

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """If the block fails, nothing changed, and no rank of this host waits for this one."""
        try:
            yield
        except BaseException as error:  # includes Ctrl-C
            self._exchanges.abort(f"{type(error).__name__}: {error}")
            self._transaction.undo()
            raise

    def cancel(self) -> None:
        """Discards a pass: the residuals stay as they were before it."""
        passing, dense = self._passing, self._dense
        self._buckets, self._passing, self._dense = None, [], []
        if passing:
            self._exchanges.abort("a backward pass did not complete")
        for exchange, _ in passing:
            exchange.cancel()
        for work, _ in dense:
            with contextlib.suppress(Exception):  # of a pass that failed
                work.wait()
        self._transaction.undo()

    def sync_from(self, src: int) -> None:
        """Takes the loss scale of rank `src`."""
        self.scale.sync_from(src, self.group)

    def resume(self, change: GroupChange, counted: bool) -> float:
        """Commits the failed pass if rank `change.source` did; see Exchange."""
        self.cancel()
        word = torch.tensor([self._step])
        collectives.broadcast(word, change.source, group=change.group)
        if counted and int(word) > self._step:
            self._transaction.redo()
            self._commit()
        self._transaction, self._step = Transaction(), int(word)
        self._residual.resume(change)
        self._exchanges.forget()
        self.sync_from(change.source)
        return change.lost_norm(self._residual.squares())

    def stats(self) -> dict[str, Any]:
        """See QuantizedGradients.stats."""
        return {
            "step": self._step,
            "bits": self._options.bits,
            "down_bits": self._options.down_bits,
            **self._exchanges.stats(),
            "sent_bytes": self._sent_bytes,
            "dense_bytes": self._dense_bytes,
        }

    def save(self) -> dict[str, Any]:
        """See QuantizedGradients.state_dict."""
        self._cancel_failed_pass("state_dict")
        return self._residual.state(self.group, self._numbers)

    def gather(self, dst: int) -> dict[str, Any] | None:
        """See QuantizedGradients.gather_state."""
        self._cancel_failed_pass("gather_state")
        dst = integer("dst", dst, 0, self.group.size - 1)
        return self._residual.state_of_all(self.group, dst, self._numbers)

    def load(self, saved: Mapping[str, Any]) -> None:
        """See QuantizedGradients.load_state_dict."""
        self._cancel_failed_pass("load_state_dict")
        group = self.group
        sources = sources_of(
            saved, group, "QuantizedGradients", OF_A_RANK, {"exchange": plain_text}
        )
        self._residual.load(sources, group)
        self._exchanges.forget(sources[0].get("exchange", "") if len(sources) == 1 else "")
        self._transaction = Transaction()
        self._step, self._scale = int(sources[0]["step"]), float(sources[0]["scale"])

    @property
    def _numbers(self) -> dict[str, Any]:
        return {"step": self._step, "scale": self._scale, "exchange": self._exchanges.name}

    def _communicators(self) -> CommunicatorPool:
        """The communicators of DataParallel; without it, the default group."""
        if self._pool is None:
            self._pool = CommunicatorPool(None, 1)
        return self._pool

    def _begin(self) -> None:
        """Converts the residuals if the loss scale changed."""
        self._residual.check_frozen()
        self._finite, self._transaction, self._unused = True, Transaction(), ()
        self._dense_bytes = self._sent_bytes = 0
        scale = self.scale.of_pass(self.idle) or 1.0
        if scale != self._scale:
            self._residual.multiply(scale / self._scale)
            self._scale = scale

    def _commit(self) -> None:
        self._transaction.commit(self._residual.names(self._unused))

    def _cancel_failed_pass(self, method: str) -> None:
        if self._buckets is not None and torch._C._current_graph_task_id() != -1:
            raise InvalidArgument(
                f"QuantizedGradients.{method}() cannot be called inside backward(): call it before "
                "or after"
            )
        self.cancel()
