"""Training that continues after ranks were lost: the agreed step, and the state of new ranks."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import _core, collectives
from pycomm.default_group import default
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group
from pycomm.objects import all_gather_object
from pycomm.objects.serialization import encode

__all__ = ["ShrinkResult", "most_advanced_rank", "shrink_result", "sync_state"]

PIECE_BYTES = 16 << 20  # that a rank sends in one call


@dataclass(frozen=True)
class ShrinkResult:
    """The state of a training after shrink().

    Attributes:
        group: the group of the survivors.
        lost: the ranks that were lost, numbered as in the first group.
        step: completed steps, the same on all ranks.
        lost_residual_norm: with compression: estimated norm of the residual lost with the failed
            ranks (assumes the mean residual of the survivors); else 0.
    """

    group: Group
    lost: list[int]
    step: int
    lost_residual_norm: float = 0.0


def shrink_result(
    before: Group, group: Group, step: int, lost_residual_norm: float = 0.0
) -> ShrinkResult:
    """The result of shrinking `before` to `group`."""
    lost = [rank for rank in before.ranks if rank not in group.ranks]
    return ShrinkResult(group, lost, step, lost_residual_norm)


def most_advanced_rank(count: int, group: Group) -> tuple[int, int]:
    """The highest count, and the lowest rank that has it. Collective."""
    counts = collectives.all_gather(torch.tensor([count]), group=group).flatten().tolist()
    return max(counts), counts.index(max(counts))


def sync_state(state: Any, step: int, *, group: Group | None = None) -> tuple[Any, int]:
    """Sends the state of the ranks with the most completed steps to all others, such as new ranks.
    Collective.

    All ranks that have that state send a share of it at once. The ranks compare SHA-256 of the
    whole state, so that equal states are certain.

    Args:
        state: dicts with plain keys, lists and tuples of tensors and plain values, such as
            state_dict(). Ranks in `group.joined` may pass anything: it is not sent.
        step: completed steps of this rank; not used of ranks in `group.joined`.
        group: None: the default group.

    Returns:
        state, step: of the most advanced ranks. These get their own `state` back, other ranks a new
        one with tensors on the CPU.

    Raises:
        InvalidArgument: a state has other values, `step` is negative, or all ranks joined.
        Mismatch: the states of the most advanced ranks differ; raised on all ranks.
        Error: as pycomm.all_reduce.
    """
    group = group or default()
    new = group.rank in group.joined
    tensors: list[Tensor] = []
    layout: Any = None if new else _layout(state, tensors)
    rows = all_gather_object([-1 if new else int(step), layout], group=group)
    steps = [int(row[0]) for row in rows]
    most = max(steps)
    if most < 0 or any(one < 0 for r, one in enumerate(steps) if r not in group.joined):
        raise InvalidArgument(
            f"sync_state: invalid steps of the ranks: got {steps}, expected at least 0, and a rank "
            "that has the state"
        )
    sources = [rank for rank, one in enumerate(steps) if one == most]
    texts = {rank: encode(rows[rank][1]) for rank in sources}
    different = [rank for rank in sources if texts[rank] != texts[sources[0]]]
    if different:
        raise _differ(sources[0], different, "names, shapes or values")
    if len(sources) == group.size:
        return state, most
    layout = rows[sources[0]][1]
    if group.rank not in sources:
        tensors = []
        state = _made(layout, tensors)
    content = _Content(tensors)
    _exchange(content, sources, group)
    mine = np.frombuffer(content.sha256(), np.uint8)
    digests = collectives.all_gather(mine, group=group)
    different = [rank for rank, one in enumerate(digests) if (one != digests[sources[0]]).any()]
    if different:
        raise _differ(sources[0], different, "tensors")
    return state, most


def _differ(first: int, ranks: list[int], what: str) -> Mismatch:
    return Mismatch(
        f"sync_state: the {what} of ranks {ranks} differ from those of rank {first}, which "
        "completed as many steps; no state was changed"
    )


class _Content:
    """The bytes of tensors, one tensor after the other; without a copy if they are contiguous and
    on the CPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        whole = (tensor.detach().cpu().contiguous() for tensor in tensors)
        self._parts = [one.reshape(-1).view(torch.uint8).numpy() for one in whole]
        self._ends = list(itertools.accumulate(part.size for part in self._parts))
        self.size = self._ends[-1] if self._ends else 0

    def views(self, begin: int, end: int) -> list[np.ndarray[Any, Any]]:
        """The parts of the bytes from `begin` to `end`."""
        found, at = [], bisect.bisect_right(self._ends, begin)
        while begin < end:
            first = self._ends[at] - self._parts[at].size
            stop = min(end, self._ends[at])
            found.append(self._parts[at][begin - first : stop - first])
            begin, at = stop, at + 1
        return found

    def read(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """A copy of the bytes from `begin` to `end`."""
        return np.concatenate([np.empty(0, np.uint8), *self.views(begin, end)])

    def write(self, begin: int, content: np.ndarray[Any, Any]) -> None:
        """Changes the bytes that start at `begin`."""
        at = 0
        for view in self.views(begin, begin + content.size):
            view[:] = content[at : at + view.size]
            at += view.size

    def sha256(self) -> bytes:
        """The digest of all bytes."""
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(part.data)
        return digest.digest()


def _exchange(content: _Content, sources: Sequence[int], group: Group) -> None:
    """Each source sends its share of the bytes to all other ranks."""
    total, is_source = content.size, group.rank in sources
    bounds = [total * i // len(sources) for i in range(len(sources) + 1)]
    shares = dict(zip(sources, itertools.pairwise(bounds), strict=True))
    receivers = [rank for rank in range(group.size) if rank not in sources]
    longest = max(end - begin for begin, end in shares.values())
    for offset in range(0, longest, PIECE_BYTES):
        pieces = {
            rank: (min(begin + offset, end), min(begin + offset + PIECE_BYTES, end))
            for rank, (begin, end) in shares.items()
        }
        sent, received = [0] * group.size, [0] * group.size
        source = np.empty(0, np.uint8)
        if is_source:
            mine = content.read(*pieces[group.rank])
            source = np.tile(mine, len(receivers)) if len(receivers) > 1 else mine
            for rank in receivers:
                sent[rank] = mine.size
        else:
            for rank, (begin, end) in pieces.items():
                received[rank] = end - begin
        out = np.empty(sum(received), np.uint8)
        call = _core.Call("all_to_all", counts=[*sent, *received], counts_fit=True)
        call(group, source, out, out, False)
        if not is_source:
            at = 0
            for rank, (begin, _) in pieces.items():
                content.write(begin, out[at : at + received[rank]])
                at += received[rank]


def _layout(value: Any, tensors: list[Tensor]) -> Any:
    """The value as plain values, without the contents of tensors, which are appended."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", [[key, _layout(one, tensors)] for key, one in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_layout(one, tensors) for one in value]]
    return ["value", value]


def _made(layout: Any, tensors: list[Tensor]) -> Any:
    """The value with this layout; its tensors, which are not initialized, are appended."""
    kind, content = layout[0], layout[1]
    if kind == "tensor":
        dtype = getattr(torch, content, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"sync_state: this torch has no dtype {content}")
        tensors.append(torch.empty(layout[2], dtype=dtype))
        return tensors[-1]
    if kind == "dict":
        return {key: _made(one, tensors) for key, one in content}
    if kind in ("list", "tuple"):
        made = [_made(one, tensors) for one in content]
        return made if kind == "list" else tuple(made)
    return content
