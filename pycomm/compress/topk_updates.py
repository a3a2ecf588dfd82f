"""The exchange of the largest groups of the updates, for LocalSGD with TopK.

Parameters on a GPU are compressed there. Their packets are sent through host memory, as those of
DGC (packet_codec.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import list_of, whole
from pycomm._training.arguments import flat_tensor
from pycomm._training.shards import local_shard
from pycomm.compress.group_shards import GroupShards, Received
from pycomm.compress.hierarchical import (
    CurrentHostGroups,
    HostGroups,
    average_copies,
    holder,
    hosts_of,
    rank_factor,
    saved_holder,
    saved_hosts,
    spans_hosts,
)
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet_codec import Packets
from pycomm.compress.packet_exchange import PacketTransport, all_gather, to_owners
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.topk import TopK, sent_bytes
from pycomm.compress.update_unit import UpdateUnit
from pycomm.compress.updates import WORD, UpdateCompressor
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument
from pycomm.group import Group

MOST_GATHERED = 16  # ranks or hosts without owners, by default


class TopKUpdates(UpdateCompressor[list[list[Received]]]):
    """See UpdateCompressor.

    Raises:
        InvalidArgument: the parameters are too few for the ratio.
    """

    def __init__(
        self, options: TopK, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Group
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        self._options = options
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(parameters):
            alike.setdefault((parameter.dtype, parameter.device), []).append(place)
        self._units = [
            UpdateUnit(
                options, places, [parameters[i] for i in places], [snapshot[i] for i in places]
            )
            for places in alike.values()
        ]
        self._current_hosts = CurrentHostGroups()
        self._by_host: list[int] = []  # as CompressorState.by_host
        self._holders = self._pool.size  # ranks or hosts whose packets are summed
        self._deltas: list[Tensor] = []  # updates of this rank that are not in the residual
        # By place: copies of theta and the residual, and whether that is hidden.
        self._aside: dict[int, tuple[Tensor, Tensor, bool]] = {}

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
    def exchange(self, step: int) -> Iterator[list[list[Received]]]:
        for unit in self._units:
            unit.forget()
        lacking = self._lacking()
        word = self._check_word(step, lacking)
        try:
            if self._uses_hosts():
                hosts = self._average_in_hosts(word)
                packets, sent = self._exchange(hosts, self.unused)
                self.sent_bytes = len(word) + (sent if hosts.leads else 0)
            else:
                with defer_sigint():
                    self._to_ranks()
                word = word if lacking else word[:WORD]
                packets, self.sent_bytes = self._exchange(self._pool, lacking, word)
            yield [
                unit.shards.read(each, unit.device)
                for unit, each in zip(self._units, packets, strict=True)
            ]
        except BaseException as error:  # includes Ctrl-C: what was selected must be restored
            self._current_hosts.abort(f"{type(error).__name__}: {error}")
            self._roll_back()
            raise

    def _exchange(
        self, transport: PacketTransport, lacking: Collection[int], word: Tensor | None = None
    ) -> tuple[list[Packets], int]:
        """Collective. Selects and sends. For each unit the packets of all ranks, or those of the
        owners; and the bytes that this rank sent. Compares the ranks' check word, if given.
        `lacking`: parameters that may turn out to be unused."""
        self._holders = transport.size
        owners = transport.size if self._has_owners(transport.size) else 1
        with defer_sigint():
            for unit in self._units:
                unit.lay_out(transport.rank if owners > 1 else 0, owners)
            self._set_aside(lacking)
            mine = [unit.select() for unit in self._units]
        if word is not None:
            mine.append([word] * owners)
        if owners == 1:
            packets, sent = all_gather([packet for (packet,) in mine], transport)
        else:
            cuts = [(torch.cat(each), [len(one) for one in each]) for each in mine]
            packets, sent = to_owners(cuts, transport)
        if word is not None:
            message, sizes = packets.pop()
            self._compare(torch.split(message, list(sizes)))
        if owners == 1:
            return packets, sent
        chosen = [
            unit.choose(each, self.unused) for unit, each in zip(self._units, packets, strict=True)
        ]
        packets, sent_to_all = all_gather(chosen, transport)
        return packets, sent + sent_to_all

    def _has_owners(self, holders: int) -> bool:
        if self._options.exchange == "auto":
            return holders > MOST_GATHERED
        return self._options.exchange == "sharded"

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
        hosts, failed = self._current_hosts.get(self._pool.group)
        if not self._by_host:
            self._fold()
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
        return hosts

    def _fold(self) -> None:
        """Moves what this rank has as an owner into its residual; not collective."""
        for unit in self._units:
            unit.lay_out(0, 1)

    def _to_ranks(self) -> None:
        """Converts the residual from one for each host, if necessary; not collective."""
        if self._by_host:
            self._fold()
        for residual in self.residual if self._by_host else ():
            residual.mul_(rank_factor(self._by_host, self._pool.rank))
        self._by_host = []

    def resume(self, change: GroupChange) -> float:
        self._fold()
        self._to_ranks()
        return super().resume(change)

    def described_exchange(self) -> dict[str, Any]:
        return {
            "exchange": self._named_exchange(),
            "exchange_costs": {},
        }

    def _named_exchange(self) -> str:
        if self._uses_hosts():
            return "hierarchical"
        return "sharded" if self._has_owners(self._pool.size) else "gather"

    def _roll_back(self) -> None:
        # Each copy of a host's residual gets its rank's update, so their mean gets the mean update.
        share = 1 / rank_factor(self._by_host, self._pool.rank)
        for residual, delta in zip(self.residual, self._deltas, strict=False):
            residual.add_(delta, alpha=share)
        self._deltas = []
        for unit in self._units:
            unit.roll_back()
        self._put_back(())

    def _set_aside(self, lacking: Collection[int]) -> None:
        """Copies what these parameters have. Nothing of those that were unused in the last exchange
        is selected, so that others are."""
        residual = self.residual
        for place in lacking:
            theta, kept = self._theta[place].clone(), residual[place].clone()
            self._aside[place] = theta, kept, place in self.unused
            if place in self.unused:
                residual[place].zero_()

    def _put_back(self, unused: Collection[int]) -> None:
        """Ends _set_aside: the `unused` parameters are as they were."""
        residual, aside = self.residual, self._aside
        self._aside = {}
        for place, (theta, kept, hidden) in aside.items():
            if place in unused:
                self._theta[place].copy_(theta)
                local_shard(self._parameters[place].detach()).copy_(theta)
                residual[place].copy_(kept)
            elif hidden:
                residual[place].add_(kept)

    def commit(self, received: Sequence[Sequence[Received]]) -> None:
        factors = self._factors()
        for unit, batch in zip(self._units, received, strict=True):
            unit.commit(batch, [factors[place] for place in unit.places], self._holders)
        self._finish()

    def means(self, received: Sequence[Sequence[Received]]) -> list[Tensor]:
        self._decay_shared()
        found = [torch.empty_like(x) for x in self._theta]
        for unit, batch in zip(self._units, received, strict=True):
            dense = [flat_view(found[place]) for place in unit.places]
            unit.decode(dense, batch, self._holders)
        for place in self.unused:
            found[place].zero_()
        return found

    def _finish(self) -> None:
        super()._finish()
        for unit in self._units:
            unit.finish()
        self._put_back(self.unused)

    def commit_missed(self) -> None:
        for unit in self._units:
            unit.commit_missed()
        self._finish()

    more: ClassVar = {"owner_residual": list_of(flat_tensor), "unused": list_of(whole)}

    def save(self) -> dict[str, Any]:
        return {
            "residual": [x.clone() for x in self.residual],
            "owner_residual": [unit.owner_residual() for unit in self._sharded],
            "hosts": list(self._by_host),
            "unused": sorted(self.unused),
        }

    @property
    def _sharded(self) -> list[UpdateUnit]:
        """The units, if the last exchange had owners."""
        return [unit for unit in self._units if unit.shards.size > 1]

    def gather(self, dst: int) -> list[dict[str, Any]] | None:
        group = self._pool.group
        ranks: list[dict[str, Any]] = [
            {"residual": [], "owner_residual": []} for _ in range(group.size)
        ]
        for residual in self.residual:
            rows = collectives.gather(residual, dst, group=group)
            for rank, row in enumerate(() if rows is None else rows):
                ranks[rank]["residual"].append(row.clone())
        for unit in self._sharded:
            rows = collectives.gather(unit.owner_residual(pad=True), dst, group=group)
            for rank, row in enumerate(() if rows is None else rows):
                owner, _ = holder(self._by_host, rank, group.size)
                owned = row[: unit.shards.owner_counts[owner]].clone()
                ranks[rank]["owner_residual"].append(owned)
        return ranks if group.rank == dst else None

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        self._check_sources(sources)
        owners = [self._saved_shards(source) for source in sources]
        hosts = saved_hosts(sources[0])
        kept = len(sources) == 1 and hosts in ([], hosts_of(self._pool.group))
        factors = [1.0 if kept else rank_factor(saved_hosts(one), one["rank"]) for one in sources]
        columns = [
            [
                saved.to(mine.device, torch.float64, copy=True)
                for saved, mine in zip(source["residual"], self.residual, strict=True)
            ]
            for source in sources
        ]
        for unit, *each in zip(self._units, *owners, strict=True):
            for column, shards in zip(columns, each, strict=True):
                if not kept:
                    shards.fold([column[place] for place in unit.places])
            unit.shards = each[0] if kept else unit.shards_of(0, 1)
        for mine, *rows in zip(self.residual, *columns, strict=True):
            scaled = [x * factor for x, factor in zip(rows, factors, strict=True)]
            mine.copy_(torch.stack(scaled).mean(0))
        self._by_host = list(hosts) if kept else []
        self.decay = list(sources[0]["decay"])
        self.unused = set(sources[0].get("unused", ()))
        for unit in self._units:
            unit.forget()

    def _saved_shards(self, source: Mapping[str, Any]) -> list[GroupShards]:
        """The shards of each unit in the state of a rank.

        Raises:
            InvalidArgument: the state is of another model.
        """
        owned = source.get("owner_residual", [])  # older states lack it
        if not owned:
            return [unit.shards_of(0, 1) for unit in self._units]
        where = saved_holder(source)
        found = [
            unit.shards_of(*where, mine) for unit, mine in zip(self._units, owned, strict=False)
        ]
        wanted = [shards.owner_counts[shards.rank] for shards in found]
        if len(owned) != len(self._units) or wanted != [x.numel() for x in owned]:
            raise InvalidArgument(
                f"LocalSGD: invalid state: got an owner_residual of {[x.numel() for x in owned]} "
                f"elements, expected {wanted}"
            )
        return found
