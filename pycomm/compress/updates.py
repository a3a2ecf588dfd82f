"""Compresses the updates of an optimizer and exchanges them, for LocalSGD.

A step is a transaction. `exchange` adds the updates to the residuals, selects and sends; if it
fails, the residuals get back what was selected, so that this rank has sent nothing. `commit`
changes the parameters.
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives, kernels
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet_exchange import all_gather
from pycomm.compress.parameter_state import flat_view, is_dense
from pycomm.compress.topk import TopK, sent_bytes
from pycomm.errors import InvalidArgument, Mismatch, Unsupported
from pycomm.group import Group
from pycomm.kernels import PacketBatch, UpdatePacket

__all__ = ["UpdateCompressor"]


@dataclass(eq=False)
class _Unit:
    """Parameters of one dtype, from which groups are selected together.

    Attributes:
        places: positions among the model's parameters.
        own: the parameters.
        theta: flat views of the shared parameters.
        residual: float32, as theta.
        k: number of groups that a rank sends.
        workspace: of the update step.
        packet: what this rank sent in the current exchange, or in the last one if that failed.
        rest: the values of the selected groups after they were sent, if an exchange failed.
    """

    places: list[int]
    own: list[Tensor]
    theta: list[Tensor]
    residual: list[Tensor]
    k: int
    workspace: kernels.UpdateWorkspace
    packet: UpdatePacket | None = None
    rest: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """Flat views of the parameters, whose memory the program may have replaced."""
        return [flat_view(x) for x in self.own]

    @property
    def counts(self) -> list[int]:
        """Elements of each parameter."""
        return [x.numel() for x in self.theta]


class UpdateCompressor:
    """The exchange of compressed updates.

    Args:
        options: of TopK.
        parameters: the parameters that the optimizer changes.
        snapshot: the shared parameters, equal on all ranks; `commit` changes them.
        group: the ranks.

    Attributes:
        sent_bytes: bytes that this rank sent in the last exchange, without headers of frames.
        decay: for each parameter, the factor of the shared one at the next commit.
        skipped: all ranks skip this step.

    Raises:
        Unsupported: parameters on a GPU, with gaps in memory, or not float32 or 16-bit floats.
        InvalidArgument: the parameters are too few for the ratio.
    """

    def __init__(
        self, options: TopK, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Group
    ) -> None:
        self._options = options
        self._pool = CommunicatorPool(group, 1)
        self._parameters = list(parameters)
        self._theta = list(snapshot)
        _check(parameters)
        alike: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(parameters):
            alike.setdefault(parameter.dtype, []).append(place)
        self._units = [self._unit(places) for places in alike.values()]
        self.sent_bytes = 0
        self.decay = [1.0] * len(self._parameters)
        self.skipped = False

    def _unit(self, places: list[int]) -> _Unit:
        theta = [flat_view(self._theta[i]) for i in places]
        k = self._options.groups([x.numel() for x in theta])
        return _Unit(
            places,
            [self._parameters[i] for i in places],
            theta,
            [torch.zeros(x.numel()) for x in theta],
            k,
            kernels.update_workspace(
                theta, k, group=self._options.group, value_dtype=self._options.value_dtype
            ),
        )

    @property
    def groups(self) -> int:
        """Groups that a rank sends in a step."""
        return sum(unit.k for unit in self._units)

    @property
    def ratio(self) -> float:
        """4 bytes for each parameter, over the bytes that a rank is expected to send in a step."""
        sent = sum(sent_bytes(self._options, unit.k, unit.counts) for unit in self._units)
        return 4 * sum(sum(unit.counts) for unit in self._units) / sent

    @property
    def residual(self) -> list[Tensor]:
        """The residual of each parameter, flat, in the order of its memory."""
        found: list[tuple[int, Tensor]] = []
        for unit in self._units:
            found += zip(unit.places, unit.residual, strict=True)
        return [x for _, x in sorted(found, key=lambda pair: pair[0])]

    @contextlib.contextmanager
    def exchange(self, step: int) -> Iterator[list[PacketBatch]]:
        """Collective. The packets of all ranks; the parameters are those of the snapshot again.

        If the exchange or the block fails, this rank has sent nothing: its updates are in the
        residuals.

        Args:
            step: its number, which must be the same on all ranks, as `decay` and the options.

        Raises:
            Mismatch: on all ranks, if ranks differ in their step, decay or number of groups.
        """
        self._forget()
        try:
            with defer_sigint():
                packets = [self._prepare(unit) for unit in self._units]
            values = struct.pack(f"q{len(self.decay)}d", step, *self.decay)
            word = struct.pack("I", zlib.crc32(values + repr(self._options).encode()))
            check = torch.frombuffer(bytearray(word), dtype=torch.uint8)
            gathered, self.sent_bytes = all_gather([*packets, check], self._pool)
            words, _ = gathered.pop()
            if len(set(words.view(torch.int32).tolist())) > 1:
                raise Mismatch(
                    "LocalSGD: ranks differ in the step, the learning rate or weight decay of a "
                    "parameter group, or in TopK: load one rank's step and schedule on all ranks"
                )
            yield [
                kernels.decode_groups(message, sizes, unit.counts, group=self._options.group)
                for unit, (message, sizes) in zip(self._units, gathered, strict=True)
            ]
        except BaseException:  # includes Ctrl-C: what was selected must be restored
            self._roll_back()
            raise

    def _prepare(self, unit: _Unit) -> Tensor:
        unit.packet = kernels.update_step(
            unit.theta,
            unit.parameters,
            unit.residual,
            unit.k,
            group=self._options.group,
            value_dtype=self._options.value_dtype,
            workspace=unit.workspace,
        )
        packet: Tensor = unit.packet.packet
        return packet

    def _roll_back(self) -> None:
        for unit in self._units:
            if unit.packet is not None and unit.rest is None:
                unit.rest = self._selected(unit, unit.packet)
                self._restore(unit, unit.packet, unit.packet.values)

    def _selected(self, unit: _Unit, packet: UpdatePacket) -> Tensor:
        """The residual in the selected groups, which is the rounding error after a step."""
        sent = kernels.decode_groups(
            packet.packet, [len(packet.packet)], unit.counts, group=self._options.group
        )
        error = packet.values - sent.values
        return torch.where(error.isfinite(), error, 0)

    def _restore(self, unit: _Unit, packet: UpdatePacket, values: Tensor) -> None:
        kernels.update_rollback(unit.residual, packet.indices, values, group=self._options.group)

    def commit(self, received: Sequence[PacketBatch]) -> None:
        """Multiplies the shared parameters by `decay`, and subtracts the mean of the received
        updates."""
        for unit, batch in zip(self._units, received, strict=True):
            factors = [self.decay[place] for place in unit.places]
            if unit.theta[0].dtype == torch.float32:
                for x, y, factor in zip(unit.theta, unit.parameters, factors, strict=True):
                    if factor != 1:
                        x.mul_(factor)
                        y.copy_(x)
                for tensors in (unit.theta, unit.parameters):
                    kernels.decode_update(tensors, batch, 1.0, 1.0 / self._pool.size)
            else:
                self._commit_rounded(unit, batch, factors)
        self._finish()

    def _commit_rounded(self, unit: _Unit, batch: PacketBatch, factors: list[float]) -> None:
        """For 16-bit parameters: what theta loses in rounding, the same on all ranks, stays in the
        residual of each rank."""
        means = [torch.empty(count) for count in unit.counts]
        kernels.decode_sum(means, batch, 1.0 / self._pool.size)
        rows = zip(unit.theta, unit.parameters, unit.residual, means, factors, strict=True)
        for theta, parameter, residual, mean, factor in rows:
            exact = theta.float().mul_(factor).sub_(mean)
            theta.copy_(exact)
            parameter.copy_(theta)
            error = theta.float().sub_(exact)
            residual.add_(torch.where(error.isfinite(), error, 0))

    def means(self, received: Sequence[PacketBatch]) -> list[Tensor]:
        """The mean of the received updates of each parameter, dense, of its shape and dtype. The
        shared parameters are multiplied by `decay`."""
        for theta, factor in zip(self._theta, self.decay, strict=True):
            theta.mul_(factor)
        found = [torch.empty_like(x, requires_grad=False) for x in self._parameters]
        for unit, batch in zip(self._units, received, strict=True):
            dense = [flat_view(found[place]) for place in unit.places]
            kernels.decode_sum(dense, batch, 1.0 / self._pool.size)
        return found

    def commit_outer(self) -> None:
        """Ends an exchange after which an outer optimizer changed the parameters."""
        for unit in self._units:
            for theta, parameter in zip(unit.theta, unit.parameters, strict=True):
                theta.copy_(parameter)
        self._finish()

    def _forget(self) -> None:
        """Ends the last exchange, which cannot be rolled back any more."""
        for unit in self._units:
            unit.packet = unit.rest = None

    def _finish(self) -> None:
        self._forget()
        self.decay = [1.0] * len(self.decay)
        for unit in self._units:
            if not self._options.error_feedback:
                for residual in unit.residual:
                    residual.zero_()

    def commit_missed(self) -> None:
        """Marks as sent what this rank rolled back and another rank received."""
        for unit in self._units:
            if unit.packet is not None and unit.rest is not None:
                self._restore(unit, unit.packet, unit.rest)
        self._finish()

    def use_group(self, group: Group) -> None:
        """Exchanges among the ranks of this group from now on."""
        self._pool = CommunicatorPool(group, 1)

    def estimate_lost_residual(self, lost: int) -> float:
        """Collective. An estimate of the norm of the residual of `lost` ranks: the mean residual of
        this group."""
        squares = sum(float(x.double().square().sum()) for x in self.residual)
        mean = collectives.all_reduce(
            torch.tensor([squares], dtype=torch.float64), "avg", group=self._pool.group
        )
        return math.sqrt(float(mean) * lost)

    def load(self, sources: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """The residuals that this rank takes over; validates all of them and changes nothing.

        Args:
            sources: this rank's state, or those of all ranks of another number of ranks. Of these
                each rank takes the mean, so that the mean residual stays the same.

        Raises:
            InvalidArgument: the state is of another model.
        """
        wanted = [x.numel() for x in self.residual]
        for source in sources:
            found = [x.numel() for x in source["residual"]]
            if found != wanted:
                raise InvalidArgument(
                    f"LocalSGD: invalid state: got residuals of {sum(found)} elements in "
                    f"{len(found)} parameters, expected {sum(wanted)} in {len(wanted)}"
                )
        if len(sources) == 1:
            return list(sources[0]["residual"])
        columns = zip(*(source["residual"] for source in sources), strict=True)
        return [torch.stack([x.double() for x in each]).mean(0).float() for each in columns]

    def take(self, residual: Sequence[Tensor], decay: Sequence[float]) -> None:
        """Replaces the residuals and the decay, and forgets a failed exchange."""
        self.decay = list(decay)
        for mine, saved in zip(self.residual, residual, strict=True):
            mine.copy_(saved)
        self._forget()


def _check(parameters: Sequence[Tensor]) -> None:
    for place, parameter in enumerate(parameters):
        if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise Unsupported(
                f"TopK: parameter {place} is {parameter.dtype}: it compresses float32, bfloat16 "
                "and float16"
            )
        if hasattr(parameter, "device_mesh"):
            raise Unsupported("TopK needs full replicas, not shards (DTensor, FSDP, ZeRO)")
        if not parameter.is_cpu:
            raise Unsupported(
                f"TopK: parameter {place} is on {parameter.device}: its kernels run on the CPU "
                "only; keep the parameters there, or use DGC with torch.optim.SGD"
            )
        if not is_dense(parameter):
            raise Unsupported(f"TopK: the memory of parameter {place} has gaps: pass a clone of it")
    if not sum(parameter.numel() for parameter in parameters):
        raise InvalidArgument("TopK: the model has no parameters that require gradients")
