"""The exchange of one bucket of quantized gradients or updates, and the choice of it.

    sharded       quantized, with owners of blocks (pycomm._quantize)
    hierarchical  the mean inside each host, then the same with hosts in place of ranks
    dense         an all-reduce of the uncompressed bucket, with what was not sent before

The choice is made at the first step, and again after a change of the ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm._core_api.calls import Work
from pycomm._quantize import Layout, Quantize, QuantizedExchange
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import quantized_cost
from pycomm.compress.exchange_policy import costs_of_rank_0
from pycomm.compress.hierarchical import CurrentHostGroups, HostGroups, spans_hosts
from pycomm.compress.quantized_cost import QuantizedLoad
from pycomm.compress.quantized_residual import Bucket, QuantizedResidual, Turned
from pycomm.compress.residual import Transaction, Whole


class BucketExchanges:
    """Chooses how buckets are exchanged, the same on all ranks, and makes the exchange of each.

    Args:
        options: bits, and the exchange or how to choose it.
        residual: of all parameters.
        in_place: the buckets are gradients, which an exchange may change. Otherwise they are
            float32 updates, which it keeps.

    Attributes:
        name: "sharded", "hierarchical" or "dense"; "": not chosen yet.
        residual: of all parameters.
        costs: seconds by exchange, if they were estimated.
    """

    def __init__(self, options: Quantize, residual: QuantizedResidual, in_place: bool) -> None:
        self._options, self.residual, self._in_place = options, residual, in_place
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
        residual, dense = self.residual, self._is_dense(pool)
        if self._options.error_feedback and not dense:
            residual.create()
        if self.name == "hierarchical":
            residual.at_hosts(self._hosts, pool.group)
        elif dense or residual.by_host:
            residual.fold(pool.group)
            residual.to_ranks(pool.group)
        self._prepared = True

    def make(
        self, parameters: Sequence[Tensor], pool: CommunicatorPool, transaction: Transaction
    ) -> BucketExchange:
        """The exchange of a bucket with these parameters; `transaction` records what it changes."""
        if self._is_dense(pool):
            return DenseExchange(self.residual, parameters, pool, transaction, self._in_place)
        hosts = self._hosts.value if self.name == "hierarchical" else None
        ranks = hosts or pool
        layout = self.residual.layout(parameters, ranks.rank, ranks.size)
        bucket = self.residual.bucket(parameters, layout)
        return OwnerExchange(self._options, layout, bucket, pool, hosts, transaction)

    def _is_dense(self, pool: CommunicatorPool) -> bool:
        """Whether buckets are sent exactly. One rank has gradients to send to itself only if it
        loaded residuals of several."""
        return self.name == "dense" or (self._in_place and pool.size == 1)

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
        count = self.residual.count
        if count == 0 or group.size == 1:
            return "sharded"
        nbytes = self.residual.nbytes if self._in_place else 4 * count
        load = QuantizedLoad(count, nbytes, options.bits, options.down_bits, self.residual.device)
        self.costs = costs_of_rank_0(quantized_cost.measure_exchanges(load, group), group)
        chosen = min(self.costs, key=lambda name: self.costs[name])
        if group.rank == 0:
            seconds = ", ".join(f"{name} {cost:.3g} s" for name, cost in self.costs.items())
            logging.getLogger("pycomm").info(
                "Quantize: exchange %r for %d elements on %d ranks; estimated for a step: %s",
                chosen, count, group.size, seconds,
            )  # fmt: skip
        return chosen


class OwnerExchange(QuantizedExchange):
    """An exchange of a bucket, with owners of blocks, of ranks or of the means inside hosts."""

    def __init__(
        self,
        options: Quantize,
        layout: Layout,
        bucket: Bucket | None,
        pool: CommunicatorPool,
        hosts: HostGroups | None,
        transaction: Transaction,
    ) -> None:
        ranks = hosts or pool
        feedback = None if bucket is None else bucket.feedback
        super().__init__(options, layout, feedback, ranks, 1.0 / ranks.size)
        self._bucket, self._hosts, self._recorded = bucket, hosts, transaction

    def start(self, x: Tensor) -> None:
        if self._hosts is not None:
            x = x.to(torch.float32, copy=True)
            self._hosts.average(x).wait()
            x.mul_(self._hosts.share)
        super().start(x)

    def sum_up(self) -> None:
        super().sum_up()
        if self._bucket is not None:
            self._recorded.record(Turned(self._bucket))
        if self._hosts is not None and not self._hosts.leads:
            self.sent_bytes = 0  # it sends to no other host


class DenseExchange:
    """The same, without compression, of the bucket plus its residual."""

    def __init__(
        self,
        residual: QuantizedResidual,
        parameters: Sequence[Tensor],
        pool: CommunicatorPool,
        transaction: Transaction,
        in_place: bool,
    ) -> None:
        names = residual.names(parameters)
        self._unsent = dict(zip(names, residual.unsent(parameters), strict=False))
        self._pool, self._recorded, self._in_place = pool, transaction, in_place
        self._total = torch.empty(0)
        self._work: Work | None = None
        self.sent_bytes = 0

    def start(self, x: Tensor) -> None:
        self._total = x if self._in_place else x.clone()
        if self._unsent:
            self._total += torch.cat(list(self._unsent.values()))
        for name, residual in self._unsent.items():
            self._recorded.record(Whole(name, [residual]))
            residual.zero_()
        self._work = self._pool.all_reduce(self._total, "avg")
        self.sent_bytes = self._total.nbytes

    def sum_up(self) -> None:
        pass

    def finish(self, out: Tensor) -> bool:
        assert self._work is not None
        self._work.wait_for_device()
        if not self._in_place:
            out.copy_(self._total)
        return bool(out.isfinite().all())

    def cancel(self) -> None:
        with contextlib.suppress(Exception):  # the pass failed, and its error was raised
            if self._work is not None:
                self._work.wait()


BucketExchange = OwnerExchange | DenseExchange
