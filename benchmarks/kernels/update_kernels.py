"""The kernels that compress updates and quantize gradients, as comparisons on the recorded
residuals (residuals.py).

    update_step   20 bytes an element: parameters before and after, and the residual, are read; the
                  last two are written
    read_groups   and decode_update of two packets of update_step: the packets are read, and each
                  cache line that they touch is read and written; beside it decode_batch
    quantize      12 bytes an element, and the bits: gradient and residual are read, the residual
                  and the packet are written
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import kernels, reference
from pycomm.bench.kernels.comparison import OURS, Array, Comparison, Traffic, host, touched
from pycomm.bench.kernels.sparse import LEARNING_RATE, Case
from pycomm.compress.topk import TopK

RATIO = 200
BITS = 3


def comparisons(case: Case) -> list[Comparison]:
    """All, on copies of the case's arrays."""
    return [_update_step(case), _read_groups(case), _quantize(case)]


def _update_step(case: Case) -> Comparison:
    """Parameters of one array, and those after a step of SGD with each recorded gradient."""
    group = TopK(ratio=RATIO).group
    count = case.count - case.count % group  # torch's form below has no shorter group
    theta = torch.zeros(count, device=case.v.device)
    after = [-LEARNING_RATE * g[:count] for g in case.gradients]
    own, others = [x.clone() for x in after], [x.clone() for x in after]
    start = case.v[:count]
    residual, composed_residual = start.clone(), start.clone()
    k = TopK(ratio=RATIO).groups([count])

    def ours(step: int) -> list[Array]:
        return [_packet(theta, own[step], residual, k), residual]

    def composed(step: int) -> list[Tensor]:
        """One magnitude for all values, and no packet."""
        delta = torch._foreach_sub([theta], [others[step]])
        torch._foreach_add_([composed_residual], delta)
        torch._foreach_copy_([others[step]], [theta])
        groups = composed_residual.view(-1, group)
        chosen = groups.square().sum(1).topk(k, sorted=False).indices
        values = groups[chosen]
        groups[chosen] = values - values.sign() * values.abs().mean()
        return [composed_residual]

    def restart() -> None:
        for x, y, first in zip(own, others, after, strict=True):
            x.copy_(first)
            y.copy_(first)
        residual.copy_(start)
        composed_residual.copy_(start)

    def wanted() -> Sequence[Array]:
        update = reference.update_step(
            [host(theta)], [host(after[0])], [host(start)], k, group=group
        )
        return [np.frombuffer(update.packet, np.uint8), update.residual[0]]

    return Comparison(
        "update_step",
        Traffic(12 * count, 8 * count),
        wanted,
        {OURS: ours, "foreach": composed},
        restart,
        skipped=("foreach",),  # its magnitudes are others
        waits=(OURS,),  # for the length of the packet
    )


def _read_groups(case: Case) -> Comparison:
    """The packets of two ranks with one array of the recorded gradients each."""
    group = TopK(ratio=RATIO).group
    count = case.count - case.count % group  # decode_sum knows no elements behind the end
    start = case.u[:count]
    theta, residual = torch.zeros_like(start), torch.zeros_like(start)
    k = TopK(ratio=RATIO).groups([count])
    sent = [_packet(theta, g[:count].clone(), residual, k) for g in case.gradients[:2]]
    packets, sizes = torch.cat(sent), [len(packet) for packet in sent]
    numbers = packets, sizes, [k] * len(sent), [count // group]
    elements = kernels.decode_batch(*numbers, group=group)
    lengths = list(elements.lengths)
    parts = [torch.split(x, lengths) for x in (elements.indices, elements.values)]
    pairs = list(zip(*parts, strict=True))
    param, lines = start.clone(), touched(pairs)

    def decoded_by(
        decode: Callable[..., kernels.GroupBatch | kernels.PacketBatch],
    ) -> Callable[[int], list[Tensor]]:
        def call(_: int) -> list[Tensor]:
            batch = decode(*numbers, group=group)
            return [kernels.decode_update(param, batch, LEARNING_RATE, 1 / len(sizes))]

        return call

    def wanted() -> Sequence[Array]:
        on_host = [(host(i), host(v)) for i, v in pairs]
        return [reference.decode_update(host(start), on_host, LEARNING_RATE, 1 / len(sizes))]

    return Comparison(
        "read_groups",
        Traffic(packets.nbytes + lines, lines),
        wanted,
        {OURS: decoded_by(kernels.read_groups), "decode_batch": decoded_by(kernels.decode_batch)},
        lambda: param.copy_(start),
        waits=(OURS, "decode_batch"),  # for the result of the checks
    )


def _packet(theta: Tensor, param: Tensor, residual: Tensor, k: int) -> Any:
    """The packet of an update step."""
    group = TopK(ratio=RATIO).group
    indices, _ = kernels.update_step(theta, param, residual, k, group=group)
    return kernels.encode_groups(residual, indices, group=group).packets[0]


def _quantize(case: Case) -> Comparison:
    residual, start = case.v.clone(), case.v
    size = kernels.quantized_bytes(case.count, BITS)
    packet = torch.empty(size, dtype=torch.uint8, device=start.device)

    def ours(step: int) -> list[Tensor]:
        kernels.quantize(case.gradients[step], BITS, residual=residual, out=packet)
        return [packet, residual]

    def wanted() -> Sequence[Array]:
        coded, lost = reference.quantize(host(case.gradients[0]), BITS, host(start))
        return [np.frombuffer(coded, np.uint8), lost]

    return Comparison(
        "quantize",
        Traffic(8 * case.count, 4 * case.count + packet.nbytes),
        wanted,
        {OURS: ours},
        lambda: residual.copy_(start),
    )
