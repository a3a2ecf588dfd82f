"""The exchange of one bucket of quantized gradients or updates, and the choice of it.

    sharded       quantized, with owners of blocks (pycomm._quantize)
    hierarchical  the mean inside each host, then the same with hosts in place of ranks
    dense         an all-reduce of the uncompressed bucket, with what was not sent before

The choice is made at the first step, and again after a change of the ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pycomm._core_api.calls import Work
from pycomm._quantize import Quantize, QuantizedExchange
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import quantized_cost
from pycomm.compress.exchange_policy import costs_of_rank_0
from pycomm.compress.hierarchical import CurrentHostGroups, HostGroups, spans_hosts
from pycomm.compress.quantized_cost import QuantizedLoad
from pycomm.compress.quantized_residuals import QuantizedResiduals


class BucketExchange(Protocol):
    """One mean of a bucket: start(), sum_up() and finish(), then commit(); no commit() rolls it
    back.
    """

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent to other ranks, as one copy."""

    def start(self, x: Tensor) -> None:
        """Starts the exchange of x. May change x if the exchanges are in place."""

    def sum_up(self) -> None:
        """Continues it after the first transfer."""

    def finish(self, out: Tensor) -> bool:
        """Writes the mean over all ranks to `out`. Returns whether it is finite, the same on all
        ranks. If not, do not commit."""

    def commit(self) -> None:
        """Stores what was lost for the next exchange."""

    def cancel(self) -> None:
        """Waits for a transfer that was started; a failed one is complete, too."""


class BucketExchanges:
    """Chooses how buckets are exchanged, the same on all ranks, and makes the exchange of each.

    Args:
        options: bits, and the exchange or how to choose it.
        residuals: of all parameters.
        in_place: the buckets are gradients, which an exchange may change. Otherwise they are
            float32 updates, which it keeps.

    Attributes:
        name: "sharded", "hierarchical" or "dense"; "": not chosen yet.
        residuals: of all parameters.
        costs: seconds by exchange, if they were estimated.
    """

    def __init__(self, options: Quantize, residuals: QuantizedResiduals, in_place: bool) -> None:
        self._options, self.residuals, self._in_place = options, residuals, in_place
        self._hosts = CurrentHostGroups()
        self._prepared = False
        self.name = ""
        self.costs: Mapping[str, float] = {}

    def forget(self, name: str = "") -> None:
        """Forgets the choice; `name`: the next choice, of a saved state, or "": choose again."""
        self.name = name if self._options.exchange == "auto_time" else ""
        self.costs, self._prepared = {}, False

    def prepare(self, pool: CommunicatorPool) -> None:
        """Collective at the first step, after forget() and after abort(): chooses, and converts the
        residuals."""
        hosts = self._hosts.value
        if self._prepared and not (hosts and hosts.broken):
            return
        if not self.name or (self.name == "hierarchical" and not spans_hosts(pool.group)):
            self.name = self._choose(pool)
        if self.name == "hierarchical":
            hosts, failed = self._hosts.get(pool.group)
            if not self.residuals.by_host:
                self.residuals.to_hosts(hosts, pool.group)
            elif failed:
                self.residuals.average_copies(hosts)
        elif self._is_dense(pool) or self.residuals.by_host:
            self.residuals.to_ranks(pool.group)
        self._prepared = True

    def make(self, parameters: Sequence[Tensor], pool: CommunicatorPool) -> BucketExchange:
        """The exchange of a bucket with these parameters."""
        if self._is_dense(pool):
            pending = self.residuals.unsent(parameters, create=not self._in_place)
            return _DenseExchange(pending, pool, self._in_place)
        hosts = self._hosts.value if self.name == "hierarchical" else None
        ranks = hosts or pool
        layout = self.residuals.layout(parameters, ranks.rank, ranks.size)
        feedback = self.residuals.feedback(parameters, layout)
        exchange = QuantizedExchange(self._options, layout, feedback, ranks, 1.0 / ranks.size)
        return exchange if hosts is None else _HostExchange(exchange, hosts)

    def _is_dense(self, pool: CommunicatorPool) -> bool:
        """Whether buckets are sent exactly. One rank has gradients to send to itself only if it
        loaded residuals of several."""
        return self.name == "dense" or (self._in_place and pool.size == 1)

    @contextlib.contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """If the block fails, no rank of this host waits for this one any more."""
        try:
            yield
        except BaseException as error:  # includes Ctrl-C
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def abort(self, reason: str) -> None:
        """Ends the started exchanges between hosts. The next step makes new HostGroups."""
        self._hosts.abort(reason)

    def stats(self) -> dict[str, Any]:
        """What QuantizedGradients.stats() has of the choice."""
        return {"exchange": self.name, "exchange_costs": dict(self.costs)}

    def _choose(self, pool: CommunicatorPool) -> str:
        options, group = self._options, pool.group
        if options.exchange == "auto":
            return "hierarchical" if spans_hosts(group) else "sharded"
        if options.exchange != "auto_time":
            return options.exchange
        count = self.residuals.count
        if count == 0 or group.size == 1:
            return "sharded"
        nbytes = self.residuals.nbytes if self._in_place else 4 * count
        load = QuantizedLoad(count, nbytes, options.bits, options.down_bits, self.residuals.device)
        self.costs = costs_of_rank_0(quantized_cost.measure_exchanges(load, group), group)
        chosen = min(self.costs, key=lambda name: self.costs[name])
        if group.rank == 0:
            seconds = ", ".join(f"{name} {cost:.3g} s" for name, cost in self.costs.items())
            logging.getLogger("pycomm").info(
                "Quantize: exchange %r for %d elements on %d ranks; estimated for a step: %s",
                chosen, count, group.size, seconds,
            )  # fmt: skip
        return chosen


class _HostExchange:
    """A BucketExchange of the mean over the ranks of a host."""

    def __init__(self, inner: QuantizedExchange, hosts: HostGroups) -> None:
        self._inner, self._hosts = inner, hosts

    @property
    def sent_bytes(self) -> int:
        """Of the first rank of a host; the others send to no other host."""
        return self._inner.sent_bytes if self._hosts.leads else 0

    def start(self, x: Tensor) -> None:
        mean = x.to(torch.float32, copy=True)
        self._hosts.average(mean).wait()
        self._inner.start(mean.mul_(self._hosts.share))

    def sum_up(self) -> None:
        self._inner.sum_up()

    def finish(self, out: Tensor) -> bool:
        return self._inner.finish(out)

    def commit(self) -> None:
        self._inner.commit()

    def cancel(self) -> None:
        self._inner.cancel()


class _DenseExchange:
    """A BucketExchange without compression, of the bucket plus its residual."""

    def __init__(self, pending: list[Tensor], pool: CommunicatorPool, in_place: bool) -> None:
        self._pending, self._pool, self._in_place = pending, pool, in_place
        self._total = torch.empty(0)
        self._work: Work | None = None
        self.sent_bytes = 0

    def start(self, x: Tensor) -> None:
        self._total = x if self._in_place else x.clone()
        if self._pending:
            self._total += torch.cat(self._pending)
        self._work = self._pool.all_reduce(self._total, "avg")
        self.sent_bytes = self._total.nbytes

    def sum_up(self) -> None:
        pass

    def finish(self, out: Tensor) -> bool:
        assert self._work is not None
        self._work.wait()
        if not self._in_place:
            out.copy_(self._total)
        return bool(out.isfinite().all())

    def commit(self) -> None:
        for residual in self._pending:
            residual.zero_()

    def cancel(self) -> None:
        with contextlib.suppress(Exception):  # the pass failed, and its error was raised
            if self._work is not None:
                self._work.wait()
