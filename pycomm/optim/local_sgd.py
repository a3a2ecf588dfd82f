"""LocalSGD: ranks step independently and average their parameters periodically.

    step      1   2   3   4   5   6   7   8   9  10  11      begin_step 3, k_steps 4
    average   x   x   x               x               x      rule "paddle"
                              (4)             (8)            rule "torch" averages here instead

The averages depend only on the number of steps, never on data, so no rank waits for one that
skipped a step.
Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm import collectives
from pycomm._arguments import flag, function, integer, one_of, positive
from pycomm._quantize import Quantize
from pycomm._training import coalesced
from pycomm._training.arguments import check_optimizer
from pycomm._training.communicators import tag_of
from pycomm._training.shards import as_shard, check_replicas, local_shard
from pycomm.compress.dense import clip_gradients
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.topk import TopK
from pycomm.compress.updates import UpdateCompressor
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group
from pycomm.optim.compression import (
    check_compression,
    check_model,
    multiply_factors,
    update_compressor,
    warn_about_momentum,
    without_decay,
)
from pycomm.optim.local_state import LocalState
from pycomm.optim.loss_scaler import refuse_unscaled
from pycomm.optim.muon import MuonMatrices
from pycomm.optim.shards import ModelShards


class LocalSGD(LocalState):
    """Steps a torch optimizer and periodically averages parameters (Lin et al., arXiv 1808.07217).

        local = pycomm.LocalSGD(model, optimizer, k_steps=4, begin_step=100)
        loss.backward();  local.step()              # instead of optimizer.step()
        scaler.step(local);  scaler.update()        # the same with a loss scale

    The average is p = snapshot - mean(snapshot - p), where the snapshot is the last average, equal
    on all ranks. Its result has the same bits on all ranks. The constructor is collective: all
    ranks take rank 0's parameters and buffers. With an optimizer other than SGD, or rule "torch",
    ranks average gradients instead of parameters while step <= begin_step, because an average of
    Adam's parameters is not a step of Adam. After step begin_step they take rank 0's parameters
    once, as a processor or library may round one rank's step differently.

    With `compression`, ranks exchange the largest part of snapshot - p instead (TopK), or all of it
    at a few bits for each value (Quantize). They keep the rest in a residual: error feedback. Every
    average is one of updates then, from the first step on.

    Args:
        model: the module itself, not a wrapper that averages gradients, such as DataParallel.
        optimizer: any torch optimizer over the model's parameters.
        k_steps: steps between two averages after begin_step; at least 1.
        begin_step: up to this step, counted from 1, ranks average every step; at least 1.
        rule: "paddle" averages k_steps after the last average; "torch" after steps begin_step + 1,
            begin_step + 1 + k_steps, ...
        momentum: "local", or "averaged" with the parameters (torch.optim.SGD only).
        buffers: also average floating-point buffers, as those of batch norm.
        outer: a torch optimizer over the same parameters that steps after each average beyond
            begin_step, with gradient mean(snapshot - p) (DiLoCo, arXiv 2311.08105).
        group: the process group; None: the default group.
        compression: a TopK or Quantize, which compresses the updates (k_steps > 1: SparseLoCo,
            arXiv 2508.15706). Decoupled weight decay (AdamW) is applied to the snapshot on all
            ranks, so learning rate and weight decay must be equal on all ranks. Needs rule "paddle"
            and momentum "local".
        clip_norm: C: the gradient of each of N ranks is clipped to a norm of C sqrt(N), all
            parameters together; averaged gradients to C. None: no clipping.
        muon: a torch.optim.Muon over some matrices; `optimizer` has all other parameters. The
            matrices' gradients are scaled and compressed; Muon steps with their mean, on all ranks
            alike. Needs `compression`, k_steps=1, no outer, and float32 parameters.
        replicas: for a model of fully_shard(model, mesh=mesh["shard"]) (HSDP): the dimension of the
            replicas in the same mesh, as mesh["replicate"]. The ranks with the same shard exchange
            its updates, in place of the all-reduce of gradients. N is the number of replicas then,
            and `rank` and `size` of a state count them. Needs `compression`, no group and no muon.
            Collective over the default group, which has all ranks of the mesh.

    Attributes:
        step_count: steps so far, including skipped ones.
        last_sync: the step after which parameters were last averaged.
        k_steps: the current interval in steps.

    Raises:
        InvalidArgument: k_steps or begin_step below 1, an unknown rule or momentum, averaged
            momentum without torch.optim.SGD, a model that averages gradients itself, arguments
            that contradict each other, or a model too small for the ratio of the compression.
        Unsupported: parameters that the compression cannot process: of another dtype than float32,
            bfloat16 and float16, on other devices than the CPU and GPUs, or sharded without
            `replicas`.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() always calls step() and passes found_inf

    def __init__(  # noqa: PLR0913 - all but the first two have defaults
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        k_steps: int = 1,
        begin_step: int = 1,
        rule: str = "paddle",
        momentum: str = "local",
        buffers: bool = True,
        outer: torch.optim.Optimizer | None = None,
        group: Group | None = None,
        *,
        compression: TopK | Quantize | None = None,
        clip_norm: float | None = None,
        muon: torch.optim.Optimizer | None = None,
        replicas: DeviceMesh | None = None,
    ) -> None:
        for name, one in {"optimizer": optimizer, "outer": outer, "muon": muon}.items():
            if one is not None or name == "optimizer":
                check_optimizer(name, one)
        check_model(model, replicas)
        k_steps = integer("k_steps", k_steps, 1)
        begin_step = integer("begin_step", begin_step, 1)
        one_of("rule", rule, ("paddle", "torch"))
        one_of("momentum", momentum, ("local", "averaged"))
        buffers = flag("buffers", buffers)
        if momentum == "averaged" and not isinstance(optimizer, torch.optim.SGD):
            raise InvalidArgument(
                f'momentum="averaged": got {type(optimizer).__name__}, expected torch.optim.SGD'
            )
        if compression is not None:
            check_compression(compression, rule, momentum)
        if muon is not None and (compression is None or k_steps != 1 or outer is not None):
            raise InvalidArgument("LocalSGD: muon needs compression, k_steps=1 and no outer")
        if clip_norm is not None:
            positive("clip_norm", clip_norm, "None")
        shards = None
        if replicas is not None:
            check_replicas("LocalSGD", replicas)
            if compression is None or group is not None or muon is not None:
                raise InvalidArgument(
                    "LocalSGD: replicas needs compression, no group and no muon: the mesh has the "
                    "groups, and Muon needs whole matrices"
                )
            shards = ModelShards(model, replicas)
        group = chosen(group) if shards is None else shards.group
        super().__init__(model, optimizer, outer, k_steps, group, shards)
        self._begin, self._rule = begin_step, rule
        self._average_momentum = momentum == "averaged"
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if buffers else []
        self._clip_norm = clip_norm
        if compression is not None:
            with self._agreement() as agree:
                self._compressor = update_compressor(
                    compression, self._parameters, self._snapshot, self._group
                )
                agree()
            warn_about_momentum(optimizer, self._compressor.ratio)
        if muon is not None:
            self._muon = MuonMatrices(muon, optimizer, self._parameters)

    def _averages_gradients(self, step: int) -> bool:
        sgd = isinstance(self.optimizer, torch.optim.SGD)
        first = self._rule == "torch" or not (sgd or self._compressor is not None)
        return first and step <= self._begin

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' parameter groups, which GradScaler reads."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer] if self._muon is None else [self.optimizer, self._muon.optimizer]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls zero_grad() of the optimizers.

        Raises:
            InvalidArgument: `set_to_none` is neither True nor False.
        """
        set_to_none = flag("set_to_none", set_to_none)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of this rank; averages if this step is due.

        Args:
            closure: recomputes the loss, as for the optimizer's step().

        Returns:
            What the optimizer's step() returns, None if the step was skipped (Inf or NaN under a
            GradScaler).

        Raises:
            InvalidArgument: `closure` is no function.
            PeerLost, Timeout, Mismatch: errors of the average; see shrink() to continue.
        """
        if closure is not None:
            function("closure", closure, "a function, or None")
        result = self._local_step(closure)
        self._average_if_due()
        return result

    def _average_if_due(self) -> bool:
        """Whether this step was due; all ranks may have skipped it."""
        skipped = self._compressor is not None and self._compressor.skipped
        if due := self.is_due(self.step_count) and not skipped:
            self.average()
        return due

    def is_due(self, step: int) -> bool:
        """Whether parameters are averaged after a step.

        Args:
            step: the number of the step, counted from 1; must be after `last_sync`.

        Returns:
            True if the ranks average after it, with the current k_steps.

        Raises:
            InvalidArgument: `step` is no integer.
        """
        step = integer("step", step)
        if self._averages_gradients(step):
            return False
        if self._rule == "torch":
            return (step - 1 - self._begin) % self.k_steps == 0
        return step <= self._begin or step - self.last_sync >= self.k_steps

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        """The optimizer's step, skipped for Inf or NaN; step_count always increases."""
        self._membership.check("LocalSGD")
        self._model.check()
        self._take_loaded()
        self.step_count += 1
        skip = False
        compressor = self._compressor
        together = compressor is not None and (self.k_steps == 1 or self.step_count <= self._begin)
        scale = getattr(self, "grad_scale", None)  # set by GradScaler.step()
        if scale is not None:
            refuse_unscaled(self._optimizers)
            for gradient in self._gradients():
                gradient.mul_(1.0 / scale)
        averaged = self._averages_gradients(self.step_count)
        if averaged:
            self._average_gradients()
            if hasattr(self, "found_inf"):  # of this rank only; the averages are equal on all ranks
                skip = not all(bool(gradient.isfinite().all()) for gradient in self._gradients())
        elif hasattr(self, "found_inf"):
            word = torch.tensor([float(self.found_inf)])  # of all shards: torch takes the maximum
            if together:
                collectives.all_reduce(word, "max", group=self._group)
            skip = bool(word)
        result: float | None = None
        if not skip:
            self._clip(1.0 if averaged else math.sqrt(self._group.size))
            outside = without_decay(self.optimizer) if compressor is not None else None
            with outside or contextlib.nullcontext():
                result = self.optimizer.step(closure)
            if self._muon is not None:
                self._muon.local_step()
            self._note_use()
        if compressor is not None:
            compressor.skipped = together and skip
            if not compressor.skipped:
                multiply_factors(compressor.decay, self.optimizer, self._parameters)
        if averaged:
            if self.step_count == self._begin:  # equal gradients need not give equal bits
                coalesced.bcast_list_(self._parameters, 0, self._group)
            self._take_snapshot()
        return result

    def _take_loaded(self) -> None:
        """Collective, if weights were loaded: these are the snapshot. Without compression and outer
        optimizer the next average is that of the parameters anyway."""
        loaded, self._model.loaded = self._model.loaded, False
        if not loaded or (self._compressor is None and self.outer is None):
            return
        check = 0
        for p, s in zip(self._parameters, self._snapshot, strict=True):
            s.copy_(local_shard(p.detach()))
            check = zlib.crc32(s.reshape(-1).cpu().view(torch.uint8).numpy(), check)
        words = collectives.all_gather(torch.tensor([check]), group=self._group)
        if len(set(words.flatten().tolist())) > 1:
            raise Mismatch(
                "LocalSGD: ranks loaded different weights into the model: load the same on all"
            )

    def _note_use(self) -> None:
        """Notes which parameters have a gradient on this rank, in a step that is not skipped."""
        for place, p in enumerate(self._parameters):
            self._used[place] |= p.grad is not None

    def _clip(self, factor: float) -> None:
        if self._clip_norm is not None:
            whole = float if self._shards is None else self._shards.norm
            clip_gradients(self._gradients(), self._clip_norm * factor, True, whole)

    def _gradients(self) -> list[Tensor]:
        """Those of this rank; of sharded parameters, of its shards."""
        return [local_shard(p.grad) for p in self._parameters if p.grad is not None]

    def _agreement(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """That of ModelShards; without shards its call does nothing."""
        if self._shards is None:
            return contextlib.nullcontext(lambda: None)
        return self._shards.agreement()

    def _average_gradients(self) -> None:
        self._note_use()
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in mine]
        *means, used = self._averaged([*dense, self._use_of(dense[0])])
        for p, mean, one in zip(self._parameters, means, used.tolist(), strict=True):
            p.grad = mean if one > 0 else None

    def _averaged(self, tensors: list[Tensor]) -> list[Tensor]:
        """Collective. The means over the ranks, which must be in the same step."""
        return coalesced.average(tensors, self._group, tag_of(self.step_count))

    def _use_of(self, like: Tensor) -> Tensor:
        """[parameters] 1 for each parameter with a gradient on this rank since the last average."""
        return torch.tensor(self._used, dtype=like.dtype, device=like.device)

    def average(self) -> None:
        """Collective. Averages now, due or not: for example before evaluation or a checkpoint.

        Parameters, momentum and buffers use one call per dtype; nothing changes if it fails.

        Raises:
            PeerLost, Timeout, Mismatch: errors of the exchange.
        """
        if self._compressor is not None:
            stepped = self.last_sync < self.step_count and not self._compressor.skipped
            if self._muon is None or stepped:  # Muon must not step without new gradients
                self._average_compressed(self._compressor)
            return
        others = [*self._momenta(), *self._buffers]
        deltas = [s - p.detach() for s, p in zip(self._snapshot, self._parameters, strict=True)]
        *means, used = self._averaged([*deltas, *others, self._use_of(deltas[0])])
        for other, mean in zip(others, means[len(deltas) :], strict=True):
            other.copy_(mean)
        if self.outer is not None and self.step_count > self._begin:
            self._step_outer(means[: len(deltas)], [one > 0 for one in used.tolist()])
        else:
            for p, s, mean in zip(self._parameters, self._snapshot, means, strict=False):
                p.data.copy_(s - mean)
        self._take_snapshot()

    def _average_compressed(self, compressor: UpdateCompressor[Any]) -> None:
        """The same with compressed updates. If it fails, the parameters are the snapshot, and the
        updates are in the residual."""
        compressor.used = self._used
        compressor.settings = [] if self._muon is None else self._muon.settings
        with contextlib.ExitStack() as ending:
            with self._agreement() as agree, compressor.exchange(self.step_count) as received:
                buffers = self._averaged(self._buffers)
                agree()
                ending.enter_context(defer_sigint())
            for buffer, mean in zip(self._buffers, buffers, strict=True):
                buffer.copy_(mean)
            if self._muon is not None:
                self._muon.step(self._snapshot, compressor.means(received), compressor.unused)
                compressor.commit_outer()
            elif self.outer is not None and self.step_count > self._begin:
                used = [i not in compressor.unused for i in range(len(self._parameters))]
                self._step_outer(compressor.means(received), used)
                compressor.commit_outer()
            else:
                compressor.commit(received)
            self.last_sync, self._used = self.step_count, [False] * len(self._used)

    def _take_snapshot(self) -> None:
        """Stores the parameters, which are equal on all ranks."""
        for s, p in zip(self._snapshot, self._parameters, strict=True):
            s.copy_(p.detach())
        self.last_sync, self._used = self.step_count, [False] * len(self._used)

    def _step_outer(self, deltas: list[Tensor], used: list[bool]) -> None:
        """The outer optimizer's step from the snapshot, with the mean change as gradient. What no
        rank used keeps its value."""
        assert self.outer is not None
        gradients = [p.grad for p in self._parameters]
        for p, s, delta, one in zip(self._parameters, self._snapshot, deltas, used, strict=True):
            local_shard(p).detach().copy_(s)
            p.grad = as_shard(delta, p) if one or bool(delta.any()) else None
        self.outer.step()
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient

    def _momenta(self) -> list[Tensor]:
        """The optimizer's velocities; zeros if a skipped first step created none."""
        if not self._average_momentum:
            return []
        found = []
        for group in self.optimizer.param_groups:
            for p in group["params"] if group["momentum"] else ():
                state = self.optimizer.state[p]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(p)
                found.append(state["momentum_buffer"])
        return found

    def stats(self) -> dict[str, Any]:
        """Numbers of the last average, on this rank.

        Returns:
            step: the step count. sent_bytes: with compression, bytes that this rank sent, as coded,
            else 0. dense_bytes: 4 for each parameter of this rank. groups: with compression, groups
            that each rank sends, else 0. exchange, exchange_costs: with compression, as in
            QuantizedGradients.stats.
        """
        dense = 4 * sum(s.numel() for s in self._snapshot)
        one = self._compressor
        return {
            "step": self.step_count,
            "sent_bytes": 0 if one is None else one.sent_bytes,
            "dense_bytes": dense,
            "groups": 0 if one is None else one.groups,
            **({} if one is None else one.described_exchange()),
        }
