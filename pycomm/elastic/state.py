"""The state of ranks that have it, sent to those that do not by several ranks at once."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import _core, collectives
from pycomm._arguments import integer, refuse
from pycomm.default_group import chosen
from pycomm.elastic.change import GroupChange
from pycomm.errors import Error, InvalidArgument, Mismatch, Unsupported
from pycomm.group import Group
from pycomm.objects import all_gather_object
from pycomm.objects.serialization import encode

BLOCK_BYTES = 16 << 20  # of a state: that one call sends, and one digest covers


def sync_state(state: Any, step: int, *, group: Group | None = None) -> tuple[Any, int]:
    """Sends the state of the ranks with the most completed steps to all others, such as new ranks.
    Collective.

    All ranks that have that state send a share of it at once. The ranks compare SHA-256 of the
    digests of all blocks of the state, so that equal states are certain.

    Args:
        state: dicts with plain keys, lists and tuples of tensors and plain values, such as
            state_dict(). Ranks in `group.joined` may pass anything: it is not sent.
        step: completed steps of this rank; not used of ranks in `group.joined`.
        group: None: the default group.

    Returns:
        state, step: of the most advanced ranks. These get their own `state` back, other ranks a new
        one with tensors on the CPU.

    Raises:
        InvalidArgument: a state has other values or sharded tensors (DTensor), `step` is negative
            or no integer, `group` is no group, or all ranks joined.
        Mismatch: the states of the most advanced ranks differ; raised on all ranks.
        Error: as pycomm.all_reduce.
    """
    group, step = chosen(group), integer("step", step)
    new = group.rank in group.joined
    states = RankStates(state, new, -1 if new else step, group)
    steps = states.numbers
    most = max(steps)
    if most < 0 or any(one < 0 for r, one in enumerate(steps) if r not in group.joined):
        raise InvalidArgument(
            f"sync_state: invalid steps of the ranks: got {steps}, expected at least 0, and a rank "
            "that has the state: if all ranks that had it were lost, read a checkpoint"
        )
    sources = [rank for rank, one in enumerate(steps) if one == most]
    states.check_equal(sources)
    return states.copy(sources[0], range(group.size)), most


def copy_state(state: Any, change: GroupChange, new_only: bool = False) -> Any:
    """Sends the state of the most advanced rank to the others. Collective.

    The ranks whose state is equal, by SHA-256, send a share of it at once.

    Args:
        state: as of sync_state; that of new ranks is not used.
        change: to the group of the ranks.
        new_only: only the new ranks get the state.

    Returns:
        The state of that rank; or `state` itself, if it is equal or is not to be replaced.
    """
    states = RankStates(state, change.is_new, 0, change.group)
    return states.copy(change.source, change.new if new_only else range(change.group.size))


def load_copy(
    tensors: Sequence[Tensor], objects: Sequence[Any], change: GroupChange, new_only: bool = False
) -> None:
    """As copy_state(), of tensors and of the states of objects, which are changed in place."""
    state = [tensors, [one.state_dict() for one in objects]]
    found = copy_state(state, change, new_only)
    if found is not state:
        for tensor, content in zip(tensors, found[0], strict=True):
            tensor.detach().copy_(content)
        for one, content in zip(objects, found[1], strict=True):
            one.load_state_dict(content)


def check_stateful(objects: Iterable[Any]) -> None:
    """Raises InvalidArgument for an object without a state."""
    for one in objects:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            refuse("object", one, "one with state_dict() and load_state_dict()")


def check_replicated(objects: Sequence[Any]) -> None:
    """Raises Unsupported if one of them is an optimizer whose state is on one rank only, and
    InvalidArgument for an object without a state."""
    check_stateful(objects)
    for one in objects:
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(one).__mro__):
            raise Unsupported(
                "no other rank has the shard of a lost rank of a ZeroRedundancyOptimizer: read a "
                "checkpoint of its consolidate_state_dict(); or use fully_shard with a mesh of "
                "replicas and shards (HSDP) and pycomm.elastic.ShardedTraining"
            )


class RankStates:
    """The states of all ranks. Collective to make.

    Attributes:
        numbers: by rank, what it passed as `number`.
    """

    def __init__(self, state: Any, new: bool, number: int, group: Group) -> None:
        self._state, self._group = state, group
        tensors: list[Tensor] = []
        layout, problem = None, ""
        try:
            layout = None if new else _layout(state, tensors)
        except InvalidArgument as error:  # raised below on all ranks, which wait for this one
            layout, problem, tensors = None, str(error), []
        self._content = _Content(tensors)
        # Ranks of one host hash at once.
        self._threads = max(1, len(os.sched_getaffinity(0)) // group.core.local_size)
        digest = self._content.sha256(self._threads)
        row = [number, layout, digest, problem, self._content.size]
        rows = all_gather_object(row, group=group)
        for rank, row in enumerate(rows):
            if row[3]:
                raise InvalidArgument(f"the state of rank {rank}: {row[3]}")
        self.numbers = [int(row[0]) for row in rows]
        self._layouts = [row[1] for row in rows]
        self._texts = [encode(layout) for layout in self._layouts]
        self._digests = [row[2] for row in rows]
        self._sizes = [int(row[4]) for row in rows]

    def check_equal(self, ranks: Sequence[int]) -> None:
        """Raises Mismatch, on every rank, if the states of these ranks differ."""
        what = {"names, shapes or values": self._texts, "tensors": self._digests}
        for name, found in what.items():
            different = [rank for rank in ranks if found[rank] != found[ranks[0]]]
            if different:
                raise Mismatch(
                    f"the {name} of ranks {different} differ from those of rank "
                    f"{ranks[0]}, which completed as many steps; no state was changed"
                )

    def copy(self, source: int, wanting: Collection[int]) -> Any:
        """Collective. Sends the state of `source` to those of the ranks `wanting` whose state
        differs. Returns the state of this rank."""
        group = self._group
        same = [
            self._texts[rank] == self._texts[source] and digest == self._digests[source]
            for rank, digest in enumerate(self._digests)
        ]
        senders = [rank for rank in range(group.size) if same[rank]]
        receivers = [rank for rank in range(group.size) if rank in wanting and not same[rank]]
        if not receivers:
            return self._state
        state, content = self._state, self._content
        if group.rank in receivers:
            tensors: list[Tensor] = []
            state = _made(self._layouts[source], tensors)
            content = _Content(tensors)
        elif group.rank not in senders:
            content = _Content([])
        with ThreadPoolExecutor(self._threads) as pool:
            digests = _exchange(content, self._sizes[source], senders, receivers, group, pool)
        correct = group.rank not in receivers or _sha256(digests) == self._digests[source]
        word = torch.tensor([int(correct)])
        if not collectives.all_reduce(word, "min", group=group):
            raise Error("a rank received a state whose SHA-256 differs from that of the sender")
        return state


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
        """The bytes from `begin` to `end`; a copy if they are of several tensors."""
        views = self.views(begin, end)
        return views[0] if len(views) == 1 else np.concatenate([np.empty(0, np.uint8), *views])

    def write(self, begin: int, content: np.ndarray[Any, Any]) -> None:
        """Changes the bytes that start at `begin`."""
        at = 0
        for view in self.views(begin, begin + content.size):
            view[:] = content[at : at + view.size]
            at += view.size

    def sha256(self, threads: int) -> bytes:
        """SHA-256 of the digests of all blocks."""
        blocks = range(0, self.size, BLOCK_BYTES)
        if min(threads, len(blocks)) < 2:
            return _sha256(map(self.digest, blocks))
        with ThreadPoolExecutor(threads) as pool:
            return _sha256(pool.map(self.digest, blocks))

    def digest(self, begin: int) -> bytes:
        """SHA-256 of the block that starts at `begin`."""
        digest = hashlib.sha256()
        for view in self.views(begin, min(begin + BLOCK_BYTES, self.size)):
            digest.update(view.data)
        return digest.digest()


def _sha256(digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(digests)).digest()


def _exchange(
    content: _Content,
    total: int,
    sources: Sequence[int],
    receivers: Sequence[int],
    group: Group,
    pool: ThreadPoolExecutor,
) -> list[bytes]:
    """Each source sends its share of each block of the `total` bytes to all receivers.

    Returns:
        Of a receiver: the digests of the blocks; `pool` computes them while the next one arrives.
    """
    digests = []
    buffer = np.empty(0, np.uint8)
    for begin in range(0, total, BLOCK_BYTES):
        length = min(BLOCK_BYTES, total - begin)
        bounds = [begin + length * i // len(sources) for i in range(len(sources) + 1)]
        shares = dict(zip(sources, itertools.pairwise(bounds), strict=True))
        sent, received = [0] * group.size, [0] * group.size
        source = out = np.empty(0, np.uint8)
        views = content.views(begin, begin + length) if group.rank in receivers else []
        if group.rank in sources:
            mine = content.read(*shares[group.rank])
            source = np.tile(mine, len(receivers)) if len(receivers) > 1 else mine
            for rank in receivers:
                sent[rank] = mine.size
        elif len(views) == 1:
            out = views[0]
        elif views:
            buffer = buffer if buffer.size else np.empty(length, np.uint8)
            out = buffer[:length]
        for rank, (first, end) in shares.items():
            received[rank] = end - first if views else 0
        call = _core.Call("all_to_all", counts=[*sent, *received], counts_fit=True)
        call(group, source, out, out, False)
        if len(views) > 1:
            content.write(begin, out)
        if views:
            digests.append(pool.submit(content.digest, begin))
    return [digest.result() for digest in digests]


def _layout(value: Any, tensors: list[Tensor]) -> Any:
    """The value as plain values, without the contents of tensors, which are appended."""
    if hasattr(value, "device_mesh"):
        raise InvalidArgument(
            "got a DTensor, whose shards differ by rank: no other rank has that of a lost one. "
            "Read a checkpoint of torch.distributed.checkpoint; or, if other ranks hold copies of "
            "a shard (HSDP), use pycomm.elastic.ShardedTraining"
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise InvalidArgument("got a tensor on the device meta, which has no values")
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, Counter):  # of MultiStepLR
        return ["counter", _layout(dict(value), tensors)]
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
    if kind == "counter":
        return Counter(_made(content, tensors))
    if kind == "dict":
        return {key: _made(one, tensors) for key, one in content}
    if kind in ("list", "tuple"):
        made = [_made(one, tensors) for one in content]
        return made if kind == "list" else tuple(made)
    return content
