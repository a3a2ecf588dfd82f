"""What LocalSGD keeps between steps: its checkpoints, and how it gets to other ranks after one was
lost.

    shared       the snapshot, the states of optimizers that step on all ranks alike, k_steps, the
                 decay of the snapshot: from the most advanced rank to all
    of a rank    its steps since the last average, its optimizer, its residual: survivors keep them
    of a new one the parameters are the snapshot; the optimizer's state and the buffers are those of
                 the most advanced rank; the residual is 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm._arguments import Check, check_fields, flag, integer, list_of, mapping, refuse, whole
from pycomm._core_api import arrays
from pycomm._training import coalesced
from pycomm._training.shards import local_shard
from pycomm.compress.residual import VERSION, sources_of
from pycomm.compress.updates import UpdateCompressor
from pycomm.elastic.change import Membership, ShrinkResult
from pycomm.elastic.state import check_replicated, load_copy
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import DEFAULT_WAIT_S, Group
from pycomm.optim.model_watch import ModelWatch
from pycomm.optim.moments import load_mean_state, mean_state
from pycomm.optim.muon import MuonMatrices
from pycomm.optim.shards import ModelShards

COUNTS: dict[str, Check] = {
    "step_count": whole,
    "last_sync": whole,
    "k_steps": functools.partial(integer, least=1),
    "snapshot": list_of(arrays.check_tensor),
}
USED: dict[str, Check] = {"used": list_of(flag)}  # older states lack it


class LocalState:
    """The base of LocalSGD, which documents it. The constructor is collective, unless this process
    joined the group: then it makes no calls."""

    _compressor: UpdateCompressor[Any] | None = None
    _muon: MuonMatrices | None = None
    _numbers: tuple[str, ...] = ("k_steps",)  # attributes that are equal on all ranks

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | None,
        k_steps: int,
        group: Group,
        shards: ModelShards | None = None,
    ) -> None:
        self.optimizer, self.outer = optimizer, outer
        self.k_steps, self.step_count, self.last_sync = k_steps, 0, 0
        self._membership, self._shards = Membership(group), shards
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        frozen = (p for p in model.parameters() if not p.requires_grad)
        self._constants: list[Tensor] = [*frozen, *model.buffers()]
        if not self._membership.new:
            replicated = [local_shard(p) for p in model.parameters()]
            coalesced.bcast_list_([*replicated, *model.buffers()], 0, group)
        self._snapshot = [local_shard(p).detach().clone() for p in self._parameters]
        self._used = [False] * len(self._parameters)  # on this rank since the last average
        self._model = ModelWatch(model, optimizer, self._parameters)

    @property
    def _group(self) -> Group:
        return self._membership.group

    def _averages_gradients(self, step: int) -> bool:
        """Whether ranks average gradients in this step, so that all make the same step."""
        raise NotImplementedError

    def shrink(self, timeout_s: float | None = None) -> ShrinkResult:
        """Collective over the surviving ranks after a rank failed: continues with these ranks.

        All ranks use the last average that any of them completed. A rank where that average failed
        takes it over and loses its steps since the average before; the others keep their steps. The
        failed average is repeated with the next due step. With compression no steps are lost: they
        are in the residual.

        Args:
            timeout_s: in seconds, as of Group.shrink.

        Returns:
            The surviving ranks, and the step count, the same on all ranks.

        Raises:
            InvalidArgument: `timeout_s` is not above 0.
            PeerLost: another rank failed during the call: call again.
            Unsupported: the model has shards (`replicas`).
        """
        return self._resume(lambda group: group.shrink(timeout_s), ())

    def replace(
        self, *others: Any, timeout_s: float | None = None, wait_s: float = DEFAULT_WAIT_S
    ) -> ShrinkResult:
        """As shrink(), but new processes take the ranks that were lost. Collective over the
        survivors and the new processes.

        A new process makes the same model, optimizers and wrapper in the group that it joined: the
        constructor makes no calls then. Its first replace() gets the last average as parameters,
        and from one of the most advanced ranks the optimizer's state, buffers and the states of
        `others`. Its residual is 0.

        If the group was replaced already, by Group.replace, Group.grow or another wrapper, that
        group is used.

        Args:
            others: objects with state_dict() and load_state_dict(), such as a scheduler; the same
                on all ranks.
            timeout_s, wait_s: as of Group.replace.

        Returns:
            The new group, and the step count, the same on all ranks.

        Raises:
            InvalidArgument: the group is not elastic, an argument is invalid, or all ranks joined.
            Unsupported: the model or an optimizer is sharded (`replicas`, ZeRO); nothing was
                changed.
            GroupBroken, PeerLost, Timeout: as of Group.replace. After PeerLost call again.
        """
        return self._resume(lambda group: group.replace(timeout_s, wait_s), others)

    def _resume(self, make: Callable[[Group], Group], others: Sequence[Any]) -> ShrinkResult:
        """Continues in the group that `make` makes of this one. Collective over it."""
        if self._shards is not None:
            raise Unsupported(
                "LocalSGD: with replicas= a lost rank takes a part of its replica with it: start "
                "again with whole replicas, and load a checkpoint and gather_state()"
            )
        check_replicated([self.optimizer, *others])
        change = self._membership.change(make, (self.last_sync, self.step_count))
        last, steps = change.counts
        compressor, muon = self._compressor, self._muon
        together = self.optimizer if self._averages_gradients(last) else None
        alike = together, self.outer, None if muon is None else muon.optimizer  # on all ranks
        load_copy(self._snapshot, [one for one in alike if one is not None], change)
        numbers = {name: getattr(self, name) for name in self._numbers}
        decay = None if compressor is None else compressor.decay
        numbers, decay = coalesced.bcast_value([numbers, decay], change.source, self._group)
        if change.is_new or self.last_sync < last:
            for p, s in zip(self._parameters, self._snapshot, strict=True):
                p.data.copy_(s)
            if compressor is not None:
                compressor.commit_missed()
                self._used = [False] * len(self._used)
        vars(self).update(numbers)
        if change.new:  # they get what differs by rank from the most advanced one
            tensors = [*self._constants, *([] if muon is None else [muon.mean_squares])]
            load_copy(tensors, [self.optimizer, *others], change, new_only=True)
        norm = 0.0
        if compressor is not None:
            compressor.decay = list(decay)
            norm = compressor.resume(change)
        self.last_sync, self.step_count = last, steps
        self._membership.complete()
        return change.result(steps, norm)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: plain values and tensors. Save the model and the optimizer too;
        they differ by rank between two averages, with compression always.

        `used` are flags: which parameters had a gradient on this rank since the last average.

        With compression it also has version, rank, size, decay (by parameter, the factor of the
        snapshot since the last average), hosts as in QuantizedGradients, and residual: by
        parameter, float32 [elements]. With TopK owner_residual: if there are owners, by dtype and
        device of the parameters, float32 [elements that this rank owns], and unused: the numbers of
        the parameters that no rank used in the last exchange. With Quantize owner_residual by
        parameter, and exchange. With muon also its state, and mean_squares,
        float64 [matrices, 2]: of the gradients of this rank.
        """
        state = {
            "step_count": self.step_count,
            "last_sync": self.last_sync,
            "k_steps": self.k_steps,
            "snapshot": [s.clone() for s in self._snapshot],
            "outer": None if self.outer is None else self.outer.state_dict(),
            "used": list(self._used),
        }
        if self._compressor is not None:
            state |= {
                "version": VERSION,
                "rank": self._group.rank,
                "size": self._group.size,
                "decay": list(self._compressor.decay),
                **self._compressor.save(),
            }
        if self._muon is not None:
            state |= self._muon.save()
        return state

    def gather_state(self, dst: int = 0) -> dict[str, Any] | None:
        """Collective. With compression: gathers the states of all ranks, and the mean state of the
        optimizer; the result loads at any number of ranks.

        Args:
            dst: the rank that receives the states.

        Returns:
            On rank `dst` version, size, ranks: a list of what state_dict() returns on each rank,
            and optimizer: the optimizer's state_dict() with the mean of the moments over all ranks.
            None on the others. With `replicas`: of the ranks with the same shard, so each shard has
            one result. Its tensors are plain, without a mesh.

        Raises:
            InvalidArgument: there is no compression, or `dst` is no rank.
            Error: as pycomm.gather.
        """
        if self._compressor is None:
            raise InvalidArgument("LocalSGD.gather_state() is for states with compression")
        size = self._group.size
        found = self._compressor.gather(integer("dst", dst, 0, size - 1))
        other = [{}] * size if self._muon is None else self._muon.gather(self._group, dst)
        mean = mean_state(self.optimizer, self._group)
        word = torch.tensor(self._used, dtype=torch.uint8)
        used = collectives.gather(word, dst, group=self._group)
        if found is None or other is None or used is None:
            return None
        mine = self.state_dict()
        parts = enumerate(zip(found, other, strict=True))
        ranks = [mine | {"rank": rank} | one | more for rank, (one, more) in parts]
        for rank, row in zip(ranks, used, strict=True):
            rank["used"] = row.bool().tolist()
        return {"version": VERSION, "size": size, "ranks": ranks, "optimizer": mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state. Load the model and the optimizer of the same step too.

        With compression, each rank loads its own state, or the result of gather_state(). At another
        number of ranks each rank takes the mean residual of the saved ranks, with muon the mean of
        their mean_squares, and loads the optimizer with the mean of its moments.

        Args:
            state: from state_dict() of this class, with an outer optimizer if this one has one.

        Raises:
            InvalidArgument: the state lacks values, or the parameters have other shapes; or, with
                compression, as DGC.load_state_dict. Nothing changes.
        """
        optimized, compressor = mapping("state", state).get("optimizer"), self._compressor
        needed, more = COUNTS | ({} if self.outer is None else {"outer": mapping}), USED
        if compressor is None:
            check_fields("state", state, needed, more)
            sources = [state]
        else:
            needed, more = needed | compressor.needed, more | compressor.more
            found = sources_of(state, self._group, "LocalSGD", needed, more)
            sources = [dict(one) for one in found]
            state = sources[0]
        shapes = [tuple(s.shape) for s in state["snapshot"]]
        if shapes != [tuple(s.shape) for s in self._snapshot]:
            raise InvalidArgument(
                f"LocalSGD: invalid state: got {len(shapes)} parameters, expected "
                f"{len(self._snapshot)} with the shapes of the model's"
            )
        by_rank = [source["used"] for source in sources if "used" in source]
        for used in by_rank:
            if len(used) != len(shapes):
                refuse("state['used']", len(used), f"{len(shapes)} flags, one for each parameter")
        if compressor is not None:
            compressor.load(sources)
        if self._muon is not None:
            self._muon.load(sources)
        if optimized is not None and len(sources) > 1:
            load_mean_state(self.optimizer, optimized)
        for mine, saved in zip(self._snapshot, state["snapshot"], strict=True):
            mine.copy_(saved)
        # States of older versions have none.
        used = [any(each) for each in zip(*by_rank, strict=True)]
        self._used = used or [False] * len(self._parameters)
        self._model.loaded, self._model.restored = False, True
        self.step_count, self.last_sync = state["step_count"], state["last_sync"]
        self.k_steps = state["k_steps"]
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
