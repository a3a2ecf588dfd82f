"""DGC: settings, what holds at each step, and the memories. Called by users as pycomm.DGC.

The transaction of a step is transaction.py; how states are saved is state.py.
"""

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
from pycomm.compress.packet_exchange import AllGatherExchange
from pycomm.compress.parameter_state import AdoptedMomentum, ParameterState
from pycomm.compress.schedule import K_RULES, VALUE_DTYPES, check_ramp, level_at
from pycomm.compress.sharded import ShardedExchange
from pycomm.compress.staleness import Ages
from pycomm.compress.transaction import PacketExchange, Plan, Step
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

__all__ = ["DGC", "Compressed"]


class DGC:
    """Deep gradient compression for a torch.optim.SGD (Lin et al., arXiv 1712.01887).

        dgc = pycomm.DGC(optimizer, sparsity=[0.999])
        model = pycomm.DataParallel(model, compression=dgc)      # or, around torch's own:
        ddp.register_comm_hook(dgc, pycomm.dgc_hook)

    From here on DGC owns momentum, weight decay and Nesterov of all the optimizer's parameters, as
    its groups show them; the optimizer does `p -= lr * p.grad`. docs/compression.md has formulas.

    Args:
        optimizer: a torch.optim.SGD without dampening and maximize.
        rampup_begin_step: the first step that compresses, counted from 0; before it all is dense.
        rampup_step: how many steps the levels of sparsity share evenly; the last one stays.
        sparsity: the share that is not sent, level by level, not falling. An empty list is [0.999].
        clip_norm: C: this rank's gradient is scaled to a norm of at most C sqrt(N) before it is
            taken in; what is averaged, to C. None: no clipping.
        clip: the norm of each "parameter", or one "global" norm of all that is compressed.
        masking: forget the velocity of what was sent.
        momentum_correction: take the momentum in before the selection; False leaves momentum and
            Nesterov to the optimizer, which sees what has arrived.
        decay_correction: the same of weight decay.
        select: the largest of each "parameter", or of the whole "model".
        min_count: parameters with fewer elements travel whole.
        k_rule: "round", "paddle" or "ceil": how many elements a share is.
        value_dtype: of values on the way: "float32", or in compact packets also "bfloat16", "int8",
            "3bit", "2bit" or "1bit". What rounding loses stays in v.
        codec: "raw" packets have 4 bytes for an index, and values of the parameter's own dtype,
            float32 or float64. "compact" ones code both, in host memory, and all of a step travels
            behind its last gradient. "auto": raw for float32, else compact.
        exchange: "gather" packets, or sum them "dense_masked" as dense arrays. "sharded": compact
            packets go to owners of shares, who send on the largest sums and owe the rest; the bytes
            that a rank receives do not grow with the number of ranks. "hierarchical": ranks of a
            host sum their gradients, and hosts exchange compact packets as ranks do in "gather" or
            "sharded". "auto": which has the fewest bytes, counted by rank 0 for each level;
            "auto_time": which takes the fewest seconds, of rank 0's link and processor, or "dense"
            as long as nothing was compressed. Both take "sharded" and "hierarchical" only where
            packets are compact, and code values as "1bit" above a density of 0.17 if they are
            rounded at all.
        owner_k_factor: how many times k elements all owners of "sharded" together send on: more of
            them owe less, and the way back takes as many times the bytes.
        scaler: the GradScaler or StaticLossScaler of the training, if there is one.
        fused: optimizer.step() takes what was gathered off the parameters there and then, without
            a pass over all gradients; p.grad of what is compressed is this rank's own until then,
            and None afterwards. The same bits for float32 and float64, where torch's SGD multiplies
            and adds at once.
        track_age: keeps, for each element that is compressed, when it was last sent (4 bytes).

    Raises:
        Unsupported: another optimizer, shards, compact packets of a GPU.
        InvalidArgument: anything else that makes no sense.
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
                f"value_dtype={value_dtype!r} with exchange={exchange!r} takes compact packets: "
                'codec="raw" is for float32 and another exchange'
            )
        if clip_norm is not None and not clip_norm > 0:
            raise InvalidArgument(f"clip_norm={clip_norm}: above 0, or None")
        if owner_k_factor < 1 or owner_k_factor != int(owner_k_factor):
            raise InvalidArgument(f"owner_k_factor={owner_k_factor}: a whole number, at least 1")
        if fused and not (momentum_correction and decay_correction):
            raise InvalidArgument(
                "fused=True leaves nothing to the optimizer but its rate: with momentum_correction "
                "and decay_correction only"
            )
        self._fused = fused
        self._clip_norm, self._together, self._masking = clip_norm, clip == "global", masking
        self._whole, self._owner_k_factor = select == "model", owner_k_factor
        self.scaler = scaler
        owned: tuple[str, ...] = ("momentum", "nesterov") if momentum_correction else ()
        owned += ("weight_decay",) if decay_correction else ()
        self._owned = AdoptedMomentum(optimizer, min_count, owned)
        splits = compact and exchange not in ("gather", "dense_masked")
        self.owner_residual: dict[ParameterState, Tensor] | None = (
            {} if splits else None
        )  # as an owner, sharded.py
        if compact:
            _can_be_coded(self._compressed())
        code = value_dtype if compact else None
        self._held = DENSE  # what the last step had
        self._chooser = Chooser(exchange, self._levels, k_rule, self._whole, code, owner_k_factor)
        self._ages = Ages(self._compressed()) if track_age else None
        self._rooms: dict[tuple[str, ...], Tensor] = {}
        self._pool: CommunicatorPool | None = None
        self._hosts: Hosts | None = None
        self.by_host: list[int] = []  # by rank: whose u and v it holds; none: each its own
        self._sent_bytes = 0
        self._detached = False
        self.buckets = Compressed(self)
        self.step_count = 0  # steps that were committed
        self.switched = False  # u of what is compressed is that of the formulas, not torch's

    @property
    def memories(self) -> dict[Tensor, ParameterState]:
        """By parameter."""
        return self._owned.memories

    @property
    def selects_whole(self) -> bool:
        """Whether k is of all together: select="model"."""
        return self._whole

    def pool(self, group: Group | None = None) -> CommunicatorPool:
        """The communicators that packets use; made at the first call."""
        if self._pool is None:
            self._pool = CommunicatorPool(group, 1)
        return self._pool

    def hosts(self) -> Hosts:
        """Those of the pool; collective when they are first asked for."""
        if self._hosts is None or self._hosts.broken:
            self._hosts = Hosts(self.pool().group)
        return self._hosts

    @property
    def exchanges(self) -> dict[int, str]:
        """The exchange by level, as rank 0 has said."""
        return self._chooser.exchanges

    def set_exchanges(self, exchanges: Mapping[int, str]) -> None:
        """Levels are planned anew, where nothing was `chosen` for them."""
        self._chooser.forget(exchanges)

    def exchange(self, named: Mapping[str, Tensor], pool: CommunicatorPool) -> Compressed:
        """For DataParallel: what takes its buckets."""
        self._pool = pool
        self._owned.rename(named)
        for memory in self.memories.values():
            hyper = memory.hyper
            if memory.name not in named and (hyper.momentum or hyper.weight_decay):
                raise Unsupported(
                    f"{memory.name!r} has a sparse gradient or is no parameter of the model: with "
                    "DGC it must be in a parameter group without momentum and weight decay"
                )
        return self.buckets

    @property
    def level(self) -> int | None:
        """The level of sparsity of the next step; None: dense."""
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
        return Step(plan, self.memories, self._rooms, pool, idle)

    def end(self, step: Step, ending: contextlib.ExitStack) -> bool:
        """Finishes the step and counts it; False where a loss scale lets all ranks skip it. See
        Step.finish for `ending`."""
        if not step.finish(ending):
            self._owned.skipped()
            return False
        self.step_count += 1
        self._sent_bytes = step.sent_bytes
        self._owned.arrived(*(step.deferred() if self._fused else ()))
        if self._ages is not None:
            self._ages.sent(step.sent(), self.step_count, step.is_dense)
        return True

    def resume_after_shrink(self, before: Group, src: int) -> float:
        """Collective, when the pool has shrunk from the ranks of `before` to those of today.

        u and v of the survivors stay; of what has to be the same all take rank `src`'s. Gives the
        norm of what the lost ranks owed, if they owed as much as the others in the mean.
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
            for memory in self._compressed():  # half of a step may have come to some of them
                coalesced.bcast_list_(memory.tensors, 0, self.hosts().inside)
        self._chooser.forget()  # another number of ranks counts other bytes
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
        """From now on another level's plan."""
        self._held = held
        self._rooms.clear()
        by_host = held.exchange == "hierarchical"
        if "sharded" not in (held.exchange, held.between) or by_host != bool(self.by_host):
            state.take_in_owner_residual(self, pool.group)  # nobody asks these owners any more
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
        """From the velocity of the dense phase, torch's, to the u of the formulas."""
        for memory in self._compressed():
            if memory.hyper.nesterov:
                memory.u.mul_(memory.hyper.momentum)
        self.switched = True

    def _give_up_broken_pass(self, asked: str) -> None:
        """What a backward pass that has raised was about to send counts as owed again (P3)."""
        if self.buckets.running and torch._C._current_graph_task_id() != -1:
            raise InvalidArgument(
                f"DGC.{asked}() inside backward(): half a step is on its way there; call it before "
                "or behind"
            )
        self.buckets.cancel()

    def detach(self) -> None:
        """Collective. Gives momentum and decay back to the optimizer; DGC is of no use after it.

        Its velocity is the mean of u over all ranks. What is still owed is forgotten: train dense,
        or at a low sparsity, for a while before, where that matters.

        Raises:
            InvalidArgument: with nothing changed: on every rank where what backward() has brought
                waits for the optimizer's step(), or on one inside backward().
        """
        if self._detached:
            return
        self._give_up_broken_pass("detach")
        # A rank that only took part in the last steps of others, in join(), has one left over.
        if _everywhere(self._owned.waiting, self.pool()):
            raise InvalidArgument(
                "DGC.detach() between backward() and the optimizer's step(): take the step before, "
                "or give it up with zero_grad()"
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
                    velocity.div_(memory.hyper.momentum)  # u is that of the formulas
        self._owned.give_back(velocities)

    def stats(self) -> dict[str, Any]:
        """Of the last step.

        Returns:
            step: steps so far; level: sparsity, None where dense; k: elements that each rank sends;
            sent_bytes: what this rank gave to exchanges in the step; dense_bytes: what it would
            give without compression; exchange: "dense", "gather", "dense_masked", "sharded" or
            "hierarchical", where the first rank of a host gives its packets; value_dtype: of
            compact packets, None where there are none; exchange_costs: the bytes that "auto" has
            counted, or the seconds that "auto_time" expects beyond the gradients, by exchange; age:
            {"mean", "max"} of the steps since this rank has sent an element that is compressed,
            None without track_age.
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
        """This rank's: u and v differ by rank, so every rank saves its own. Plain values and
        tensors; loads at the same number of ranks, bit for bit. A backward pass that has raised
        counts for nothing.

        Raises:
            InvalidArgument: inside backward().
        """
        self._give_up_broken_pass("state_dict")
        return state.own(self, self.pool().group)

    def gather_state(self, dst: int = 0) -> dict[str, Any] | None:
        """Collective. The states of all ranks on rank `dst`, None elsewhere; loads anywhere.

        Raises:
            InvalidArgument: inside backward().
        """
        self._give_up_broken_pass("gather_state")
        return state.gathered(self, self.pool().group, dst)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on where `saved` was taken: this rank's own state, or that of gather_state.

        Gradients of a backward pass before it are dropped: what they brought was another state's.

        With another number of ranks what was owed is kept: each rank takes the mean of v, whose sum
        over ranks, divided by their number, is then what it was; u is the mean too.

        Raises:
            InvalidArgument: it is of another model, or one rank's where there were others; or
                inside backward().
        """
        self._give_up_broken_pass("load_state_dict")
        state.load(self, saved, self.pool().group)
        self._held = DENSE
        self._owned.forget()


class Compressed:
    """Takes the buckets of one backward pass; pycomm.parallel.exchange has the contract."""

    def __init__(self, dgc: DGC) -> None:
        self.idle = False
        self._dgc = dgc
        self._step: Step | None = None
        self._failed: Step | None = None  # the last one, if it failed at its end

    @property
    def running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._step is not None

    def compresses(self, parameter: Tensor) -> bool:
        """Whether it is large enough."""
        memory = self._dgc.memories.get(parameter)
        return memory is not None and memory.v is not None

    def add(self, flat: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """All gradients of a bucket are there."""
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
        """Rolls back."""
        step, self._step = self._step, None
        if step is not None:
            step.cancel()

    def resume_after_shrink(self, before: Group, counted: bool, src: int) -> float:
        """See DGC.go_on."""
        step = self._step or self._failed
        self._step = self._failed = None
        if step is not None:
            step.cancel()
            if counted:
                step.commit_sent()
        return self._dgc.resume_after_shrink(before, src)

    def sync_from(self, src: int) -> None:
        """The velocity of what travels dense, to which a rank without data has added the decay of
        older parameters, and the loss scale."""
        dgc, group = self._dgc, self._dgc.pool().group
        dense = [m.u for m in dgc.memories.values() if m.v is None or not dgc.switched]
        coalesced.bcast_list_(dense, src, group)
        if dgc.scaler is not None:
            dgc.scaler.load_state_dict(coalesced.bcast_value(dgc.scaler.state_dict(), src, group))


def _everywhere(here: bool, pool: CommunicatorPool) -> bool:
    """Whether it is so on all ranks."""
    word = torch.tensor([int(here)])
    collectives.all_reduce(word, "min", group=pool.group)
    return bool(word.item())


def _one_of(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise InvalidArgument(f"{name}={given!r}: one of {', '.join(known)}")


def _can_be_coded(memories: Sequence[ParameterState]) -> None:
    for memory in memories:
        if not (memory.u.is_cpu or arrays.on_gpu(memory.u)):
            raise Unsupported(
                "compact packets are written in host memory and on CUDA devices, and "
                f'{memory.name!r} lies on {memory.u.device}: use codec="raw" with '
                'value_dtype="float32"'
            )
