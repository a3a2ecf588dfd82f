"""Runs DGC's steps, for the reducers of pycomm.DataParallel and of torch's DDP.

One backward pass is one Step (step.py). The compressor chooses its plan by the level of the
warm-up, and keeps the state between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import integer
from pycomm._core_api import arrays
from pycomm._training import coalesced
from pycomm._training.arguments import check_scaler
from pycomm._training.communicators import CommunicatorPool, tag_of
from pycomm._training.loss_scale import LossScale
from pycomm.compress.dgc_state import DgcState
from pycomm.compress.exchange_policy import DENSE, Chooser, LevelPlan
from pycomm.compress.hierarchical import CurrentHostGroups, HostGroups
from pycomm.compress.options import Options
from pycomm.compress.packet_exchange import AllGatherExchange
from pycomm.compress.parameter_state import AdoptedMomentum, ParameterState
from pycomm.compress.sharded import ShardedExchange
from pycomm.compress.step import Step, StepPlan
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group


class Compressor:
    """The exchange of compressed gradients; pycomm.parallel.exchange has the contract.

    Args:
        optimizer: a torch.optim.SGD; its momentum and decay become those of the compressor.
        options: of DGC.
        scaler: the loss scaler of the training, if any.

    Attributes:
        idle: this rank has no data and only takes part in a pass of the others.
        scale: of the loss.
        state: what is kept between steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: Options,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        check_scaler(scaler)
        self._options = options
        self._adopted = AdoptedMomentum(optimizer, options.min_count, options.owned)
        self.state = DgcState(self._adopted.memories, options.selects_model, options.may_shard)
        self._adopted.switched = lambda: self.state.switched
        if options.compact:
            _check_codec_devices(self.state.compressed)
        self._chooser = Chooser(options)
        self._level_plan = DENSE  # the plan of the last step
        self._workspaces: dict[tuple[str, ...], Tensor] = {}
        self._pool: CommunicatorPool | None = None
        self._hosts = CurrentHostGroups()
        self._sent_bytes = 0
        self.idle, self.scale = False, LossScale(scaler)
        self._step: Step | None = None
        self._failed: Step | None = None  # the last one, if it failed at its end

    @property
    def level(self) -> int | None:
        """The index of the sparsity level of the next step; None: dense."""
        return self._options.warmup.level_at(self.state.step_count)

    @property
    def exchanges(self) -> dict[int, str]:
        """The exchange of each level, as rank 0 chose it."""
        return self._chooser.exchanges

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._communicators().group

    def tag(self, bucket: int) -> None:
        """The next calls are for this bucket of torch's DDP."""
        self._communicators().tag = tag_of(self.state.step_count + 1, bucket)

    def attach(
        self, named: Mapping[str, Tensor], pool: CommunicatorPool, others: Mapping[str, Tensor]
    ) -> None:
        """Uses the communicators of DataParallel and its names of the model's parameters. The
        gradients of `others` are not exchanged here.

        Raises:
            Unsupported: DGC would have to apply momentum or decay to a parameter that is not among
                `named`.
        """
        self._pool = pool
        before = {memory.name: memory for memory in self.state.memories.values()}
        self._adopted.rename(named, others)
        self.state.rename(before)
        for memory in self.state.memories.values():
            hyper = memory.hyper
            if not memory.parameter.requires_grad:
                continue  # frozen: it gets no gradient
            if memory.name not in named and (hyper.momentum or hyper.weight_decay):
                raise Unsupported(
                    f"{memory.name!r} has a sparse gradient or is not in the model: with DGC it "
                    "must be in a parameter group without momentum and weight decay"
                )

    def compresses(self, parameter: Tensor) -> bool:
        """Whether this parameter is compressed."""
        memory = self.state.memories.get(parameter)
        return memory is not None and memory.v is not None

    def add(
        self,
        flat: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lacking: Collection[Tensor] = (),
    ) -> None:
        """Adds a bucket whose gradients are complete. The first one begins a step."""
        if self._step is None:
            self._adopted.check()
            self._step = self._begin()
        self._step.add(flat, parameters, gradients, lacking)

    def finish(self, unused: Collection[Tensor] = (), sparse: Sequence[Tensor] = ()) -> None:
        """Ends the step."""
        step, self._step = self._step, None
        self._failed = step
        with contextlib.ExitStack() as ending:
            if step is not None:
                self._end(step, ending, unused, sparse)
            self._failed = None

    def cancel(self) -> None:
        """Rolls the step back."""
        step, self._step = self._step, None
        if step is not None:
            step.cancel()

    def sync_from(self, src: int) -> None:
        """Takes the loss scale and the velocity of uncompressed parameters from rank `src`."""
        group, state = self.group, self.state
        dense = [m.u for m in state.memories.values() if m.v is None or not state.switched]
        coalesced.bcast_list_(dense, src, group)
        self.scale.sync_from(src, group)

    def resume(self, change: GroupChange, counted: bool) -> float:
        """Rolls back or commits the failed step, after the pool got another group.

        Survivors keep u and v, those of new ranks are 0; everything that must be the same is taken
        from rank `change.source`. Returns an estimate of the norm of the lost ranks' residual: the
        mean residual of the survivors.
        """
        step = self._step or self._failed
        self._step = self._failed = None
        if step is not None:
            step.cancel()
            if counted:
                step.commit_sent()
        lost = self._keep_survivors(change)
        self._chooser.forget()  # the bytes depend on the number of ranks
        self._level_plan = DENSE
        self._adopted.forget()
        state, group = self.state, self.group
        word = torch.tensor([state.step_count, state.switched])
        collectives.broadcast(word, change.source, group=group)
        state.step_count, state.switched = int(word[0]), bool(word[1])
        self.sync_from(change.source)
        return change.lost_norm(state.squares(), lost)

    def detach(self) -> None:
        """See DGC.detach."""
        if self._adopted.released:
            return
        self._cancel_failed_pass("detach")
        group = self.group
        # After join() a rank without data still has a waiting step.
        if _everywhere(self._adopted.waiting, group):
            raise InvalidArgument(
                "DGC.detach() between backward() and the optimizer's step(): call step() before, "
                "or drop the gradients with zero_grad()"
            )
        self._adopted.forget()
        self.state.to_ranks(group)
        memories = list(self.state.memories.values())
        velocities = [memory.u for memory in memories]
        if self.state.switched:
            velocities = coalesced.average(velocities, group)
            for memory, velocity in zip(memories, velocities, strict=True):
                if memory.v is not None and memory.hyper.nesterov and memory.hyper.momentum:
                    velocity.div_(memory.hyper.momentum)  # u follows the formulas
        self._adopted.release(velocities)

    def stats(self) -> dict[str, Any]:
        """See DGC.stats."""
        warmup, steps = self._options.warmup, self.state.step_count
        level = warmup.level_at(max(steps - 1, 0))
        plan = DENSE if level is None else self._chooser.planned(level)
        counted = [memory.parameter for memory in self.state.memories.values()]
        return {
            "step": steps,
            "level": None if level is None else warmup.sparsity[level],
            "k": plan.k if isinstance(plan.k, int) else sum(plan.k.values()),
            "sent_bytes": self._sent_bytes,
            "dense_bytes": sum(p.numel() * p.element_size() for p in counted),
            "exchange": plan.exchange,
            "value_dtype": plan.value_dtype,
            "exchange_costs": dict(plan.exchange_costs),
        }

    def save(self) -> dict[str, Any]:
        """See DGC.state_dict."""
        self._cancel_failed_pass("state_dict")
        self._adopted.settle()
        return self.state.state(self.group, self.state.numbers(self.exchanges))

    def gather(self, dst: int) -> dict[str, Any] | None:
        """See DGC.gather_state."""
        self._cancel_failed_pass("gather_state")
        self._adopted.settle()
        dst = integer("dst", dst, 0, self.group.size - 1)
        return self.state.state_of_all(self.group, dst, self.state.numbers(self.exchanges))

    def load(self, saved: Mapping[str, Any]) -> None:
        """See DGC.load_state_dict."""
        self._cancel_failed_pass("load_state_dict")
        self._adopted.settle()
        self._chooser.forget(self.state.restore(saved, self.group))
        self._level_plan = DENSE
        self._adopted.forget()

    def _communicators(self) -> CommunicatorPool:
        """The communicators of DataParallel; without it, the default group."""
        if self._pool is None:
            self._pool = CommunicatorPool(None, 1)
        return self._pool

    def _host_groups(self) -> HostGroups:
        """The hosts of the communicators. Collective if they must be created."""
        return self._hosts.get(self.group)[0]

    def _begin(self) -> Step:
        """A new step. Collective at the first step of a level."""
        pool, options = self._communicators(), self._options
        level, state, now = self.level, self.state, DENSE
        if level is not None:
            now = self._chooser.plan(level, state.compressed, pool, not state.switched)
        if now.exchange != "dense" and not state.switched:
            self._convert_velocity()
        if now is not self._level_plan:
            self._change_level(now)
        packets = now.exchange in ("gather", "sharded", "hierarchical")
        plan = StepPlan(
            now.exchange,
            now.k,
            masking=options.masking,
            clip=options.clip_norm,
            together=options.clip == "global",
            loss_scale=self.scale.unread(self.idle),
            fused=options.fused and packets,
            packet_exchange=self._packet_exchange(now),
            hosts=self._host_groups() if now.exchange == "hierarchical" else None,
        )
        return Step(plan, state.memories, self._workspaces, pool, self.idle)

    def _end(
        self,
        step: Step,
        ending: contextlib.ExitStack,
        unused: Collection[Tensor],
        sparse: Sequence[Tensor],
    ) -> None:
        """Finishes and counts the step, unless all ranks skip it because of Inf or NaN under a loss
        scale. Step.finish describes the arguments."""
        if not step.finish(ending, unused, sparse):
            self._adopted.skipped()
            return
        self.state.step_count += 1
        self._sent_bytes = step.sent_bytes
        self._adopted.register_exchange(*(step.deferred() if self._options.fused else ()))

    def _convert_velocity(self) -> None:
        """Converts torch's velocity of the dense phase to the u of the formulas."""
        for memory in self.state.compressed:
            if memory.hyper.nesterov:
                memory.u.mul_(memory.hyper.momentum)
        self.state.switched = True

    def _change_level(self, now: LevelPlan) -> None:
        """Converts the state to the exchange of another level."""
        self._level_plan = now
        self._workspaces.clear()
        state, group = self.state, self.group
        by_host = now.exchange == "hierarchical"
        if not now.is_sharded or by_host != bool(state.by_host):
            state.fold(group)  # these owners end
        if by_host and not state.by_host:
            state.to_hosts(self._host_groups(), group)
        elif not by_host:
            state.to_ranks(group)

    def _packet_exchange(self, now: LevelPlan) -> AllGatherExchange | None:
        if now.value_dtype is None:
            return None
        if now.is_sharded:
            factor = self._options.owner_k_factor
            return ShardedExchange(now.value_dtype, self.state.owned, factor)
        return AllGatherExchange(now.value_dtype)

    def _keep_survivors(self, change: GroupChange) -> int:
        """Converts u and v to the surviving ranks or hosts. Returns how many were lost."""
        state, before, group = self.state, change.before, change.group
        state.fold(before)
        if not _everywhere(bool(state.by_host), group):
            state.to_ranks(before)
        if not state.by_host:
            return change.lost_states
        hosts = max(state.by_host)
        state.by_host = self._host_groups().of_rank
        for memory in state.compressed:  # some may be in the middle of a step
            coalesced.bcast_list_(memory.tensors, 0, self._host_groups().inside)
        return hosts - max(state.by_host)

    def _cancel_failed_pass(self, method: str) -> None:
        """Cancels a failed backward pass: its unsent elements return to the residual."""
        if self._step is not None and torch._C._current_graph_task_id() != -1:
            raise InvalidArgument(
                f"DGC.{method}() cannot be called inside backward(), where a step is incomplete: "
                "call it before or after"
            )
        self.cancel()


def _everywhere(here: bool, group: Group) -> bool:
    """Whether `here` is true on all ranks."""
    word = torch.tensor([int(here)])
    collectives.all_reduce(word, "min", group=group)
    return bool(word.item())


def _check_codec_devices(memories: Sequence[ParameterState]) -> None:
    for memory in memories:
        if not (memory.u.is_cpu or arrays.on_gpu(memory.u)):
            raise Unsupported(
                "compact packets need parameters in host memory or on CUDA devices, and "
                f'{memory.name!r} is on {memory.u.device}: use codec="raw" with '
                'value_dtype="float32"'
            )
