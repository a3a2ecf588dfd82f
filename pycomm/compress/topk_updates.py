"""The exchange of the largest groups of the updates, for LocalSGD with TopK.

Parameters on a GPU are compressed there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pycomm._arguments import list_of, whole
from pycomm._training.shards import local_shard
from pycomm.compress.hierarchical import CurrentHostGroups, HostGroups, spans_hosts
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet_exchange import (
    NO_WORD,
    Packets,
    PacketTransport,
    all_gather,
    to_owners,
)
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.residual import Residual, Whole
from pycomm.compress.topk import TopK, sent_bytes
from pycomm.compress.update_unit import Batch, UpdateUnit, places_of
from pycomm.compress.updates import UpdateCompressor
from pycomm.group import Group

MOST_GATHERED = 16  # ranks or hosts without owners, by default


class TopKUpdates(UpdateCompressor[list[Batch]]):
    """See UpdateCompressor.

    Raises:
        InvalidArgument: the parameters are too few for the ratio.
    """

    more: ClassVar = {**UpdateCompressor.more, "unused": list_of(whole)}

    def __init__(
        self, options: TopK, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Group
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(parameters):
            alike.setdefault((parameter.dtype, parameter.device), []).append(place)
        self._units = [
            UpdateUnit(
                options, places, [parameters[i] for i in places], [snapshot[i] for i in places]
            )
            for places in alike.values()
        ]
        found = [
            row for unit in self._units for row in zip(unit.places, unit.residual, strict=True)
        ]
        self._residual = Residual(
            "LocalSGD",
            {"residual": {str(place): x for place, x in found}},
            lambda _, counts, rank, size: places_of(counts, rank, size),
            {unit.key: [str(place) for place in unit.places] for unit in self._units},
        )
        self._hosts = CurrentHostGroups()
        self._holders = self._pool.size  # ranks or hosts whose packets are summed
        # By place: theta before the exchange; and, if it hides the residual, this one.
        self._before: dict[int, Tensor] = {}
        self._hidden: dict[int, Whole] = {}

    @property
    def groups(self) -> int:
        return sum(unit.k for unit in self._units)

    @property
    def ratio(self) -> float:
        sent = sum(sent_bytes(self._options, unit.k, unit.counts) for unit in self._units)
        return 4 * sum(sum(unit.counts) for unit in self._units) / sent

    def _exchange(self, word: Tensor, lacking: Collection[int]) -> list[Batch]:
        if self._uses_hosts():
            hosts = self._average_in_hosts(word)
            packets, sent = self._exchange_packets(hosts, self.unused, NO_WORD)
            self.sent_bytes = len(word) + (sent if hosts.leads else 0)
        else:
            with defer_sigint():
                self._residual.to_ranks(self._pool.group)
            packets, self.sent_bytes = self._exchange_packets(self._pool, lacking, word)
        return [unit.read(each) for unit, each in zip(self._units, packets, strict=True)]

    def _abort(self, reason: str) -> None:
        self._hosts.abort(reason)
        self._before = {}  # theta did not change

    def _exchange_packets(
        self, transport: PacketTransport, lacking: Collection[int], word: Tensor
    ) -> tuple[list[Packets], int]:
        """Collective. Selects and sends. For each unit the packets of all ranks, or those of the
        owners; and the bytes that this rank sent. Compares the ranks' check word, if it is not
        empty. `lacking`: parameters that may turn out to be unused."""
        self._holders = transport.size
        owners = transport.size if self._has_owners(transport.size) else 1
        with defer_sigint():
            if owners == 1:
                self._residual.fold(self._pool.group)
            for unit in self._units:
                unit.have_owners(transport.rank if owners > 1 else 0, owners)
            self._set_aside(lacking)
            mine = [unit.select(self._transaction) for unit in self._units]
        received = (all_gather if owners == 1 else to_owners)(mine, transport, word)
        if len(word):
            self._compare(received.words)
        if owners == 1:
            return received.parts, received.sent_bytes
        chosen = [
            unit.choose(each, self._residual.owned, self.unused, self._transaction)
            for unit, each in zip(self._units, received.parts, strict=True)
        ]
        gathered = all_gather(chosen, transport)
        return gathered.parts, received.sent_bytes + gathered.sent_bytes

    def _has_owners(self, holders: int) -> bool:
        if self._options.exchange == "auto":
            return holders > MOST_GATHERED
        return bool(self._options.exchange == "sharded")

    def _uses_hosts(self) -> bool:
        return self._options.exchange == "auto" and spans_hosts(self._pool.group)

    def _average_in_hosts(self, word: Tensor) -> HostGroups:
        """Collective. Averages the updates inside this host and adds the mean to the residual."""
        with defer_sigint():
            for place, theta in enumerate(self._theta):
                mine, parameter = flat_view(theta), flat_view(self._parameters[place])
                self._deltas.append(mine.float() - parameter.float())
                parameter.copy_(mine)
        words = word.new_empty((self._pool.size, len(word)))
        self._pool.all_gather(word, words).wait()
        self._compare(list(words))
        hosts = self._residual.at_hosts(self._hosts, self._pool.group)
        means = [delta.clone() for delta in self._deltas]
        for work in [hosts.average(mean) for mean in means]:
            work.wait()
        with defer_sigint():
            for residual, mean in zip(self.residual, means, strict=True):
                residual.add_(mean, alpha=hosts.share)
            self._deltas = []
        return hosts

    def described_exchange(self) -> dict[str, Any]:
        return {
            "exchange": self._named_exchange(),
            "exchange_costs": {},
        }

    def _named_exchange(self) -> str:
        if self._uses_hosts():
            return "hierarchical"
        return "sharded" if self._has_owners(self._pool.size) else "gather"

    def _set_aside(self, lacking: Collection[int]) -> None:
        """Saves what these parameters have. Nothing of those that were unused in the last exchange
        is selected, so that others are."""
        residual = self.residual
        for place in lacking:
            self._before[place] = self._theta[place].clone()
            change = Whole(str(place), [residual[place]])
            self._transaction.record(change)
            if place in self.unused:
                self._hidden[place] = change
                residual[place].zero_()

    def commit(self, received: Sequence[Batch]) -> None:
        factors = self._factors()
        for unit, batch in zip(self._units, received, strict=True):
            unit.commit(batch, [factors[place] for place in unit.places], self._holders)
        self._finish()

    def means(self, received: Sequence[Batch]) -> list[Tensor]:
        self._decay_shared()
        found = [torch.empty_like(x) for x in self._theta]
        for unit, batch in zip(self._units, received, strict=True):
            dense = [flat_view(found[place]) for place in unit.places]
            unit.decode(dense, batch, self._holders)
        for place in self.unused:
            found[place].zero_()
        return found

    def _finish(self) -> None:
        for place, theta in self._before.items():
            if place in self.unused:
                self._theta[place].copy_(theta)
                local_shard(self._parameters[place].detach()).copy_(theta)
        residual = self.residual
        for place in self._hidden.keys() - self.unused:
            residual[place].add_(self._hidden[place].saved[0])
        super()._finish()

    def _forget(self) -> None:
        super()._forget()
        self._before, self._hidden = {}, {}

    def save(self) -> dict[str, Any]:
        return {**super().save(), "unused": sorted(self.unused)}

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        super().load(sources)
        self.unused = set(sources[0].get("unused", ()))
