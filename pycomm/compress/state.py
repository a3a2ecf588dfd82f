"""DGC's state as plain values and tensors: of one rank, of all, and at another number of ranks.

    {"version", "rank", "size", "step", "switched", "exchange": {level: name},
     "u": {name: [count]}, "v": {name: [count]}}        of one rank
    {"version", "size", "ranks": [one rank's, ...]}      of all

u and v lie in the order of the parameter's memory. Called by dgc.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm.errors import InvalidArgument
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm.compress.dgc import DGC

__all__ = ["gathered", "load", "own"]

VERSION = 1


def own(dgc: DGC, group: Group) -> dict[str, Any]:
    """This rank's."""
    memories = dgc.memories.values()
    return {
        "version": VERSION,
        "rank": group.rank,
        "size": group.size,
        "step": dgc.step_count,
        "switched": dgc.switched,
        "exchange": dict(dgc.chosen),
        "u": {memory.name: memory.u.clone() for memory in memories},
        "v": {memory.name: memory.v.clone() for memory in memories if memory.v is not None},
    }


def gathered(dgc: DGC, group: Group, dst: int) -> dict[str, Any] | None:
    """All ranks' on `dst`."""
    mine = own(dgc, group)
    ranks = [dict(mine, rank=rank, u={}, v={}) for rank in range(group.size)]
    for key in ("u", "v"):
        for name, tensor in mine[key].items():
            rows = collectives.gather(tensor, dst, group=group)
            if rows is not None:
                for rank, row in enumerate(rows):
                    ranks[rank][key][name] = row.clone()
    return {"version": VERSION, "size": group.size, "ranks": ranks} if group.rank == dst else None


def load(dgc: DGC, saved: Mapping[str, Any], group: Group) -> None:
    """Checks all of it first, then changes `dgc`."""
    if saved.get("version") != VERSION:
        raise InvalidArgument(f"DGC: a state of version {saved.get('version')!r}, not {VERSION}")
    if "ranks" in saved:
        same = saved["size"] == group.size
        sources = [saved["ranks"][group.rank]] if same else saved["ranks"]
    elif (saved["size"], saved["rank"]) != (group.size, group.rank):
        raise InvalidArgument(
            f"DGC: a state of rank {saved['rank']} of {saved['size']} on rank {group.rank} of "
            f"{group.size}: each rank loads its own, or all load that of gather_state()"
        )
    else:
        sources = [saved]
    new: list[tuple[Tensor, Tensor]] = []
    for memory in dgc.memories.values():
        for key, tensor in (("u", memory.u), ("v", memory.v)):
            if tensor is not None:
                new.append((tensor, _mean([one[key] for one in sources], memory.name, tensor)))
    for tensor, content in new:
        tensor.copy_(content)
    first = sources[0]
    dgc.step_count, dgc.switched = int(first["step"]), bool(first["switched"])
    # Another number of ranks counts other bytes.
    dgc.chosen = dict(first["exchange"]) if first["size"] == group.size else {}


def _mean(sources: Sequence[Mapping[str, Tensor]], name: str, like: Tensor) -> Tensor:
    """The mean of the ranks' tensors of this name, in float64; one alone stays as it is."""
    for source in sources:
        if name not in source or source[name].shape != like.shape:
            raise InvalidArgument(
                f"DGC: the state has nothing for {name!r} of {like.numel()} elements: it is of "
                "another model, other names or another min_count"
            )
    if len(sources) == 1:
        return sources[0][name]
    total = torch.zeros(like.shape, dtype=torch.float64)
    for source in sources:
        total += source[name]
    return total / len(sources)
