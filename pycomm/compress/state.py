"""DGC's state as plain values and tensors: of one rank, or of all ranks; and its conversion to
another number of ranks.

    {"version", "rank", "size", "step", "switched", "exchange": {level: name},
     "u": {name: [count]}, "v": {name: [count]}, "owner_residual": {name: [places]},
     "hosts": [...]}                                                            of one rank
    {"version", "size", "ranks": [one rank's, ...]}                             of all

u and v are flat, in the order of the parameter's memory. "owner_residual" is the residual of this
rank as an owner (exchange="sharded"): of a parameter, or under the name "" of all compressed
parameters, in the order of v. "hosts" has the host of each rank if the ranks of a host share u and
v (hierarchical.py); otherwise it is empty.

With H hosts and L of N ranks on this one, the mean over hosts equals the mean over ranks:

    u, v of a host = H / N * the sum over its ranks;  of a rank = N / (H L) * that of its host
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import (
    Check,
    check_fields,
    check_version,
    dict_of,
    flag,
    list_of,
    mapping,
    one_of,
    refuse,
    whole,
)
from pycomm._training.arguments import flat_tensor
from pycomm.compress.bucket import elements_between
from pycomm.compress.hierarchical import (
    HostGroups,
    average_copies,
    hosts_of,
    rank_factor,
    saved_holder,
    saved_hosts,
)
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.sharded import Sharding
from pycomm.errors import InvalidArgument
from pycomm.group import Group

VERSION = 1

CHOSEN = ("dense", "gather", "dense_masked", "sharded", "hierarchical")  # exchanges of a level

OF_A_RANK: dict[str, Check] = {
    "step": whole,
    "switched": flag,
    "u": dict_of(flat_tensor),
    "v": dict_of(flat_tensor),
    "exchange": dict_of(functools.partial(one_of, allowed=CHOSEN)),
}


@dataclass(eq=False)
class CompressorState:
    """What DGC keeps of earlier steps, apart from the exchanges that rank 0 chose.

    Attributes:
        memories: the state of each parameter, in the order of the optimizer.
        together: k is for all compressed parameters together, not for each.
        owner_residual: [places of the shard], the residual of this rank as an owner, by the first
            parameter of each k; None: no level has owners.
        step_count: committed steps.
        switched: u of compressed parameters follows DGC's formulas, not torch's.
        by_host: by rank, the host whose u and v it holds; []: each rank holds its own.
    """

    memories: Mapping[Tensor, ParameterState]
    together: bool
    owner_residual: dict[ParameterState, Tensor] | None
    step_count: int = 0
    switched: bool = False
    by_host: list[int] = field(default_factory=list)

    @property
    def compressed(self) -> list[ParameterState]:
        """The states of the compressed parameters."""
        return [memory for memory in self.memories.values() if memory.v is not None]

    def save(self, group: Group, exchanges: Mapping[int, str]) -> dict[str, Any]:
        """The state of this rank, with the exchange of each level."""
        return {
            "version": VERSION,
            "step": self.step_count,
            "switched": self.switched,
            "exchange": dict(exchanges),
            **self._copied(group),
        }

    def gather(self, group: Group, dst: int, exchanges: Mapping[int, str]) -> dict[str, Any] | None:
        """Collective. The states of all ranks on `dst`, None elsewhere."""
        mine = self.save(group, exchanges)
        ranks = [dict(mine, rank=rank, u={}, v={}, owner_residual={}) for rank in range(group.size)]
        for key in ("u", "v", "owner_residual"):
            for name, tensor in mine[key].items():
                rows = collectives.gather(tensor, dst, group=group)
                if rows is not None:
                    for rank, row in enumerate(rows):
                        ranks[rank][key][name] = row.clone()
        if group.rank != dst:
            return None
        return {"version": VERSION, "size": group.size, "ranks": ranks}

    def load(self, saved: Mapping[str, Any], group: Group) -> dict[int, str]:
        """Restores a state; validates all of it before this one changes.

        Returns:
            The saved exchange of each level; {} at another number of ranks, on which the bytes of
            an exchange depend.
        """
        sources = sources_of(
            saved, group, "DGC", OF_A_RANK, {"owner_residual": dict_of(flat_tensor)}
        )
        if len(sources) > 1 or saved_hosts(sources[0]) not in ([], hosts_of(group)):
            sources = [rank_state(source) for source in sources]
        owner_residual = self._fitting(sources)
        if owner_residual is None:
            sources = [with_owner_residual(source) for source in sources]
        new: list[tuple[Tensor, Tensor]] = []
        for memory in self.memories.values():
            for key, tensor in (("u", memory.u), ("v", memory.v)):
                if tensor is not None:
                    new.append((tensor, _mean([one[key] for one in sources], memory.name, tensor)))
        for tensor, content in new:
            tensor.copy_(content)
        if self.owner_residual is not None:
            self.owner_residual.clear()
            self.owner_residual.update(owner_residual or {})
        first = sources[0]
        self.step_count, self.switched = int(first["step"]), bool(first["switched"])
        self.by_host = list(saved_hosts(first))
        return dict(first["exchange"]) if first["size"] == group.size else {}

    def take_in_owner_residual(self, group: Group) -> None:
        """Moves the owner residual of this rank in `group` into its own residual v."""
        if not self.owner_residual:
            return
        v = with_owner_residual(self._copied(group))["v"]
        for memory in self.compressed:
            assert memory.v is not None
            memory.v.copy_(v[memory.name])
        self.owner_residual.clear()

    def to_hosts(self, hosts: HostGroups) -> None:
        """Collective. Converts u and v from one for each rank to one for each host."""
        old = [x for memory in self.compressed for x in memory.tensors]
        average_copies(hosts, old, hosts.share)
        self.by_host = hosts.of_rank

    def to_ranks(self, group: Group) -> None:
        """Converts u and v of this rank from its host's to its own, if necessary; not
        collective."""
        if not self.by_host:
            return
        mine = rank_state(self._copied(group))
        for memory in self.compressed:
            assert memory.v is not None
            memory.u.copy_(mine["u"][memory.name])
            memory.v.copy_(mine["v"][memory.name])
        self.by_host = []
        if self.owner_residual is not None:
            self.owner_residual.clear()

    def _copied(self, group: Group) -> dict[str, Any]:
        """Copies of this rank's tensors, and which rank holds them."""
        residual = self.owner_residual or {}
        return {
            "rank": group.rank,
            "size": group.size,
            "u": {memory.name: memory.u.clone() for memory in self.memories.values()},
            "v": {m.name: m.v.clone() for m in self.memories.values() if m.v is not None},
            # In the order of the parameters, independent of buckets.
            "owner_residual": {
                self._key(memory): residual[memory].clone()
                for memory in self.memories.values()
                if memory in residual
            },
            "hosts": list(self.by_host),
        }

    def _key(self, memory: ParameterState) -> str:
        return "" if self.together else memory.name

    def _fitting(self, sources: Sequence[Mapping[str, Any]]) -> dict[ParameterState, Tensor] | None:
        """The saved owner residual of this rank; None if it belongs to other shards."""
        if self.owner_residual is None or len(sources) > 1:
            return None
        saved = dict(sources[0].get("owner_residual", {}))
        if self.together and list(sources[0]["v"]) != [memory.name for memory in self.compressed]:
            return None  # some are frozen now, or were: then places have another meaning
        size = saved_holder(sources[0])[1]
        found = {}
        for unit in self._units() if saved else ():
            residual = saved.pop(self._key(unit[0]), None)
            if residual is None:
                continue  # a parameter without an exchange so far
            if len(residual) != Sharding(sum(memory.count for memory in unit), size).places:
                return None
            found[unit[0]] = residual.clone()
        return None if saved else found

    def _units(self) -> Iterator[list[ParameterState]]:
        """The compressed parameters of each k."""
        if self.together:
            yield self.compressed
        else:
            yield from ([memory] for memory in self.compressed)


def sources_of(
    saved: Mapping[str, Any],
    group: Group,
    owner: str,
    needed: Mapping[str, Check],
    more: Mapping[str, Check],
) -> list[Mapping[str, Any]]:
    """The saved states of single ranks that this rank loads: its own, or all of them.

    Args:
        saved: of one rank, or of all ranks.
        group: the ranks that load it.
        owner: the class, for errors.
        needed, more: values of a rank's state, and those that older states lack.

    Raises:
        InvalidArgument: another version, or the state of another rank or number of ranks, or it
            lacks values.
    """
    check_version(owner, saved, VERSION)
    needed = {"rank": whole, "size": whole, **needed}
    more = {"hosts": list_of(whole), **more}
    if "ranks" in saved:
        check_fields("state", saved, {"size": whole, "ranks": list_of(mapping)})
        ranks: list[Mapping[str, Any]] = saved["ranks"]
        if len(ranks) != saved["size"] or not ranks:
            refuse("state['ranks']", len(ranks), f"size={saved['size']} states, and at least one")
        mine = [ranks[group.rank]] if saved["size"] == group.size else ranks
        for one in mine:
            _check_source(one, needed, more)
        return mine
    _check_source(saved, needed, more)
    if (saved["size"], saved["rank"]) != (group.size, group.rank):
        raise InvalidArgument(
            f"{owner}: state of rank {saved['rank']} of {saved['size']} on rank {group.rank} of "
            f"{group.size}: each rank must load its own state, or all that of gather_state()"
        )
    return [saved]


def _check_source(
    source: Mapping[str, Any], needed: Mapping[str, Check], more: Mapping[str, Check]
) -> None:
    check_fields("state", source, needed, more)
    size, hosts = source["size"], saved_hosts(source)
    if source["rank"] >= size or len(hosts) not in (0, size) or max(hosts, default=0) >= size:
        raise InvalidArgument(
            f"invalid state: got rank {source['rank']} of {size} with {len(hosts)} hosts"
        )


def rank_state(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank's state with u and v of the rank instead of its host, without an owner residual."""
    hosts = saved_hosts(source)
    if not hosts:
        return source
    factor = rank_factor(hosts, source["rank"])
    v = {name: x * factor for name, x in with_owner_residual(source)["v"].items()}
    u = {name: x * factor if name in v else x for name, x in source["u"].items()}
    return {**source, "u": u, "v": v, "owner_residual": {}, "hosts": []}


def with_owner_residual(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank's state with the owner residual added to v: the sum of residuals is the same."""
    v = {name: x.clone() for name, x in source["v"].items()}
    rank, size = saved_holder(source)
    for key, owner_residual in source.get("owner_residual", {}).items():
        names = [key] if key in v else list(v)
        share, offset = Sharding(sum(v[name].numel() for name in names), size), 0
        if len(owner_residual) != share.places:
            raise InvalidArgument(
                f"DGC: invalid owner_residual of {key!r}: got {len(owner_residual)} elements, "
                f"expected {share.places}, which fit v in the state"
            )
        places = owner_residual.nonzero().flatten()
        indices = share.whole(rank, places)
        for name in names:
            here, values = elements_between(
                indices, owner_residual[places], offset, offset + v[name].numel()
            )
            v[name][here] += values
            offset += v[name].numel()
    return {**source, "v": v}


def _mean(sources: Sequence[Mapping[str, Tensor]], name: str, like: Tensor) -> Tensor:
    """The mean of the ranks' tensors of this name, in float64; a single one is returned as is."""
    for source in sources:
        if name not in source or source[name].shape != like.shape:
            raise InvalidArgument(
                f"DGC: the state lacks {name!r} with {like.numel()} elements: it is of another "
                "model, other names or another min_count"
            )
    if len(sources) == 1:
        return sources[0][name]
    total = torch.zeros(like.shape, dtype=torch.float64)
    for source in sources:
        total += source[name]
    return total / len(sources)
