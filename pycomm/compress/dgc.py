"""DGC: settings, the plan of each step, and the state of each parameter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm import arrays, coalesced, collectives
from pycomm.communicators import CommunicatorPool
from pycomm.compress import state
from pycomm.compress.exchange_policy import DENSE, EXCHANGES, Chooser, Level
from pycomm.compress.hierarchical import Hosts
from pycomm.compress.packet_exchange import AllGatherExchange, PacketExchange
from pycomm.compress.parameter_state import AdoptedMomentum, ParameterState
from pycomm.compress.schedule import K_RULES, VALUE_DTYPES, check_ramp, level_at
from pycomm.compress.sharded import ShardedExchange
from pycomm.compress.staleness import Ages
from pycomm.compress.transaction import Plan, Step
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

__all__ = ["DGC", "Compressed"]


class DGC:
    """Deep gradient compression for a torch.optim.SGD (Lin et al., arXiv 1712.01887).

        dgc = pycomm.DGC(optimizer, sparsity=[0.999])
        model = pycomm.DataParallel(model, compression=dgc)      # or, around torch's own:
        ddp.register_comm_hook(dgc, pycomm.dgc_hook)

    DGC takes over momentum, weight decay and Nesterov of all the optimizer's parameters, with the
    values in its groups; the optimizer does `p -= lr * p.grad`. docs/compression.md has formulas.

    Args:
        optimizer: a torch.optim.SGD without dampening and maximize.
        rampup_begin_step: the first step that compresses, counted from 0; earlier steps are dense.
        rampup_step: number of steps of the sparsity warm-up, shared evenly by the levels of
            `sparsity`; afterwards the last level stays.
        sparsity: the fraction of elements that is not sent, by level, in 0 <= s < 1 and not
            decreasing. An empty list is [0.999].
        clip_norm: C: the gradient of each of N ranks is clipped to a norm of C sqrt(N) before
            accumulation, an averaged gradient to C. None: no clipping.
        clip: "parameter": the norm of each parameter; "global": one norm of all that is compressed.
        masking: momentum factor masking: clear the velocity of sent elements.
        momentum_correction: apply momentum before the selection. False: the optimizer applies
            momentum and Nesterov to the exchanged gradients.
        decay_correction: the same for weight decay.
        select: the largest elements of each "parameter", or of the whole "model".
        min_count: parameters with fewer elements are sent uncompressed.
        k_rule: "round", "paddle" or "ceil": how the number of sent elements is rounded.
        value_dtype: dtype of transmitted values: "float32", or in compact packets also "bfloat16",
            "int8", "3bit", "2bit" or "1bit". The rounding error stays in the residual v.
        codec: "raw": 4 bytes for an index, and values of the parameter's own dtype, float32 or
            float64. "compact": both are encoded on the parameter's device, the host or CUDA, and
            the packets are sent through host memory after the last gradient of a step. "auto":
            "raw" for float32, unless `exchange` needs compact packets.
        exchange: "gather": all-gather of packets. "dense_masked": all-reduce of dense arrays of the
            selected elements. "sharded": each rank owns a shard, sums the packets for it and sends
            the largest sums on; the rest stays in its owner residual. The bytes received do not
            depend on the number of ranks. "hierarchical": the ranks of a host average gradients,
            and hosts exchange packets by "gather" or "sharded". "auto": the fewest bytes, counted
            by rank 0 for each level. "auto_time": the least time, from rank 0's measured link and
            codec speed; also "dense" until the first compressed step. "sharded" and "hierarchical"
            need compact packets; the automatic modes choose them only with these, and send "1bit"
            values above a density of 0.17 unless `value_dtype` is "float32".
        owner_k_factor: all owners of "sharded" together send this many times k elements: a larger
            factor leaves a smaller owner residual and makes the all-gather phase larger.
        scaler: the GradScaler or StaticLossScaler of the training, if any.
        fused: optimizer.step() applies packets to the parameters directly. Until then p.grad of a
            compressed parameter is this rank's own gradient, and None afterwards. Same bits for
            float32 and float64 where torch's SGD uses a fused multiply-add.
        track_age: record when each compressed element was last sent (4 bytes for each).

    Raises:
        Unsupported: another optimizer than SGD, sharded or not real floating parameters, or compact
            packets of parameters that are neither in host memory nor on CUDA.
        InvalidArgument: any other invalid argument.
    """

    def __init__(  # noqa: PLR0913 - all but the first have defaults
        self,
        optimizer: torch.optim.Optimizer,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        *,
        clip_norm: float | None = None,
        clip: str = "parameter",
        masking: bool = True,
        momentum_correction: bool = True,
        decay_correction: bool = True,
        select: str = "parameter",
        min_count: int = 16384,
        k_rule: str = "round",
        value_dtype: str = "float32",
        codec: str = "auto",
        exchange: str = "auto",
        owner_k_factor: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        fused: bool = False,
        track_age: bool = False,
    ) -> None:
        self._levels = check_ramp(rampup_begin_step, rampup_step, sparsity)
        self._begin, self._length = rampup_begin_step, rampup_step
        _one_of("clip", clip, ("parameter", "global"))
        _one_of("select", select, ("parameter", "model"))
        _one_of("k_rule", k_rule, K_RULES)
        _one_of("exchange", exchange, EXCHANGES)
        _one_of("codec", codec, ("auto", "raw", "compact"))
        _one_of("value_dtype", value_dtype, VALUE_DTYPES)
        compact = (
            codec == "compact"
            or value_dtype != "float32"
            or exchange in ("sharded", "hierarchical")
        )
        if codec == "raw" and compact:
            raise InvalidArgument(
                f"value_dtype={value_dtype!r} with exchange={exchange!r} needs compact packets: "
                'codec="raw" is for float32 and another exchange'
            )
        if clip_norm is not None and not clip_norm > 0:
            raise InvalidArgument(f"invalid clip_norm: got {clip_norm}, expected above 0, or None")
        if owner_k_factor < 1 or owner_k_factor != int(owner_k_factor):
            raise InvalidArgument(
                f"invalid owner_k_factor: got {owner_k_factor}, expected 1, 2, ..."
            )
        if fused and not (momentum_correction and decay_correction):
            raise InvalidArgument(
                "fused=True requires momentum_correction=True and decay_correction=True"
            )
        self._fused = fused
        self._clip_norm, self._together, self._masking = clip_norm, clip == "global", masking
        self._whole, self._owner_k_factor = select == "model", owner_k_factor
        self.scaler = scaler
        owned: tuple[str, ...] = ("momentum", "nesterov") if momentum_correction else ()
        owned += ("weight_decay",) if decay_correction else ()
        self._owned = AdoptedMomentum(optimizer, min_count, owned)
        has_owners = compact and exchange not in ("gather", "dense_masked")
        self.owner_residual: dict[ParameterState, Tensor] | None = {} if has_owners else None
        if compact:
            _check_codec_devices(self._compressed())
        code = value_dtype if compact else None
        self._held = DENSE  # the plan of the last step
        self._chooser = Chooser(exchange, self._levels, k_rule, self._whole, code, owner_k_factor)
        self._ages = Ages(self._compressed()) if track_age else None
        self._workspaces: dict[tuple[str, ...], Tensor] = {}
        self._pool: CommunicatorPool | None = None
        self._hosts: Hosts | None = None
        self.by_host: list[int] = []  # by rank: the host whose u and v it holds; []: each its own
        self._sent_bytes = 0
        self._detached = False
        self.buckets = Compressed(self)
        self.step_count = 0  # committed steps
        self.switched = False  # u of compressed parameters follows the formulas, not torch

    @property
    def memories(self) -> dict[Tensor, ParameterState]:
        """The state of each parameter."""
        return self._owned.memories

    @property
    def selects_whole(self) -> bool:
        """Whether k is for all parameters together: select="model"."""
        return self._whole

    def pool(self, group: Group | None = None) -> CommunicatorPool:
        """The communicators of the exchanges; created by the first call."""
        if self._pool is None:
            self._pool = CommunicatorPool(group, 1)
        return self._pool

    def hosts(self) -> Hosts:
        """The hosts of the pool. Collective if they must be created."""
        if self._hosts is None or self._hosts.broken:
            self._hosts = Hosts(self.pool().group)
        return self._hosts

    @property
    def exchanges(self) -> dict[int, str]:
        """The exchange of each level, as rank 0 chose it."""
        return self._chooser.exchanges

    def set_exchanges(self, exchanges: Mapping[int, str]) -> None:
        """Drops all plans; a level that is not in `exchanges` chooses again."""
        self._chooser.forget(exchanges)

    def exchange(self, named: Mapping[str, Tensor], pool: CommunicatorPool) -> Compressed:
        """Returns the receiver of DataParallel's buckets; `named`: the model's parameters."""
        self._pool = pool
        self._owned.rename(named)
        for memory in self.memories.values():
            hyper = memory.hyper
            if memory.name not in named and (hyper.momentum or hyper.weight_decay):
                raise Unsupported(
                    f"{memory.name!r} has a sparse gradient or is not in the model: with DGC it "
                    "must be in a parameter group without momentum and weight decay"
                )
        return self.buckets

    @property
    def level(self) -> int | None:
        """The sparsity level of the next step; None: dense."""
        return level_at(self.step_count, self._begin, self._length, len(self._levels))

    def begin(self, idle: bool = False) -> Step:
        """A new step. Collective at the first step of a level. `idle`: this rank has no data."""
        pool = self.pool()
        level = self.level
        scaler = self.scaler
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
        held = DENSE
        if level is not None:
            held = self._chooser.plan(level, self._compressed(), pool, not self.switched)
        if held.exchange != "dense" and not self.switched:
            self._switch()
        if held is not self._held:
            self._hold(held, pool)
        hosts = self.hosts() if held.exchange == "hierarchical" else None
        fused = self._fused and held.exchange in ("gather", "sharded", "hierarchical")
        clip = self._clip_norm, self._together
        packet_exchange = self._packet_exchange(held)
        plan = Plan(
            held.exchange, held.k, self._masking, *clip, scale, fused, packet_exchange, hosts
        )
        return Step(plan, self.memories, self._workspaces, pool, idle)

    def end(self, step: Step, ending: contextlib.ExitStack) -> bool:
        """Finishes and counts the step; False if all ranks skip it because of Inf or NaN under a
        loss scale. Step.finish describes `ending`."""
        if not step.finish(ending):
            self._owned.skipped()
            return False
        self.step_count += 1
        self._sent_bytes = step.sent_bytes
        self._owned.register_exchange(*(step.deferred() if self._fused else ()))
        if self._ages is not None:
            self._ages.sent(step.sent(), self.step_count, step.is_dense)
        return True

    def resume_after_shrink(self, before: Group, src: int) -> float:
        """Collective, after the pool shrank from the ranks of `before`.

        Survivors keep u and v, and take from rank `src` everything that must be the same. Returns
        an estimate of the norm of the lost ranks' residual: the mean residual of the survivors.
        """
        pool = self.pool()
        state.take_in_owner_residual(self, before)
        lost = before.size - pool.size
        if not _everywhere(bool(self.by_host), pool):
            state.to_ranks(self, before)
        if self.by_host:
            lost = max(self.by_host)
            self._hosts = None
            self.by_host = self.hosts().of_rank
            lost -= max(self.by_host)
            for memory in self._compressed():  # some may be in the middle of a step
                coalesced.bcast_list_(memory.tensors, 0, self.hosts().inside)
        self._chooser.forget()  # the bytes depend on the number of ranks
        self._held = DENSE
        self._owned.forget()
        word = torch.tensor([self.step_count, self.switched])
        collectives.broadcast(word, src, group=pool.group)
        self.step_count, self.switched = int(word[0]), bool(word[1])
        self.buckets.sync_from(src)
        squares = sum(
            float(m.v.double().square().sum()) for m in self._compressed() if m.v is not None
        )
        mean = collectives.all_reduce(
            torch.tensor([squares], dtype=torch.float64), "avg", group=pool.group
        )
        return math.sqrt(float(mean) * lost)

    def _compressed(self) -> list[ParameterState]:
        return [memory for memory in self.memories.values() if memory.v is not None]

    def _hold(self, held: Level, pool: CommunicatorPool) -> None:
        """Switches to the plan of another level."""
        self._held = held
        self._workspaces.clear()
        by_host = held.exchange == "hierarchical"
        if "sharded" not in (held.exchange, held.between) or by_host != bool(self.by_host):
            state.take_in_owner_residual(self, pool.group)  # these owners end
        if by_host and not self.by_host:
            state.to_hosts(self, self.hosts())
        elif self.by_host and not by_host:
            state.to_ranks(self, self.pool().group)

    def _packet_exchange(self, held: Level) -> PacketExchange | None:
        if held.value_dtype is None:
            return None
        if "sharded" in (held.exchange, held.between) and self.owner_residual is not None:
            return ShardedExchange(held.value_dtype, self.owner_residual, self._owner_k_factor)
        return AllGatherExchange(held.value_dtype)

    def _switch(self) -> None:
        """Converts torch's velocity of the dense phase to the u of the formulas."""
        for memory in self._compressed():
            if memory.hyper.nesterov:
                memory.u.mul_(memory.hyper.momentum)
        self.switched = True

    def _cancel_failed_pass(self, asked: str) -> None:
        """Cancels a failed backward pass: its unsent elements return to the residual (P3)."""
        if self.buckets.running and torch._C._current_graph_task_id() != -1:
            raise InvalidArgument(
                f"DGC.{asked}() cannot be called inside backward(), where a step is incomplete: "
                "call it before or after"
            )
        self.buckets.cancel()

    def detach(self) -> None:
        """Collective. Returns momentum and decay to the optimizer; DGC cannot be used afterwards.

        The optimizer's velocity becomes the mean of u over all ranks. The residual is dropped. If
        that matters, train dense or at a low sparsity for some steps before.

        Raises:
            InvalidArgument: nothing changes. On every rank: the gradients of a backward pass wait
                for the optimizer's step(). On one rank: it called inside backward().
        """
        if self._detached:
            return
        self._cancel_failed_pass("detach")
        # After join() a rank without data still has a waiting step.
        if _everywhere(self._owned.waiting, self.pool()):
            raise InvalidArgument(
                "DGC.detach() between backward() and the optimizer's step(): call step() before, "
                "or drop the gradients with zero_grad()"
            )
        self._detached = True
        self._owned.forget()
        state.to_ranks(self, self.pool().group)
        memories = list(self.memories.values())
        velocities = [memory.u for memory in memories]
        if self.switched:
            velocities = coalesced.average(velocities, self.pool().group)
            for memory, velocity in zip(memories, velocities, strict=True):
                if memory.v is not None and memory.hyper.nesterov and memory.hyper.momentum:
                    velocity.div_(memory.hyper.momentum)  # u follows the formulas
        self._owned.release(velocities)

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step.

        Returns:
            step: committed steps. level: sparsity, None if dense. k: elements that each rank sends.
            sent_bytes: bytes that this rank gave to exchanges in the step. dense_bytes: the same
            without compression. exchange: "dense", "gather", "dense_masked", "sharded" or
            "hierarchical" (then the first rank of a host counts its packets). value_dtype: of
            compact packets, None if there are none. exchange_costs: by exchange, the bytes counted
            by "auto", or the seconds beyond the backward pass estimated by "auto_time". age:
            {"mean", "max"} in steps since this rank sent each compressed element, None without
            track_age.
        """
        level = level_at(max(self.step_count - 1, 0), self._begin, self._length, len(self._levels))
        held = DENSE if level is None else self._chooser.planned(level)
        counted = [memory.parameter for memory in self.memories.values()]
        return {
            "step": self.step_count,
            "level": None if level is None else self._levels[level],
            "k": held.k if isinstance(held.k, int) else sum(held.k.values()),
            "sent_bytes": self._sent_bytes,
            "dense_bytes": sum(p.numel() * p.element_size() for p in counted),
            "exchange": held.exchange,
            "value_dtype": held.value_dtype,
            "exchange_costs": dict(held.exchange_costs),
            "age": None if self._ages is None else self._ages.summary(self.step_count),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state as plain values and tensors; u and v differ by rank, so each saves its
        own. It loads at the same number of ranks, bit for bit. A failed backward pass is not in it.

        Raises:
            InvalidArgument: inside backward().
        """
        self._cancel_failed_pass("state_dict")
        return state.own(self, self.pool().group)

    def gather_state(self, dst: int = 0) -> dict[str, Any] | None:
        """Collective. Gathers the states of all ranks; the result loads at any number of ranks.

        Args:
            dst: the rank that receives the states.

        Returns:
            Plain values and tensors on rank `dst`, None on the others.

        Raises:
            InvalidArgument: inside backward().
        """
        self._cancel_failed_pass("gather_state")
        return state.gathered(self, self.pool().group, dst)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores a state. Gradients of an earlier backward pass are dropped.

        At another number of ranks each rank takes the mean of u and of v over the saved ranks, so
        the mean residual stays the same.

        Args:
            saved: of state_dict() on this rank, or of gather_state() on any rank.

        Raises:
            InvalidArgument: the state is of another version or model, or it is one rank's state of
                another rank or number of ranks, or the call is inside backward().
        """
        self._cancel_failed_pass("load_state_dict")
        state.load(self, saved, self.pool().group)
        self._held = DENSE
        self._owned.forget()


class Compressed:
    """Receives the buckets of one backward pass; pycomm.parallel.exchange has the contract."""

    def __init__(self, dgc: DGC) -> None:
        self.idle = False
        self._dgc = dgc
        self._step: Step | None = None
        self._failed: Step | None = None  # the last one, if it failed at its end

    @property
    def running(self) -> bool:
        """Whether a pass is in progress."""
        return self._step is not None

    def compresses(self, parameter: Tensor) -> bool:
        """Whether this parameter is compressed."""
        memory = self._dgc.memories.get(parameter)
        return memory is not None and memory.v is not None

    def add(self, flat: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Adds a bucket whose gradients are complete."""
        if self._step is None:
            self._step = self._dgc.begin(self.idle)
        self._step.add(flat, parameters, gradients)

    def finish(self) -> None:
        """Ends the step."""
        step, self._step = self._step, None
        self._failed = step
        with contextlib.ExitStack() as ending:
            if step is not None:
                self._dgc.end(step, ending)
            self._failed = None

    def cancel(self) -> None:
        """Rolls the step back."""
        step, self._step = self._step, None
        if step is not None:
            step.cancel()

    def resume_after_shrink(self, before: Group, counted: bool, src: int) -> float:
        """Rolls back or commits the failed step; see DGC.resume_after_shrink."""
        step = self._step or self._failed
        self._step = self._failed = None
        if step is not None:
            step.cancel()
            if counted:
                step.commit_sent()
        return self._dgc.resume_after_shrink(before, src)

    def sync_from(self, src: int) -> None:
        """Takes the loss scale and the velocity of uncompressed parameters from rank `src`."""
        dgc, group = self._dgc, self._dgc.pool().group
        dense = [m.u for m in dgc.memories.values() if m.v is None or not dgc.switched]
        coalesced.bcast_list_(dense, src, group)
        if dgc.scaler is not None:
            dgc.scaler.load_state_dict(coalesced.bcast_value(dgc.scaler.state_dict(), src, group))


def _everywhere(here: bool, pool: CommunicatorPool) -> bool:
    """Whether `here` is true on all ranks."""
    word = torch.tensor([int(here)])
    collectives.all_reduce(word, "min", group=pool.group)
    return bool(word.item())


def _one_of(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise InvalidArgument(f"invalid {name}: got {given!r}, expected one of {', '.join(known)}")


def _check_codec_devices(memories: Sequence[ParameterState]) -> None:
    for memory in memories:
        if not (memory.u.is_cpu or arrays.on_gpu(memory.u)):
            raise Unsupported(
                "compact packets need parameters in host memory or on CUDA devices, and "
                f'{memory.name!r} is on {memory.u.device}: use codec="raw" with '
                'value_dtype="float32"'
            )
