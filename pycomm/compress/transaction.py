"""A step of DGC as a transaction: prepare, vote, exchange, commit, or roll back.

docs/compression.md has the drawing. Buckets come from a reducer, ours or torch's, through add();
finish() ends the step. Called by dgc.py, which makes one for each backward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pycomm import collectives, kernels
from pycomm.calls import Work
from pycomm.communicators import CommunicatorPool
from pycomm.compress.bucket import Arrived, CompressionBucket
from pycomm.compress.dense import apply_momentum, clip_averaged
from pycomm.compress.hierarchical import Hosts
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet import Packet, Update
from pycomm.compress.packet_exchange import PacketTransport
from pycomm.compress.parameter_state import ParameterState, line
from pycomm.errors import Mismatch

__all__ = ["PacketExchange", "Plan", "Step"]


class PacketExchange(Protocol):
    """How compact packets travel: packet_exchange.py, sharded.py."""

    def exchange(
        self, units: Sequence[CompressionBucket], transport: PacketTransport
    ) -> tuple[list[Arrived], int]:
        """Collective, behind the last gradient: what has arrived, and the bytes that were given.
        Nothing that lasts changes."""

    def commit(self) -> None:
        """What exchange() has found holds from now on."""

    def lost(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """For each unit [k]: what its values have lost on the way, where exchange() between `size`
        failed when all of it was on its way already."""


@dataclass(frozen=True)
class Plan:
    """What holds for one step, the same on all ranks.

    Attributes:
        exchange: "dense": nothing is compressed; "gather", "sharded", "hierarchical": packets
            travel; "dense_masked": a packet travels as a dense gradient.
        k: how many elements of each are sent; or of all together.
        masking: momentum factor masking.
        clip: limit of the norm of a gradient, or of all `together`; None: no clipping.
        loss_scale: what gradients are multiplied by; None: no vote on Inf and NaN.
        fused: what was gathered waits for the optimizer's step, `Step.deferred`.
        packet_exchange: of compact packets, which wait for the last gradient; None: packets are
            raw, and leave when they are there.
        hosts: of "hierarchical": packets travel between them, of gradients that are means over
            each.
    """

    exchange: str
    k: Mapping[ParameterState, int] | int
    masking: bool = True
    clip: float | None = None
    together: bool = False
    loss_scale: float | None = None
    fused: bool = False
    packet_exchange: PacketExchange | None = None
    hosts: Hosts | None = None

    @property
    def waits(self) -> bool:
        """Whether something must be known of all gradients before one is compressed."""
        whole = self.together and self.clip is not None
        one = isinstance(self.k, int) or self.hosts is not None
        return self.loss_scale is not None or one or whole


Pair = tuple[ParameterState, Tensor]  # a memory and its gradient


@dataclass(eq=False)
class _Load:
    """A bucket: all of it as one array, and its gradients by how they travel."""

    flat: Tensor
    compressed: list[Pair]
    dense: list[tuple[ParameterState | None, Tensor]]
    rest: Tensor | None = None  # a copy of the dense ones, where they share the bucket

    def take_back(self) -> None:
        """Puts what has become of `rest` where the gradients lie."""
        if self.rest is not None:
            parts = torch.split(self.rest, [gradient.numel() for _, gradient in self.dense])
            for (_, gradient), part in zip(self.dense, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


class Step:
    """One backward pass. A method that raises has rolled back what was prepared.

    `idle`: this rank has no data; its gradients are 0, and its decay shall be.

    Attributes:
        sent_bytes: what this rank has given to exchanges.
    """

    def __init__(
        self,
        plan: Plan,
        memories: Mapping[Tensor, ParameterState],
        workspaces: dict[tuple[str, ...], Tensor],
        pool: CommunicatorPool,
        idle: bool = False,
    ) -> None:
        self._plan, self._memories, self._workspaces, self._pool = plan, memories, workspaces, pool
        self._loads: list[_Load] = []
        self._waiting: list[_Load] = []
        self._packets: list[tuple[Packet, Tensor | None]] = []  # with the packets of all ranks
        self._undone: list[Packet] = []  # that were rolled back
        self._coded: list[Arrived] = []
        self._works: list[Work] = []
        self._norm: Tensor | None = None  # of all gradients, if known
        self._idle = idle
        self._transport: PacketTransport = plan.hosts or pool
        self._size = self._transport.size  # today's: the pool may shrink
        self.sent_bytes = 0

    def add(self, flat: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The gradients of a bucket are there, as views into `flat`; the result will be too."""
        load = _Load(flat, [], [])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            memory = self._memories.get(parameter)
            if memory is None or memory.v is None or self._plan.exchange == "dense":
                load.dense.append((memory, gradient))
            else:
                load.compressed.append((memory, gradient))
        self._loads.append(load)
        if load.compressed and self._plan.waits:
            self._waiting.append(load)
            if self._plan.hosts is not None:
                with self._rolled_back():
                    self._works.append(self._plan.hosts.average(flat))
        else:
            with self._rolled_back():
                self._start([load])

    def finish(self, ending: contextlib.ExitStack) -> bool:
        """Ends the step. False: a rank has Inf or NaN, and nothing has changed on any. From the
        moment on at which it is complete Ctrl-C waits until `ending` ends."""
        with self._rolled_back():
            if self._plan.loss_scale is not None:
                self._wait()
                if not self._vote(self._plan.loss_scale):
                    self._spoil()
                    return False
            if self._plan.hosts is not None:
                self._wait()
                self._idle = self._plan.hosts.agree(self._idle)
            self._measure()
            whole = isinstance(self._plan.k, int)
            for loads in [self._waiting] if whole else [[load] for load in self._waiting]:
                self._start(loads)
            self._carry()
            self._wait()
            self._take()
            ending.enter_context(defer_sigint())
        self._commit()
        return True

    def cancel(self) -> None:
        """The pass did not reach its end: nothing counts as sent."""
        with contextlib.suppress(Exception):
            self._wait()
        self._roll_back()

    def commit_sent(self) -> None:
        """After a step that was rolled back, but that another rank has completed."""
        for packet in self._undone:
            packet.take_out(self._plan.masking)
        if self._plan.packet_exchange is not None:
            units = [unit for packet in self._undone for unit in packet.units()]
            for unit, lost in zip(
                units, self._plan.packet_exchange.lost(units, self._size), strict=True
            ):
                unit.give_back(lost)
            self._plan.packet_exchange.commit()
        self._undone = []

    def deferred(self) -> tuple[Callable[[], None] | None, list[ParameterState]]:
        """After finish() of a fused step: its update of parameters, and of whose."""
        arrived, factor = self._arrived(), 1.0 / self._size

        def update() -> None:
            for one in arrived:
                one.unit.update(one.pairs, factor)

        return update, [memory for one in arrived for memory in one.unit.memories]

    def _arrived(self) -> list[Arrived]:
        """What packets have brought."""
        raw = [(packet, gathered) for packet, gathered in self._packets if gathered is not None]
        return [
            *self._coded,
            *(one for packet, gathered in raw for one in packet.arrived(gathered)),
        ]

    @property
    def is_dense(self) -> bool:
        """Whether nothing is compressed."""
        return self._plan.exchange == "dense"

    def sent(self) -> Iterator[tuple[ParameterState, Tensor]]:
        """For each memory that was compressed the places that this rank has sent."""
        for packet, _ in self._packets:
            yield from packet.sent()

    def _start(self, loads: list[_Load]) -> None:
        """Compresses what is to be compressed of these, in one packet, and lets all travel."""
        pairs = _in_order(loads)
        if pairs:
            self._prepare(pairs)
        for load in loads:
            self._send_dense(load)

    def _measure(self) -> None:
        """The norm of all that is to be compressed, where one is asked for."""
        pairs = _in_order(self._waiting)
        if self._plan.clip is not None and self._plan.together and pairs:
            norms = kernels.norm([line(gradient) for _, gradient in pairs])
            self._norm = kernels.norm(norms)

    def _prepare(self, pairs: list[Pair]) -> None:
        plan = self._plan
        memories = [memory for memory, _ in pairs]
        k = plan.k if isinstance(plan.k, int) else [plan.k[memory] for memory in memories]
        packet = Packet(memories, [gradient for _, gradient in pairs], k, self._workspaces)
        self._packets.append((packet, None))
        # The paper's threshold is for gradients divided by the number of ranks; these are not.
        limit = None if plan.clip is None else plan.clip * math.sqrt(self._size)
        unscale = (1.0 if plan.hosts is None else plan.hosts.share) / (plan.loss_scale or 1.0)
        packet.prepare(Update(plan.masking, unscale, limit, self._norm, self._idle))
        if plan.exchange == "dense_masked":
            packet.mask()
            return
        if plan.packet_exchange is not None:
            return  # until the last gradient is there
        gathered = packet.buffer.new_empty((self._pool.size, *packet.buffer.shape))
        self._packets[-1] = (packet, gathered)
        self._works.append(self._pool.all_gather(packet.buffer, gathered))
        self.sent_bytes += packet.buffer.nbytes

    def _carry(self) -> None:
        """Lets compact packets travel."""
        units = [unit for packet, _ in self._packets for unit in packet.units()]
        if self._plan.packet_exchange is not None and units:
            self._coded, sent = self._plan.packet_exchange.exchange(units, self._transport)
            led = self._plan.hosts is not None and not self._plan.hosts.leads
            self.sent_bytes += 0 if led else sent

    def _send_dense(self, load: _Load) -> None:
        flat = load.flat
        if load.compressed and self._plan.exchange != "dense_masked":
            if not load.dense:
                return
            flat = load.rest = torch.cat([gradient.reshape(-1) for _, gradient in load.dense])
        self._works.append(self._pool.all_reduce(flat, "avg"))
        self.sent_bytes += flat.nbytes

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _vote(self, scale: float) -> bool:
        """Whether no rank has Inf or NaN, in a gradient of its own or in an average.

        Raises Mismatch on all where those who have data have not the same loss scale.
        """
        finite = all(bool(load.flat.isfinite().all()) for load in self._loads)
        low, high = (-math.inf, -math.inf) if self._idle else (-scale, scale)
        word = torch.tensor([0.0 if finite else 1.0, low, high], dtype=torch.float64)
        collectives.all_reduce(word, "max", group=self._pool.group)
        found, low, high = word.tolist()
        if -low != high:
            raise Mismatch(
                f"the loss scales of the ranks went apart, from {-low} to {high}; here it is "
                f"{scale}: load one rank's state of the scaler on all"
            )
        return not found

    def _spoil(self) -> None:
        """Lets the loss scale find Inf on this rank too, so that all skip this step."""
        self._loads[0].flat[:1] = math.inf

    def _take(self) -> None:
        """Gradients become what has arrived. Nothing that lasts changes."""
        for one in () if self._plan.fused else self._arrived():
            one.unit.decode(one.pairs, 1.0 / self._size)
        for load in self._loads:
            load.take_back()
        gradients = [gradient for _, gradient in self._averaged()]
        if self._plan.loss_scale is not None:
            _multiply(gradients, 1.0 / self._plan.loss_scale)
        if self._plan.clip is not None:
            clip_averaged(gradients, self._plan.clip, self._plan.together)

    def _averaged(self) -> list[Pair]:
        """What has travelled dense and has a velocity."""
        return [(m, g) for load in self._loads for m, g in load.dense if m is not None]

    def _commit(self) -> None:
        """What was sent is not owed any more, and what travelled dense has its momentum."""
        for one in self._coded:
            if one.lost is not None:
                one.unit.give_back(one.lost)
        if self._plan.packet_exchange is not None:
            self._plan.packet_exchange.commit()
        averaged = self._averaged()
        for memory, gradient in averaged:
            apply_momentum(memory, gradient)
        scale = self._plan.loss_scale
        if scale is not None:
            _multiply([gradient for _, gradient in averaged], scale)
            if not self._plan.fused:
                _multiply([g for load in self._loads for _, g in load.compressed], scale)

    def _roll_back(self) -> None:
        packets, self._packets = self._packets, []
        for packet, _ in packets:
            packet.rollback()
            self._undone.append(packet)

    @contextlib.contextmanager
    def _rolled_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # Ctrl-C too: u and v must be put back
            if self._plan.hosts is not None:
                self._plan.hosts.abort(f"{type(error).__name__}: {error}")
            self._roll_back()
            raise


def _in_order(loads: Sequence[_Load]) -> list[Pair]:
    """What is compressed of these, in an order that no bucket has a say in."""
    pairs = [pair for load in loads for pair in load.compressed]
    return sorted(pairs, key=lambda pair: pair[0].place)


def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)
