"""The exchange of the largest groups of the updates, for LocalSGD with TopK.

Parameters on a GPU are compressed there. Their packets are sent through host memory, as those of
DGC (packet_codec.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives, kernels
from pycomm.compress.hierarchical import (
    CurrentHostGroups,
    average_copies,
    hosts_of,
    rank_factor,
    saved_hosts,
    spans_hosts,
)
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet_codec import Packets
from pycomm.compress.packet_exchange import all_gather
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.topk import TopK, sent_bytes
from pycomm.compress.updates import UpdateCompressor, commit_rounded
from pycomm.elastic.change import GroupChange
from pycomm.group import Group
from pycomm.kernels import PacketBatch, UpdatePacket

__all__ = ["TopKUpdates"]


@dataclass(eq=False)
class _Unit:
    """Parameters of one dtype on one device, from which groups are selected together.

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


class TopKUpdates(UpdateCompressor[list[PacketBatch]]):
    """See UpdateCompressor.

    Raises:
        InvalidArgument: the parameters are too few for the ratio.
    """

    _on_gpu = True

    def __init__(
        self, options: TopK, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Group
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        self._options = options
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(parameters):
            alike.setdefault((parameter.dtype, parameter.device), []).append(place)
        self._units = [self._unit(places) for places in alike.values()]
        self._current_hosts = CurrentHostGroups()
        self._by_host: list[int] = []  # as CompressorState.by_host
        self._holders = self._pool.size  # ranks or hosts whose packets are summed
        self._deltas: list[Tensor] = []  # updates of this rank that are not in the residual

    def _unit(self, places: list[int]) -> _Unit:
        theta = [flat_view(self._theta[i]) for i in places]
        k = self._options.groups([x.numel() for x in theta])
        return _Unit(
            places,
            [self._parameters[i] for i in places],
            theta,
            [torch.zeros(x.numel(), device=x.device) for x in theta],
            k,
            kernels.update_workspace(
                theta, k, group=self._options.group, value_dtype=self._options.value_dtype
            ),
        )

    @property
    def groups(self) -> int:
        return sum(unit.k for unit in self._units)

    @property
    def ratio(self) -> float:
        sent = sum(sent_bytes(self._options, unit.k, unit.counts) for unit in self._units)
        return 4 * sum(sum(unit.counts) for unit in self._units) / sent

    @property
    def residual(self) -> list[Tensor]:
        found: list[tuple[int, Tensor]] = []
        for unit in self._units:
            found += zip(unit.places, unit.residual, strict=True)
        return [x for _, x in sorted(found, key=lambda pair: pair[0])]

    @contextlib.contextmanager
    def exchange(self, step: int) -> Iterator[list[PacketBatch]]:
        self._forget()
        word = self._check_word(step)
        try:
            if self._uses_hosts():
                gathered = self._exchange_hosts(word)
            else:
                with defer_sigint():
                    self._to_ranks()
                    packets = [self._prepare(unit) for unit in self._units]
                gathered, self.sent_bytes = all_gather([*packets, word], self._pool)
                words, _ = gathered.pop()
                self._compare(words)
                self._holders = self._pool.size
            yield [
                self._decode(unit, message, sizes)
                for unit, (message, sizes) in zip(self._units, gathered, strict=True)
            ]
        except BaseException as error:  # includes Ctrl-C: what was selected must be restored
            self._current_hosts.abort(f"{type(error).__name__}: {error}")
            self._roll_back()
            raise

    def _uses_hosts(self) -> bool:
        return self._options.exchange == "auto" and spans_hosts(self._pool.group)

    def _exchange_hosts(self, word: Tensor) -> list[Packets]:
        """Averages the updates inside this host, and exchanges packets of the hosts' updates."""
        with defer_sigint():
            for place, theta in enumerate(self._theta):
                mine, parameter = flat_view(theta), flat_view(self._parameters[place])
                self._deltas.append(mine.float() - parameter.float())
                parameter.copy_(mine)
        words = word.new_empty((self._pool.size, len(word)))
        self._pool.all_gather(word, words).wait()
        self._compare(words)
        hosts, failed = self._current_hosts.get(self._pool.group)
        if not self._by_host:
            average_copies(hosts, self.residual, hosts.share)
            self._by_host = hosts.of_rank
        elif failed:
            average_copies(hosts, self.residual)
        means = [delta.clone() for delta in self._deltas]
        for work in [hosts.average(mean) for mean in means]:
            work.wait()
        with defer_sigint():
            for residual, mean in zip(self.residual, means, strict=True):
                residual.add_(mean, alpha=hosts.share)
            self._deltas = []
            packets = [self._prepare(unit) for unit in self._units]
        gathered, sent = all_gather(packets, hosts)
        self.sent_bytes = len(word) + (sent if hosts.leads else 0)
        self._holders = hosts.size
        return gathered

    def _to_ranks(self) -> None:
        """Converts the residual from one for each host, if necessary; not collective."""
        for residual in self.residual if self._by_host else ():
            residual.mul_(rank_factor(self._by_host, self._pool.rank))
        self._by_host = []

    def resume(self, change: GroupChange) -> float:
        self._to_ranks()
        return super().resume(change)

    def described_exchange(self) -> dict[str, Any]:
        return {
            "exchange": "hierarchical" if self._uses_hosts() else "gather",
            "exchange_costs": {},
        }

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
        return packet.cpu()

    def _decode(self, unit: _Unit, message: Tensor, sizes: Sequence[int]) -> PacketBatch:
        there = message.to(unit.theta[0].device)
        return kernels.decode_groups(there, sizes, unit.counts, group=self._options.group)

    def _roll_back(self) -> None:
        # Each copy of a host's residual gets its rank's update, so their mean gets the mean update.
        share = 1 / rank_factor(self._by_host, self._pool.rank)
        for residual, delta in zip(self.residual, self._deltas, strict=False):
            residual.add_(delta, alpha=share)
        self._deltas = []
        for unit in self._units:
            if unit.packet is not None and unit.rest is None:
                unit.rest = self._selected(unit, unit.packet)
                self._restore(unit, unit.packet, unit.packet.values)

    def _selected(self, unit: _Unit, packet: UpdatePacket) -> Tensor:
        """The residual in the selected groups, which is the rounding error after a step."""
        sent = self._decode(unit, packet.packet, [len(packet.packet)])
        error = packet.values - sent.values
        return torch.where(error.isfinite(), error, 0)

    def _restore(self, unit: _Unit, packet: UpdatePacket, values: Tensor) -> None:
        kernels.update_rollback(unit.residual, packet.indices, values, group=self._options.group)

    def commit(self, received: Sequence[PacketBatch]) -> None:
        for unit, batch in zip(self._units, received, strict=True):
            factors = [self.decay[place] for place in unit.places]
            if unit.theta[0].dtype == torch.float32:
                for x, y, factor in zip(unit.theta, unit.parameters, factors, strict=True):
                    if factor != 1:
                        x.mul_(factor)
                        y.copy_(x)
                for tensors in (unit.theta, unit.parameters):
                    kernels.decode_update(tensors, batch, 1.0, 1.0 / self._holders)
            else:
                means = [torch.empty_like(residual) for residual in unit.residual]
                kernels.decode_sum(means, batch, 1.0 / self._holders)
                rows = (unit.theta, unit.parameters, unit.residual, means, factors)
                for row in zip(*rows, strict=True):
                    commit_rounded(*row)
        self._finish()

    def means(self, received: Sequence[PacketBatch]) -> list[Tensor]:
        self._decay_shared()
        found = [torch.empty_like(x, requires_grad=False) for x in self._parameters]
        for unit, batch in zip(self._units, received, strict=True):
            dense = [flat_view(found[place]) for place in unit.places]
            kernels.decode_sum(dense, batch, 1.0 / self._holders)
        return found

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
        for unit in self._units:
            if unit.packet is not None and unit.rest is not None:
                self._restore(unit, unit.packet, unit.rest)
        self._finish()

    def save(self) -> dict[str, Any]:
        return {"residual": [x.clone() for x in self.residual], "hosts": list(self._by_host)}

    def gather(self, dst: int) -> list[dict[str, Any]] | None:
        group = self._pool.group
        ranks: list[dict[str, Any]] = [{"residual": []} for _ in range(group.size)]
        for residual in self.save()["residual"]:
            rows = collectives.gather(residual, dst, group=group)
            for rank, row in enumerate(() if rows is None else rows):
                ranks[rank]["residual"].append(row.clone())
        return ranks if group.rank == dst else None

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        self._check_sources(sources)
        hosts = saved_hosts(sources[0])
        kept = len(sources) == 1 and hosts in ([], hosts_of(self._pool.group))
        factors = [1.0 if kept else rank_factor(saved_hosts(one), one["rank"]) for one in sources]
        columns = zip(*(source["residual"] for source in sources), strict=True)
        for mine, each in zip(self.residual, columns, strict=True):
            scaled = [x.double() * factor for x, factor in zip(each, factors, strict=True)]
            mine.copy_(torch.stack(scaled).mean(0))
        self._by_host = list(hosts) if kept else []
        self.decay = list(sources[0]["decay"])
        self._forget()
