"""Parameters whose largest groups of updates TopK selects together, and what their exchange needs
to be rolled back."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.group_shards import GroupShards, Received
from pycomm.compress.packet_codec import Packets
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.topk import TopK
from pycomm.compress.updates import commit_rounded
from pycomm.kernels import UpdatePacket


class UpdateUnit:
    """Parameters of one dtype on one device.

    Args:
        options: of the compression.
        places: positions among the model's parameters.
        parameters, snapshot: the parameters, and the shared ones.

    Attributes:
        places: as given.
        theta: flat views of the shared parameters.
        residual: float32, as theta.
        counts: elements of each parameter.
        device: of the parameters.
        k: number of groups that a rank sends.
        shards: those of the owners of groups, or one without owners.

    Raises:
        InvalidArgument: the parameters are too few for the ratio.
    """

    def __init__(
        self,
        options: TopK,
        places: Sequence[int],
        parameters: Sequence[Tensor],
        snapshot: Sequence[Tensor],
    ) -> None:
        self._options = options
        self.places = list(places)
        self._own = list(parameters)
        self.theta = [flat_view(x) for x in snapshot]
        self.device = self.theta[0].device
        self.residual = [torch.zeros(x.numel(), device=self.device) for x in self.theta]
        self.counts = [x.numel() for x in self.theta]
        self.k = options.groups(self.counts)
        self._workspace = kernels.update_workspace(
            self.theta, self.k, group=options.group, value_dtype=options.value_dtype
        )
        self.shards = self.shards_of(0, 1)
        # By shard: what this rank sent in the current exchange, or in the last one if that failed;
        # and then the values of these groups after they were sent.
        self._sent: list[UpdatePacket] = []
        self._rests: list[Tensor] = []

    @property
    def _parameters(self) -> list[Tensor]:
        """Flat views of the parameters, whose memory the program may have replaced."""
        return [flat_view(x) for x in self._own]

    def shards_of(self, rank: int, size: int, residual: Tensor | None = None) -> GroupShards:
        """The shards of `size` owners; `residual` as an owner is copied."""
        if residual is not None:
            residual = residual.to(self.device, torch.float32, copy=True)
        return GroupShards(self.counts, rank, size, self._options, residual)

    def lay_out(self, rank: int, size: int) -> None:
        """Has `size` owners from now on, or none if that is 1; not collective. The residual takes
        in what this rank has as another owner."""
        if (self.shards.rank, self.shards.size) != (rank, size):
            self.shards.fold(self.residual)
            self.shards = self.shards_of(rank, size)

    def select(self) -> list[Tensor]:
        """Adds the update to the residual and takes the packets for the owners from it, as bytes in
        host memory. The parameters are the shared ones then."""
        tensors = self.theta, self._parameters, self.residual
        self.shards.select(tensors, self.k, self._workspace, self._sent)
        return [one.packet.cpu() for one in self._sent]

    def choose(self, packets: Packets, unused: Collection[int]) -> Tensor:
        """As an owner, the packet of the largest sums, without those of `unused` places."""
        kept = [place for place, i in enumerate(self.places) if i in unused]
        return self.shards.choose(packets, self.k, self.device, kept)

    def roll_back(self) -> None:
        """Puts the selected values back into the residual, once."""
        if not self._rests:
            self._rests = [self._rest(*one) for one in enumerate(self._sent)]
            self._restore([packet.values for packet in self._sent])

    def commit_missed(self) -> None:
        """Takes them out again: another rank received them."""
        if self._rests:
            self._restore(self._rests)

    def commit(self, received: Sequence[Received], factors: Sequence[float], holders: int) -> None:
        """theta * factor - the received sum / holders, in theta and the parameters."""
        if self.theta[0].dtype == torch.float32:
            for x, y, factor in zip(self.theta, self._parameters, factors, strict=True):
                if factor != 1:
                    x.mul_(factor)
                    y.copy_(x)
            for tensors in (self.theta, self._parameters):
                for owner, batch in received:
                    there = self.shards.views(tensors, owner)
                    kernels.decode_update(there, batch, 1.0, 1.0 / holders)
        else:
            means = [torch.empty_like(residual) for residual in self.residual]
            self.decode(means, received, holders)
            rows = (self.theta, self._parameters, self.residual, means, factors)
            for row in zip(*rows, strict=True):
                commit_rounded(*row)

    def decode(self, means: Sequence[Tensor], received: Sequence[Received], holders: int) -> None:
        """Writes the received sum / holders into flat tensors."""
        for owner, batch in received:
            kernels.decode_sum(self.shards.views(means, owner), batch, 1.0 / holders)

    def finish(self) -> None:
        """Ends a committed exchange."""
        self.shards.commit()
        self.forget()
        if not self._options.error_feedback:
            self.shards.residual = None
            for residual in self.residual:
                residual.zero_()

    def forget(self) -> None:
        """Ends the last exchange, which cannot be rolled back any more."""
        self._sent, self._rests = [], []

    def owner_residual(self, pad: bool = False) -> Tensor:
        """A copy of the residual as an owner; padded to that of the largest shard."""
        counts = self.shards.owner_counts
        mine, count = self.shards.residual, counts[self.shards.rank]
        found = torch.zeros(max(counts) if pad else count, device=self.device)
        if mine is not None:
            found[:count] = mine
        return found

    def _rest(self, owner: int, packet: UpdatePacket) -> Tensor:
        """The residual in the selected groups, which is the rounding error after a step."""
        error = packet.values - self.shards.values_of(owner, packet.packet)
        return torch.where(error.isfinite(), error, 0)

    def _restore(self, values: Sequence[Tensor]) -> None:
        """Writes the values of the groups that this rank sent into the residual."""
        for owner, (packet, mine) in enumerate(zip(self._sent, values, strict=True)):
            if len(mine):
                there = self.shards.views(self.residual, owner)
                kernels.update_rollback(there, packet.indices, mine, group=self._options.group)
