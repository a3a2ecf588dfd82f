"""A step of DGC as a transaction: prepare, vote, exchange, commit, or roll back.

docs/compression.md has a diagram. A reducer, pycomm's or torch's, adds buckets with add(); finish()
ends the step. There is one Step for each backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pycomm import collectives, kernels
from pycomm._core_api.calls import Work
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.bucket import ReceivedPackets, joined
from pycomm.compress.dense import apply_momentum, clip_gradients
from pycomm.compress.hierarchical import HostGroups
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet import Packet, Update
from pycomm.compress.packet_exchange import AllGatherExchange
from pycomm.compress.parameter_state import ParameterState, flat_view
from pycomm.compress.residual import Transaction, Whole
from pycomm.errors import Mismatch


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step, the same on all ranks.

    Attributes:
        exchange: "dense": no compression; "gather", "sharded", "hierarchical": packets;
            "dense_masked": a packet is sent as a dense gradient.
        k: number of sent elements, of each parameter or of all together.
        masking: momentum factor masking.
        clip: limit of the norm of a gradient, or of all `together`; None: no clipping.
        loss_scale: factor of the gradients, which a device may have; None: no vote on Inf and NaN.
        fused: the optimizer's step applies the packets, see `Step.deferred`.
        packet_exchange: for compact packets, which are sent after the last gradient; None: raw
            packets, which are sent as soon as they are ready.
        hosts: with "hierarchical": the hosts exchange packets of their mean gradients.
    """

    exchange: str
    k: Mapping[ParameterState, int] | int
    masking: bool = True
    clip: float | None = None
    together: bool = False
    loss_scale: Tensor | float | None = None
    fused: bool = False
    packet_exchange: AllGatherExchange | None = None
    hosts: HostGroups | None = None

    @property
    def scale(self) -> float | None:
        """The loss scale; no wait for a device once the vote has read it."""
        return self.loss_scale if self.loss_scale is None else float(self.loss_scale)

    @property
    def waits(self) -> bool:
        """Whether compression must wait until all gradients are complete."""
        whole = self.together and self.clip is not None
        one = isinstance(self.k, int) or self.hosts is not None
        return self.loss_scale is not None or one or whole


StateAndGradient = tuple[ParameterState, Tensor]  # of one parameter


@dataclass(eq=False)
class _Bucket:
    """A bucket as one array, and its gradients: compressed ones and dense ones."""

    flat: Tensor
    compressed: list[StateAndGradient]
    dense: list[tuple[ParameterState | None, Tensor]]
    rest: Tensor | None = None  # copy of the dense gradients if the bucket has both

    def take_back(self) -> None:
        """Copies the result in `rest` back to the gradients."""
        if self.rest is not None:
            parts = torch.split(self.rest, [gradient.numel() for _, gradient in self.dense])
            for (_, gradient), part in zip(self.dense, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


class Step:
    """The step of one backward pass. If a method raises, u and v are rolled back.

    `idle`: this rank has no data, so its gradients and its weight decay are 0.

    Attributes:
        sent_bytes: bytes that this rank gave to exchanges.
    """

    def __init__(
        self,
        plan: StepPlan,
        memories: Mapping[Tensor, ParameterState],
        workspaces: dict[tuple[str, ...], Tensor],
        pool: CommunicatorPool,
        idle: bool = False,
    ) -> None:
        self._plan, self._memories, self._workspaces, self._pool = plan, memories, workspaces, pool
        self._buckets: list[_Bucket] = []
        self._waiting: list[_Bucket] = []
        self._packets: list[tuple[Packet, Tensor | None]] = []  # with the packets of all ranks
        self._coded: list[ReceivedPackets] = []
        self._works: list[Work] = []
        self._norm: Tensor | None = None  # of all gradients, if known
        self._transaction = Transaction()
        self._unused: set[ParameterState] = set()  # by any rank, once it is known
        self._idle = idle
        self._size = (plan.hosts or pool).size  # a copy, because the pool may shrink
        self.sent_bytes = 0

    def add(
        self,
        flat: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lacking: Collection[Tensor],
    ) -> None:
        """Adds a bucket with complete gradients, which are views of `flat`, as is the result."""
        bucket = _Bucket(flat, [], [])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            memory = self._memories.get(parameter)
            if memory is None or memory.v is None or self._plan.exchange == "dense":
                bucket.dense.append((memory, gradient))
            else:
                bucket.compressed.append((memory, gradient))
        self._buckets.append(bucket)
        if bucket.compressed and self._plan.waits:
            self._waiting.append(bucket)
            if self._plan.hosts is not None:
                with self._rolled_back():
                    self._works.append(self._plan.hosts.average(flat))
        else:
            self._save(m for m, _ in bucket.compressed if m.parameter in lacking)
            with self._rolled_back():
                self._start([bucket])

    def finish(
        self,
        ending: contextlib.ExitStack,
        unused: Collection[Tensor],
        sparse: Sequence[Tensor] = (),
    ) -> bool:
        """Ends the step. False: a rank has Inf or NaN, and no rank changed its state. Once the step
        is complete, Ctrl-C is deferred until `ending` closes. See Exchange.finish."""
        self._unused = {self._memories[p] for p in unused if p in self._memories}
        with self._rolled_back():
            if self._plan.loss_scale is not None:
                self._wait()
                values = [gradient.values() for gradient in sparse]
                if not self._vote(self._plan.loss_scale, values):
                    self._set_infinite(values)
                    return False
            if self._plan.hosts is not None:
                self._wait()
                self._idle = self._plan.hosts.agree(self._idle)
            self._measure()
            whole = isinstance(self._plan.k, int)
            for buckets in [self._waiting] if whole else [[bucket] for bucket in self._waiting]:
                self._start(buckets)
            self._exchange_packets()
            self._wait()
            self._write_results()
            for work in self._works:
                work.wait_for_device()
            ending.enter_context(defer_sigint())
        self._commit()
        return True

    def cancel(self) -> None:
        """Rolls back after a failed pass: all elements count as unsent."""
        with contextlib.suppress(Exception):  # the pass already reports an error
            self._wait()
        self._transaction.undo()

    def commit_sent(self) -> None:
        """Marks a step as sent that was rolled back here but completed by another rank."""
        self._transaction.redo()
        self._transaction.commit(self._unused)

    def deferred(self) -> tuple[Callable[[], None] | None, list[ParameterState]]:
        """After finish() of a fused step: the update of parameters, and their states."""
        received, factor = self._all_received(), 1.0 / self._size

        def update() -> None:
            for one in received:
                one.bucket.update(one.pairs, factor)

        return update, [memory for one in received for memory in one.bucket.memories]

    def _all_received(self) -> list[ReceivedPackets]:
        """All received packets."""
        raw = [(packet, gathered) for packet, gathered in self._packets if gathered is not None]
        return [
            *self._coded,
            *(one for packet, gathered in raw for one in packet.received(gathered)),
        ]

    def _save(self, memories: Iterable[ParameterState]) -> None:
        """Saves u and v of parameters that may turn out to be unused."""
        for memory in memories:
            self._transaction.record(Whole(memory, memory.tensors))

    def _start(self, buckets: list[_Bucket]) -> None:
        """Compresses these buckets into one packet and starts their transfers."""
        pairs = _in_order(buckets)
        if not isinstance(self._plan.k, int):
            pairs = [pair for pair in pairs if pair[0] not in self._unused]
        if pairs:
            self._prepare(pairs)
        for bucket in buckets:
            self._send_dense(bucket)

    def _measure(self) -> None:
        """Computes the norm of all gradients to compress, if clipping is global."""
        pairs = _in_order(self._waiting)
        if self._plan.clip is not None and self._plan.together and pairs:
            norms = kernels.norm([flat_view(gradient) for _, gradient in pairs])
            self._norm = kernels.norm(norms)

    def _prepare(self, pairs: list[StateAndGradient]) -> None:
        plan = self._plan
        memories = [memory for memory, _ in pairs]
        unused = self._unused.intersection(memories)
        self._save(unused)
        for memory in unused:  # so none of its elements is selected
            for x in memory.tensors:
                x.zero_()
        k = plan.k if isinstance(plan.k, int) else [plan.k[memory] for memory in memories]
        packet = Packet(memories, [gradient for _, gradient in pairs], k, self._workspaces)
        self._packets.append((packet, None))
        # The paper's threshold is for gradients divided by the number of ranks; these are not.
        limit = None if plan.clip is None else plan.clip * math.sqrt(self._size)
        unscale = (1.0 if plan.hosts is None else plan.hosts.share) / (plan.scale or 1.0)
        update = Update(plan.masking, unscale, limit, self._norm, self._idle, unused)
        packet.prepare(update, self._transaction)
        if plan.exchange == "dense_masked":
            packet.mask()
            return
        if plan.packet_exchange is not None:
            return  # sent after the last gradient
        gathered = packet.buffer.new_empty((self._pool.size, *packet.buffer.shape))
        self._packets[-1] = (packet, gathered)
        self._works.append(self._pool.all_gather(packet.buffer, gathered))
        self.sent_bytes += packet.buffer.nbytes

    def _exchange_packets(self) -> None:
        """Exchanges coded packets, of the arrays with a parameter that a rank used."""
        if self._plan.packet_exchange is None:
            return
        parts = [part for packet, _ in self._packets for part in packet.parts]
        buckets = joined(left for part in parts for left in part.without(self._unused))
        if buckets:
            exchange = self._plan.packet_exchange.exchange
            ranks = self._plan.hosts or self._pool
            self._coded, sent = exchange(buckets, ranks, self._transaction, self._unused)
            follower = self._plan.hosts is not None and not self._plan.hosts.leads
            self.sent_bytes += 0 if follower else sent

    def _send_dense(self, bucket: _Bucket) -> None:
        flat = bucket.flat
        if bucket.compressed and self._plan.exchange != "dense_masked":
            if not bucket.dense:
                return
            flat = bucket.rest = torch.cat([gradient.reshape(-1) for _, gradient in bucket.dense])
        self._works.append(self._pool.all_reduce(flat, "avg"))
        self.sent_bytes += flat.nbytes

    def _wait(self) -> None:
        for work in self._works:
            work.wait()

    def _vote(self, unread: Tensor | float, values: Sequence[Tensor]) -> bool:
        """Collective. Whether no rank has Inf or NaN, in its gradients, in an average, or in the
        `values` of sparse gradients. Waits once for the device, which also has the loss scale.

        Raises:
            Mismatch: on all ranks, if ranks with data have different loss scales.
        """
        gradients = [*values, *(bucket.flat for bucket in self._buckets)]
        place = gradients[0].device if gradients else None
        given = torch.as_tensor(unread, device=place).squeeze()
        found = [gradient.isfinite().all().to(given.device) for gradient in gradients]
        finite = torch.stack([*found, given > 0]).all()
        signed = float(torch.where(finite, given, -given))
        scale = abs(signed)
        self._plan = replace(self._plan, loss_scale=scale)  # read
        low, high = (-math.inf, -math.inf) if self._idle else (-scale, scale)
        word = torch.tensor([0.0 if signed > 0 else 1.0, low, high], dtype=torch.float64)
        collectives.all_reduce(word, "max", group=self._pool.group)
        infinite, low, high = word.tolist()
        if -low != high:
            raise Mismatch(
                f"loss scale differs between ranks, from {-low} to {high}; on this rank {scale}: "
                "load one rank's state of the scaler on all ranks"
            )
        return not infinite

    def _set_infinite(self, values: Sequence[Tensor]) -> None:
        """Writes Inf to each gradient, so that the scaler of this rank skips the step of each
        optimizer."""
        for bucket in self._buckets:
            for _, gradient in (*bucket.compressed, *bucket.dense):
                flat_view(gradient)[:1] = math.inf
        for one in values:
            one[:1] = math.inf

    def _write_results(self) -> None:
        """Writes the received sums to the gradients. No persistent state changes."""
        unused = self._unused
        for one in self._all_received() if unused else ():
            one.silence(unused)
        for one in () if self._plan.fused else self._all_received():
            one.bucket.decode(one.pairs, 1.0 / self._size)
        for bucket in self._buckets:
            bucket.take_back()
        gradients = [gradient for _, gradient in self._averaged()]
        if (scale := self._plan.scale) is not None:
            _multiply(gradients, 1.0 / scale)
        if self._plan.clip is not None:
            clip_gradients(gradients, self._plan.clip, self._plan.together)

    def _averaged(self) -> list[StateAndGradient]:
        """The uncompressed parameters and their averaged gradients."""
        found = [(m, g) for bucket in self._buckets for m, g in bucket.dense if m is not None]
        return [(memory, gradient) for memory, gradient in found if memory not in self._unused]

    def _commit(self) -> None:
        """Ends the transaction, and applies momentum to dense gradients."""
        averaged = self._averaged()
        for memory, gradient in averaged:
            apply_momentum(memory, gradient)
        scale = self._plan.scale
        if scale is not None:
            _multiply([gradient for _, gradient in averaged], scale)
            if not self._plan.fused:
                _multiply([g for bucket in self._buckets for _, g in bucket.compressed], scale)
        for memory, gradient in (pair for bucket in self._buckets for pair in bucket.compressed):
            if memory.late_decay:
                alpha = memory.late_decay * (scale or 1.0)
                flat_view(gradient).add_(flat_view(memory.parameter), alpha=alpha)
        self._transaction.commit(self._unused)

    @contextlib.contextmanager
    def _rolled_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # includes Ctrl-C: u and v must be restored
            if self._plan.hosts is not None:
                self._plan.hosts.abort(f"{type(error).__name__}: {error}")
            self._transaction.undo()
            raise


def _in_order(buckets: Sequence[_Bucket]) -> list[StateAndGradient]:
    """The compressed parameters and gradients, in an order that is independent of buckets."""
    pairs = [pair for bucket in buckets for pair in bucket.compressed]
    return sorted(pairs, key=lambda pair: pair[0].place)


def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)
