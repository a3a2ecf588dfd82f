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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm.compress.bucket import elements_between
from pycomm.compress.hierarchical import Hosts, hosts_of
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.sharded import Sharding
from pycomm.errors import InvalidArgument
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm.compress.dgc import DGC

__all__ = ["gathered", "load", "own", "take_in_owner_residual", "to_hosts", "to_ranks"]

VERSION = 1
OLDER_KEYS = {"owed": "owner_residual"}  # older names, which load() accepts
OLDER_EXCHANGES = {"split": "sharded", "two_level": "hierarchical", "masked": "dense_masked"}


def own(dgc: DGC, group: Group) -> dict[str, Any]:
    """The state of this rank."""
    memories = dgc.memories.values()
    return {
        "version": VERSION,
        "rank": group.rank,
        "size": group.size,
        "step": dgc.step_count,
        "switched": dgc.switched,
        "exchange": dict(dgc.exchanges),
        "u": {memory.name: memory.u.clone() for memory in memories},
        "v": {memory.name: memory.v.clone() for memory in memories if memory.v is not None},
        "owner_residual": {
            _name(dgc, memory): x.clone() for memory, x in _owner_residual(dgc).items()
        },
        "hosts": list(dgc.by_host),
    }


def gathered(dgc: DGC, group: Group, dst: int) -> dict[str, Any] | None:
    """Collective. The states of all ranks on `dst`, None elsewhere."""
    mine = own(dgc, group)
    ranks = [dict(mine, rank=rank, u={}, v={}, owner_residual={}) for rank in range(group.size)]
    for key in ("u", "v", "owner_residual"):
        for name, tensor in mine[key].items():
            rows = collectives.gather(tensor, dst, group=group)
            if rows is not None:
                for rank, row in enumerate(rows):
                    ranks[rank][key][name] = row.clone()
    return {"version": VERSION, "size": group.size, "ranks": ranks} if group.rank == dst else None


def load(dgc: DGC, saved: Mapping[str, Any], group: Group) -> None:
    """Restores a state; validates all of it before `dgc` changes."""
    if saved.get("version") != VERSION:
        raise InvalidArgument(
            f"DGC: invalid state version: got {saved.get('version')!r}, expected {VERSION}"
        )
    saved = _renamed(saved)
    if "ranks" in saved:
        same = saved["size"] == group.size
        sources = [saved["ranks"][group.rank]] if same else saved["ranks"]
    elif (saved["size"], saved["rank"]) != (group.size, group.rank):
        raise InvalidArgument(
            f"DGC: state of rank {saved['rank']} of {saved['size']} on rank {group.rank} of "
            f"{group.size}: each rank must load its own state, or all that of gather_state()"
        )
    else:
        sources = [saved]
    if len(sources) > 1 or _hosts(sources[0]) not in ([], hosts_of(group)):
        sources = [_of_rank(source) for source in sources]
    owner_residual = _fitting(dgc, sources)
    if owner_residual is None:
        sources = [_with_owner_residual(source) for source in sources]
    new: list[tuple[Tensor, Tensor]] = []
    for memory in dgc.memories.values():
        for key, tensor in (("u", memory.u), ("v", memory.v)):
            if tensor is not None:
                new.append((tensor, _mean([one[key] for one in sources], memory.name, tensor)))
    for tensor, content in new:
        tensor.copy_(content)
    if dgc.owner_residual is not None:
        dgc.owner_residual.clear()
        dgc.owner_residual.update(owner_residual or {})
    first = sources[0]
    dgc.step_count, dgc.switched = int(first["step"]), bool(first["switched"])
    dgc.by_host = list(_hosts(first))
    # The bytes of an exchange depend on the number of ranks.
    dgc.set_exchanges(first["exchange"] if first["size"] == group.size else {})


def _renamed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state with older names replaced by current ones."""
    found = {OLDER_KEYS.get(key, key): value for key, value in saved.items()}
    if "ranks" in found:
        found["ranks"] = [_renamed(one) for one in found["ranks"]]
    if "exchange" in found:
        names = found["exchange"].items()
        found["exchange"] = {level: OLDER_EXCHANGES.get(name, name) for level, name in names}
    return found


def take_in_owner_residual(dgc: DGC, group: Group) -> None:
    """Moves the owner residual of this rank in `group` into its own residual v."""
    if not dgc.owner_residual:
        return
    v = _with_owner_residual(own(dgc, group))["v"]
    for memory in dgc.memories.values():
        if memory.v is not None:
            memory.v.copy_(v[memory.name])
    dgc.owner_residual.clear()


def to_hosts(dgc: DGC, hosts: Hosts) -> None:
    """Collective. Converts u and v from one for each rank to one for each host."""
    old = [x for memory in dgc.memories.values() if memory.v is not None for x in memory.tensors]
    new = [x.clone() for x in old]
    for work in [hosts.average(x) for x in new]:
        work.wait()
    for x, content in zip(old, new, strict=True):
        x.copy_(content.mul_(hosts.share))
    dgc.by_host = hosts.of_rank


def to_ranks(dgc: DGC, group: Group) -> None:
    """Converts u and v of this rank from its host's to its own, if necessary; not collective."""
    if dgc.by_host:
        mine = _of_rank(own(dgc, group))
        for memory in dgc.memories.values():
            if memory.v is not None:
                memory.u.copy_(mine["u"][memory.name])
                memory.v.copy_(mine["v"][memory.name])
        dgc.by_host = []
        if dgc.owner_residual is not None:
            dgc.owner_residual.clear()


def _hosts(source: Mapping[str, Any]) -> list[int]:
    """The state's "hosts", which older states lack."""
    found: list[int] = source.get("hosts", [])
    return found


def _holder(source: Mapping[str, Any]) -> tuple[int, int]:
    """The index of the state's holder and the number of holders: ranks, or hosts."""
    hosts = _hosts(source)
    return (hosts[source["rank"]], max(hosts) + 1) if hosts else (source["rank"], source["size"])


def _of_rank(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank's state with u and v of the rank instead of its host, without an owner residual."""
    hosts = _hosts(source)
    if not hosts:
        return source
    host, count = _holder(source)
    factor = len(hosts) / (count * hosts.count(host))
    v = {name: x * factor for name, x in _with_owner_residual(source)["v"].items()}
    u = {name: x * factor if name in v else x for name, x in source["u"].items()}
    return {**source, "u": u, "v": v, "owner_residual": {}, "hosts": []}


def _owner_residual(dgc: DGC) -> dict[ParameterState, Tensor]:
    """The owner residual in the order of the parameters, independent of buckets."""
    owner_residual = dgc.owner_residual or {}
    return {
        memory: owner_residual[memory]
        for memory in dgc.memories.values()
        if memory in owner_residual
    }


def _name(dgc: DGC, memory: ParameterState) -> str:
    return "" if dgc.selects_whole else memory.name


def _fitting(dgc: DGC, sources: Sequence[Mapping[str, Any]]) -> dict[ParameterState, Tensor] | None:
    """The saved owner residual of this rank; None if it belongs to other shards."""
    saved = sources[0].get("owner_residual", {})
    if dgc.owner_residual is None or len(sources) > 1:
        return None
    size = _holder(sources[0])[1]
    compressed = [memory for memory in dgc.memories.values() if memory.v is not None]
    units = [compressed] if dgc.selects_whole else [[memory] for memory in compressed]
    found = {}
    for unit in units if saved else ():
        name, count = _name(dgc, unit[0]), sum(memory.count for memory in unit)
        if name not in saved or len(saved[name]) != Sharding(count, size).places:
            return None
        found[unit[0]] = saved[name].clone()
    return found


def _with_owner_residual(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank's state with the owner residual added to v: the sum of residuals is the same."""
    v = {name: x.clone() for name, x in source["v"].items()}
    rank, size = _holder(source)
    for key, owner_residual in source.get("owner_residual", {}).items():
        names = [key] if key in v else list(v)
        share, offset = Sharding(sum(v[name].numel() for name in names), size), 0
        if len(owner_residual) != share.places:
            raise InvalidArgument(f"DGC: owner_residual of {key!r} does not fit v in the state")
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
