"""A compression of updates as a project's own: one bit for each value, with error feedback (EF-SGD,
arXiv 1901.09847). The contract of compressions holds it, as those of pycomm.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.residual import Residual, Whole
from pycomm.compress.updates import MeanUpdates, names_of
from pycomm.optim.compression import COMPRESSORS


@dataclass(frozen=True)
class Sign:
    """Sends the signs of a parameter's update, and its mean magnitude."""

    error_feedback: bool = True


class SignUpdates(MeanUpdates):
    """See UpdateCompressor."""

    def __init__(
        self, options: Sign, parameters: Sequence[Tensor], snapshot: Sequence[Tensor], group: Any
    ) -> None:
        super().__init__(options, parameters, snapshot, group)
        zeros = [torch.zeros(x.numel()) for x in self._theta]
        named = dict(zip(names_of(self._theta), zeros, strict=True))
        self._residual = Residual("LocalSGD", {"residual": named}, lambda *_: torch.empty(0))

    @property
    def ratio(self) -> float:
        return 32.0

    @property
    def groups(self) -> int:
        return 0

    def described_exchange(self) -> dict[str, Any]:
        return {"exchange": "gather", "exchange_costs": {}}

    def _exchange(self, word: Tensor, lacking: Collection[int]) -> list[Tensor]:
        with defer_sigint():
            packets = [self._packet(place) for place in range(len(self._theta))]
        mine = torch.cat([word, *packets])
        rows = mine.new_empty((self._pool.size, len(mine)))
        self._pool.all_gather(mine, rows).wait_for_device()
        self.sent_bytes = mine.nbytes
        self._compare(list(rows[:, : len(word)]))
        cut = [len(word), *map(len, packets)]
        means = [torch.zeros(x.numel()) for x in self._theta]
        for row in rows:
            for mean, packet in zip(means, torch.split(row, cut)[1:], strict=True):
                mean.add_(_values(packet, len(mean)), alpha=1 / len(rows))
        return means

    def _packet(self, place: int) -> Tensor:
        """Takes what is sent from the residual, to which the update was added."""
        theta, parameter = flat_view(self._theta[place]), flat_view(self._parameters[place])
        rest = self.residual[place].add_(theta.float() - parameter.float())
        parameter.copy_(theta)
        self._transaction.record(Whole(str(place), [rest]))
        bits = torch.from_numpy(np.packbits(rest.numpy() >= 0, bitorder="little"))
        packet = torch.cat([rest.abs().mean().view(1).view(torch.uint8), bits])
        rest.sub_(_values(packet, len(rest))).nan_to_num_(0, 0, 0)
        return packet

    def _abort(self, reason: str) -> None:
        pass


def _values(packet: Tensor, count: int) -> Tensor:
    """The values of a packet: a mean magnitude, and signs."""
    signs = np.unpackbits(packet[4:].numpy(), count=count, bitorder="little")
    magnitude = packet[:4].clone().view(torch.float32)
    return magnitude * (2.0 * torch.from_numpy(signs) - 1)


COMPRESSORS[Sign] = SignUpdates
