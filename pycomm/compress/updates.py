"""The exchange of compressed updates of an optimizer, for LocalSGD: what TopK and Quantize share.

A step is a transaction. `exchange` compresses the updates and sends them; if it fails, the updates
are in the residuals, and this rank has sent nothing. `commit` changes the parameters.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pycomm._arguments import Check, list_of, number, refuse
from pycomm._core_api import arrays
from pycomm._training.arguments import flat_tensor
from pycomm._training.communicators import CommunicatorPool
from pycomm._training.shards import local_shard
from pycomm.compress.hierarchical import rank_factor
from pycomm.compress.parameter_state import flat_view, is_dense
from pycomm.compress.residual import OWNED, Residual, Transaction
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument, Mismatch, Unsupported
from pycomm.group import Group

WORD = 4  # bytes that are compared
Received = TypeVar("Received")  # what `exchange` yields


class UpdateCompressor(ABC, Generic[Received]):
    """The exchange of compressed updates.

    Args:
        options: TopK or Quantize.
        parameters: the parameters that the optimizer changes. Of a sharded one (DTensor), the
            compressor exchanges this rank's shard.
        snapshot: the shared parameters, or shards, equal on all ranks; `commit` changes them.
        group: the ranks.

    Attributes:
        sent_bytes: bytes that this rank sent in the last exchange, without headers of frames.
        decay: for each parameter, the factor of the shared one at the next commit.
        settings: further numbers that must be the same on all ranks.
        skipped: all ranks skip this step.
        needed, more: values of save(), and those that older states lack.
        used: for each parameter, whether this rank had a gradient since the last exchange.
        unused: places of the parameters that no rank used in the last exchange. Their shared value
            and residuals stay as they were.

    Raises:
        Unsupported: parameters that are neither in host memory nor on a GPU, with gaps in memory,
            or not float32 or 16-bit floats.
        InvalidArgument: there are no parameters.
    """

    needed: ClassVar[dict[str, Check]] = {
        "decay": list_of(number),
        "residual": list_of(flat_tensor),
    }
    more: ClassVar[dict[str, Check]] = {OWNED: list_of(flat_tensor)}

    _residual: Residual  # names are places

    def __init__(
        self, options: Any, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Group
    ) -> None:
        self._options = options
        _check([local_shard(one) for one in parameters], type(options).__name__)
        self._pool = CommunicatorPool(group, 1)
        self._parameters = list(parameters)
        self._theta = list(snapshot)
        self.sent_bytes = 0
        self.decay = [1.0] * len(self._parameters)
        self.settings: list[float] = []
        self.skipped = False
        self.used = [False] * len(self._parameters)
        self.unused: set[int] = set()
        self._transaction = Transaction()  # of the current exchange, or of the last, if that failed
        self._deltas: list[Tensor] = []  # by place, updates of it that are not in the residual

    @property
    @abstractmethod
    def ratio(self) -> float:
        """4 bytes for each parameter, over the bytes of this rank's compressed updates."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Groups of neighbours that a rank sends in a step; 0 if all values are sent."""

    @property
    def residual(self) -> list[Tensor]:
        """The residual of each parameter, flat, in the order of its memory."""
        found = self._residual.last
        return [found[name] for name in names_of(self._theta)]

    @abstractmethod
    def described_exchange(self) -> dict[str, Any]:
        """What stats() reports of the exchange."""

    @contextmanager
    def exchange(self, step: int) -> Iterator[Received]:
        """Collective. The updates of all ranks; the parameters are those of the snapshot again.

        If the exchange or the block fails, this rank has sent nothing: its updates are in the
        residuals.

        Args:
            step: its number, which must be the same on all ranks, as `decay`, `settings` and the
                options.

        Raises:
            Mismatch: on all ranks, if ranks differ in their step, decay or options.
        """
        self._forget()
        lacking = self._lacking()
        try:
            yield self._exchange(self._check_word(step, lacking), lacking)
        except BaseException as error:  # includes Ctrl-C: the updates must be restored
            self._abort(f"{type(error).__name__}: {error}")
            self._transaction.undo()
            # Each copy of a host's residual gets its rank's update, so their mean the mean update.
            share = 1 / rank_factor(self._residual.by_host, self._pool.rank)
            for residual, delta in zip(self.residual, self._deltas, strict=False):
                residual.add_(delta, alpha=share)
            self._deltas = []
            raise

    @abstractmethod
    def _exchange(self, word: Tensor, lacking: Collection[int]) -> Received:
        """Exchanges the updates; compares `word`, the check word of this rank. `lacking`:
        parameters that may turn out to be unused."""

    @abstractmethod
    def _abort(self, reason: str) -> None:
        """Ends what a failed exchange has started."""

    @abstractmethod
    def commit(self, received: Received) -> None:
        """Multiplies the shared parameters by `decay`, and subtracts the mean of the received
        updates. What 16-bit parameters lose in rounding, the same on all ranks, stays in the
        residual of each rank."""

    @abstractmethod
    def means(self, received: Received) -> list[Tensor]:
        """The mean of the received updates of each parameter or shard, dense, of its shape and
        dtype. The shared parameters are multiplied by `decay`."""

    def commit_missed(self) -> None:
        """Marks as sent what this rank rolled back and another rank received."""
        self._transaction.redo()
        self._finish()

    def commit_outer(self) -> None:
        """Ends an exchange after which an outer optimizer changed the parameters."""
        for theta, parameter in zip(self._theta, self._parameters, strict=True):
            theta.copy_(local_shard(parameter.detach()))
        self._finish()

    def _finish(self) -> None:
        """Ends a committed exchange."""
        self._transaction.commit({str(place) for place in self.unused})
        self._forget()
        self.decay = [1.0] * len(self.decay)
        self.used = [False] * len(self.used)
        if not self._options.error_feedback:
            for x in (*self._residual.tensors, *self._residual.owned.values()):
                x.zero_()

    def _forget(self) -> None:
        """Ends the last exchange, which cannot be rolled back any more."""
        self._transaction, self._deltas = Transaction(), []

    def resume(self, change: GroupChange) -> float:
        """Collective. Exchanges among the ranks of the new group from now on; new ranks have no
        residual. Returns ShrinkResult.lost_residual_norm."""
        self._residual.fold(change.before)
        self._residual.to_ranks(change.before)
        self._pool = CommunicatorPool(change.group, 1)
        return change.lost_norm(self._residual.squares())

    def save(self) -> dict[str, Any]:
        """The residuals of this rank, as copies, and what else resumes an exchange."""
        return self._as_lists(self._residual.save())

    def gather(self, dst: int) -> list[dict[str, Any]] | None:
        """Collective. The residuals of each rank as in save(), on `dst`; None elsewhere."""
        found = self._residual.gather(self._pool.group, dst)
        return None if found is None else [self._as_lists(one) for one in found]

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the residuals and the decay, and forgets a failed exchange.

        Args:
            sources: this rank's state, or those of all ranks of another number of ranks. Of these
                each rank takes the mean, so that the mean residual stays the same.

        Raises:
            InvalidArgument: the state is of another model; nothing changes.
        """
        self._check_sources(sources)
        self._residual.load([self._by_name(source) for source in sources], self._pool.group)
        self.decay = list(sources[0]["decay"])
        self._forget()

    def _as_lists(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """A state of the residual in the order of the parameters and owners."""
        owned, names = found[OWNED], names_of(self._theta)
        keys = list(self._residual.parts()) or names
        empty = torch.empty(0, device=self._theta[0].device)
        return {
            "residual": [found["residual"][name] for name in names],
            OWNED: [owned.get(key, empty) for key in keys] if owned else [],
            "hosts": found["hosts"],
        }

    def _by_name(self, source: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reverse of _as_lists; older states have no owners."""
        owned, names = source.get(OWNED, []), names_of(self._theta)
        keys = list(self._residual.parts()) or names
        if len(owned) not in (0, len(keys)):
            raise InvalidArgument(
                f"LocalSGD: invalid state: got an owner_residual of {len(owned)} tensors, expected "
                f"{len(keys)}"
            )
        residual = dict(zip(names, source["residual"], strict=True))
        return {**source, "residual": residual, OWNED: dict(zip(keys, owned, strict=False))}

    def _lacking(self) -> set[int]:
        """Places of the parameters that this rank did not use, nor changed."""
        return {
            place
            for place, (theta, p) in enumerate(zip(self._theta, self._parameters, strict=True))
            if not self.used[place] and torch.equal(theta, local_shard(p.detach()))
        }

    def _check_word(self, step: int, lacking: Collection[int]) -> Tensor:
        """Four bytes that must be equal on all ranks, and a bit for each parameter that this rank
        lacks."""
        numbers = [*self.decay, *self.settings]
        values = struct.pack(f"q{len(numbers)}d", step, *numbers)
        word = struct.pack("I", zlib.crc32(values + repr(self._options).encode()))
        bits = np.packbits([place in lacking for place in range(len(self._theta))])
        return torch.frombuffer(bytearray(word + bits.tobytes()), dtype=torch.uint8)

    def _compare(self, words: Sequence[Tensor]) -> None:
        """Raises Mismatch unless the ranks' check words are equal; else finds what no rank used."""
        if len({word[:WORD].numpy().tobytes() for word in words}) > 1:
            raise Mismatch(
                "LocalSGD: ranks differ in the step, the learning rate or weight decay of a "
                f"parameter group, or in {type(self._options).__name__}: load one rank's step and "
                "schedule on all ranks"
            )
        lacked = [set(np.unpackbits(word[WORD:].numpy()).nonzero()[0].tolist()) for word in words]
        self.unused = set.intersection(*lacked)

    def _factors(self) -> list[float]:
        """By parameter, the factor of the shared one at this commit."""
        return [1.0 if i in self.unused else factor for i, factor in enumerate(self.decay)]

    def _check_sources(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Raises InvalidArgument unless the residuals have the sizes of the parameters."""
        wanted = [x.numel() for x in self._theta]
        for source in sources:
            found = [x.numel() for x in source["residual"]]
            if len(source["decay"]) != len(wanted):
                refuse("state['decay']", len(source["decay"]), f"{len(wanted)} numbers")
            if max(source.get("unused", ()), default=-1) >= len(wanted):
                refuse("state['unused']", max(source["unused"]), f"less than {len(wanted)}")
            if found != wanted:
                raise InvalidArgument(
                    f"LocalSGD: invalid state: got residuals of {sum(found)} elements in "
                    f"{len(found)} parameters, expected {sum(wanted)} in {len(wanted)}"
                )

    def _decay_shared(self) -> None:
        for theta, factor in zip(self._theta, self._factors(), strict=True):
            theta.mul_(factor)


class MeanUpdates(UpdateCompressor[list[Tensor]]):
    """Compressors whose `exchange` yields the mean update of each parameter, float32, flat."""

    def commit(self, received: list[Tensor]) -> None:
        residual = self.residual
        for place, (mean, factor) in enumerate(zip(received, self.decay, strict=True)):
            if place in self.unused:
                continue
            theta, parameter = flat_view(self._theta[place]), flat_view(self._parameters[place])
            if theta.dtype == torch.float32:
                theta.mul_(factor).sub_(mean)
                parameter.copy_(theta)
            else:
                commit_rounded(theta, parameter, residual[place], mean, factor)
        self._finish()

    def means(self, received: list[Tensor]) -> list[Tensor]:
        self._decay_shared()
        found = [torch.empty_like(x) for x in self._theta]
        for x, mean in zip(found, received, strict=True):
            flat_view(x).copy_(mean)
        for place in self.unused:  # what was received is a part of the residual, which stays
            found[place].zero_()
        return found


def names_of(parameters: Sequence[Tensor]) -> list[str]:
    """The names that the residual has for parameters: their places."""
    return [str(place) for place in range(len(parameters))]


def commit_rounded(
    theta: Tensor, parameter: Tensor, residual: Tensor, mean: Tensor, factor: float
) -> None:
    """theta * factor - mean, rounded to the dtype of theta; the residual takes the rounding
    error. All are flat views."""
    exact = theta.float().mul_(factor).sub_(mean)
    theta.copy_(exact)
    parameter.copy_(theta)
    error = theta.float().sub_(exact)
    residual.add_(torch.where(error.isfinite(), error, 0))


def _check(parameters: Sequence[Tensor], name: str) -> None:
    for place, parameter in enumerate(parameters):
        if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise Unsupported(
                f"{name}: parameter {place} is {parameter.dtype}: it compresses float32, bfloat16 "
                "and float16"
            )
        if not (parameter.is_cpu or arrays.on_gpu(parameter)):
            raise Unsupported(
                f"{name}: parameter {place} is on {parameter.device}, where it cannot compress: "
                "use the CPU or a GPU"
            )
        if not is_dense(parameter):
            raise Unsupported(
                f"{name}: the memory of parameter {place} has gaps: pass a clone of it"
            )
    if not sum(parameter.numel() for parameter in parameters):
        raise InvalidArgument(f"{name}: the model has no parameters that require gradients")
