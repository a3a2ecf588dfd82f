"""Training of sharded models (HSDP) that continues after ranks were lost: a new rank gets its shard
from the ranks that hold copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm._arguments import elements, function, refuse
from pycomm._training.shards import as_shard, is_sharded, local_shard
from pycomm.default_group import chosen
from pycomm.elastic.change import GroupChange, Membership, ShrinkResult
from pycomm.elastic.state import RankStates, check_replicated, copy_state
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import DEFAULT_WAIT_S, Group
from pycomm.objects import all_gather_object

Held = dict[str, list[int]]  # by shard: the ranks that hold it
LOST = (
    "replace: no rank holds a copy of a lost shard, or the new mesh has other shards; model and "
    "optimizer were not changed. Load a checkpoint of torch.distributed.checkpoint"
)


class ShardedTraining:
    """A model and its optimizer, sharded over some ranks, of whose shards other ranks hold copies:
    fully_shard with a mesh of replicas and shards (HSDP).

        def build(group):  # makes torch's process group, the mesh, the model and its optimizer
            ...
            return model, optimizer, scheduler

        training = pycomm.elastic.ShardedTraining(build)
        loss(training.model(x), y).backward()
        training.step()

    A process group of torch 2.13 cannot take other ranks, nor can a mesh. So replace() calls
    `build` again on all ranks, and copies shards of the earlier model to the new one.

    Args:
        build: makes the model, its optimizer and any objects that are the same on all ranks and
            have state_dict() and load_state_dict(). It first ends torch's earlier process group.
        group: the ranks; None: the default group. If this process joined it, `build` is not called
            before replace().

    Attributes:
        model, optimizer: from the last call of `build`.
        others: the further objects, as a list.
        step_count: completed steps.

    Raises:
        InvalidArgument: `build` is no function or returns other objects, or `group` is no group.
        Mismatch: on every rank: copies of a shard differ: `build` needs a seed, for example.
        Unsupported: the optimizer is a ZeroRedundancyOptimizer: no other rank holds its shards.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, build: Callable[[Group], Sequence[Any]], group: Group | None = None) -> None:
        self._build, self.step_count = function("build", build), 0
        self.others: list[Any] = []
        self._parameters: dict[str, Tensor] = {}  # sharded, also while a failed pass gathered them
        self._membership = Membership(chosen(group))
        if not self._membership.new:
            self._use(*_built(self._build, self._membership.group))
            self._held_states(self._membership.group, new=False)

    def _use(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> None:
        check_replicated([optimizer, *others])
        self.model, self.optimizer, self.others = model, optimizer, list(others)
        self._parameters = dict(model.named_parameters())

    def step(self) -> None:
        """Waits until all ranks have their gradients, then calls optimizer.step(). Collective.

        If one rank completed a step, each other rank has the gradient to complete it. So do not
        call optimizer.step() directly.

        Raises:
            InvalidArgument: this process joined the group, and did not call replace().
            Error: as pycomm.barrier. Call replace() then, and leave the gradients unchanged.
        """
        self._membership.check("ShardedTraining")
        collectives.barrier(group=self._membership.group)
        self.optimizer.step()
        self.step_count += 1

    def replace(
        self, *, timeout_s: float | None = None, wait_s: float = DEFAULT_WAIT_S
    ) -> ShrinkResult:
        """New processes take the ranks that were lost. Collective over the survivors and the new
        processes. All ranks call `build`.

        A step that one survivor completed is complete on all ranks afterwards. A new rank gets the
        parameters and the optimizer's state of its shard from the ranks that hold it, from several
        at once. SHA-256 says that copies are equal. Buffers of a new rank, and on all ranks the
        optimizer's options and the states of `others`, are those of the most advanced rank.
        Gradients are dropped. Meanwhile a rank stores its parameters twice.

        Args:
            timeout_s, wait_s: as of Group.replace. If `wait_s` ends first, `build` gets a smaller
                group, in which each shard needs a rank.

        Returns:
            The new group, and the number of steps that all have completed.

        Raises:
            Unsupported: on every rank: no rank that is left holds a shard, or `build` shards
                otherwise. Model and optimizer are those before: load a checkpoint of
                torch.distributed.checkpoint.
            Mismatch: on every rank: copies of a shard differ; nothing was changed.
            InvalidArgument: as of Group.replace, or all ranks joined.
            GroupBroken, PeerLost, Timeout: as of Group.replace. After PeerLost call again.
        """

        def replaced(group: Group) -> Group:
            # Other ranks may wait in a process group of torch, none of whose ranks was lost.
            group.abort("a rank of the sharded model was lost, and replace() was called")
            return group.replace(timeout_s, wait_s)

        change = self._membership.change(replaced, (self.step_count,))
        group, (step,) = change.group, change.counts
        if not change.is_new and self.step_count < step:  # another rank passed the barrier
            self.optimizer.step()
            self.step_count = step
        held, states = self._held_states(group, change.is_new)
        shared = copy_state(self._shared_state(change), change)
        buffers = self._buffers(change)
        made = _built(self._build, group)
        _load(made, self._take(made[0], states, held, group), shared, buffers)
        self._use(*made)
        self.step_count = step
        self._membership.complete()
        return change.result(step, 0.0)

    def _held_states(self, group: Group, new: bool) -> tuple[Held, RankStates]:
        """Collective. Where the shards are, and their content.

        Args:
            group: the ranks.
            new: this rank has no state.

        Raises:
            Unsupported: a shard is lost.
            Mismatch: copies of one differ.
        """
        rows = all_gather_object(None if new else _shard(self._parameters.values()), group=group)
        held: Held = {}
        for rank, row in enumerate(rows):
            if row is not None:
                held.setdefault(row[0], []).append(rank)
        count = max(row[1] for row in rows if row is not None)
        if len(held) < count:
            raise Unsupported(f"{LOST}: of {count} shards, {list(held)} are left")
        states = RankStates(None if new else self._local_state(), new, 0, group)
        for ranks in held.values():
            states.check_equal(ranks)
        return held, states

    def _local_state(self) -> dict[str, Any]:
        """The shard of this rank, as plain tensors."""
        moments = {}
        for index, parameter in enumerate(_optimized(self.optimizer)):
            state = self.optimizer.state.get(parameter, {})
            moments[index] = {
                key: [is_sharded(value), local_shard(value) if _alike(value, parameter) else value]
                for key, value in state.items()
            }
        parameters = {name: local_shard(one) for name, one in self._parameters.items()}
        return {"parameters": parameters, "optimizer": moments}

    def _take(self, model: nn.Module, states: RankStates, held: Held, group: Group) -> Any:
        """Collective. The content of the shard that this rank has in the new model."""
        wanted = [row[0] for row in all_gather_object(_shard(model.parameters()), group=group)]
        if any(shard not in held for shard in wanted):
            raise Unsupported(f"{LOST}: {list(held)} are left, and build() made {wanted}")
        for shard, ranks in held.items():
            taking = [rank for rank, one in enumerate(wanted) if one == shard]
            content = states.copy(ranks[0], taking)
            if group.rank in taking:
                found = content
        return found

    def _shared_state(self, change: GroupChange) -> list[Any] | None:
        """What is the same on all ranks. A new rank has none."""
        if change.is_new:
            return None
        options = self.optimizer.state_dict()["param_groups"]
        return [options, [one.state_dict() for one in self.others]]

    def _buffers(self, change: GroupChange) -> dict[str, Tensor]:
        """Collective. Those of this rank; of a new one those of the most advanced rank."""
        mine = None if change.is_new else dict(self.model.named_buffers())
        found: dict[str, Tensor] = copy_state(mine, change, new_only=True)
        return found


def _built(build: Callable[[Group], Sequence[Any]], group: Group) -> list[Any]:
    """What `build` returns: a module, an optimizer and further objects."""
    expected = "a module, an optimizer and further objects"
    made = elements("result of build", build(group), expected)
    kinds = nn.Module, torch.optim.Optimizer
    if len(made) < 2 or not all(map(isinstance, made, kinds)):
        refuse("result of build", made, expected)
    return made


def _alike(value: Any, parameter: Any) -> bool:
    """Whether the shards of an optimizer's value are those of the parameter; or it has none."""
    return not is_sharded(value) or (
        value.shape == parameter.shape and value.placements == parameter.placements
    )


def _optimized(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters, in the order of the optimizer's state_dict()."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _shard(parameters: Iterable[Any]) -> tuple[str, int]:
    """The part of the model that this rank holds: by mesh, the coordinate and the size of each
    dimension that shards; and the number of such parts."""
    rows = set()
    for parameter in filter(is_sharded, parameters):
        place, sizes = parameter.device_mesh.get_coordinate(), parameter.device_mesh.shape
        rows.add(
            tuple(
                (place[dim], sizes[dim])
                for dim, placement in enumerate(parameter.placements)
                if not placement.is_replicate()
            )
        )
    count = max((math.prod(size for _, size in row) for row in rows), default=1)
    return " ".join(f"{at}/{size}" for row in sorted(rows) for at, size in row), count


def _load(made: Sequence[Any], shard: Any, shared: Any, buffers: dict[str, Tensor]) -> None:
    """Puts the content of a shard into what build() made.

    Raises:
        InvalidArgument: its names or shapes differ.
    """
    model, optimizer, *others = made
    options, states = shared
    parameters = {name: local_shard(one) for name, one in model.named_parameters()}
    shapes = [
        {name: tuple(one.shape) for name, one in found.items()}
        for found in (parameters, shard["parameters"])
    ]
    if shapes[0] != shapes[1]:
        raise InvalidArgument(
            f"replace: build() made another model: got shards {shapes[0]}, expected {shapes[1]}"
        )
    for name, one in parameters.items():
        one.copy_(shard["parameters"][name])
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    moments = {
        index: {
            key: as_shard(value, parameter) if sharded else value
            for key, (sharded, value) in shard["optimizer"][index].items()
        }
        for index, parameter in enumerate(_optimized(optimizer))
    }
    optimizer.load_state_dict({"state": moments, "param_groups": options})
    for other, state in zip(others, states, strict=True):
        other.load_state_dict(state)
