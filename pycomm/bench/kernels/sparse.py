"""The kernels of a step of sparse training, as comparisons on the recorded residuals
(residuals.py).

    dgc_step             20 bytes an element
    dgc_step bfloat16    18, with gradients of 2 bytes
    topk                 4 bytes, read
    decode_update        the packets, and each cache line that they touch read and written; through
                         p.grad, 4 bytes more an element to clear it and 12 for SGD
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import kernels, reference
from pycomm.bench.kernels.comparison import (
    OURS,
    Array,
    Call,
    Comparison,
    Packet,
    Traffic,
    host,
    touched,
)
from pycomm.bench.kernels.residuals import MOMENTUM, SPARSITY, WORKERS, Residuals
from pycomm.bench.kernels.torch_steps import SAMPLED, Choose, Step, Tensors

WAITS = (SAMPLED, "CuPy")  # a graph of torch cannot hold CuPy's allocations
LEARNING_RATE = 0.1


class Case:
    """Concatenated windows of the recording, repeated if they are too few."""

    def __init__(self, recorded: Residuals, count: int, device: torch.device | str = "cpu") -> None:
        length = recorded.u.shape[1]
        windows = max(1, round(count / length))

        def windows_of(x: Array) -> Tensor:
            there = torch.from_numpy(np.ascontiguousarray(x[:windows])).to(device)
            repeated = there.repeat(-(-windows // len(there)), 1) if windows > len(x) else there
            return repeated[:windows].reshape(-1)

        self.u, self.v = windows_of(recorded.u), windows_of(recorded.v)
        self.gradients = [windows_of(g) for g in recorded.gradients]
        self.count = windows * length
        self.k = kept(self.count)
        self.packets: list[Packet] = []
        for worker in range(WORKERS):
            indices = torch.from_numpy(_sent(recorded, windows, worker)).to(device)
            self.packets.append((indices, torch.full_like(indices, 1e-3, dtype=torch.float32)))


def _sent(recorded: Residuals, windows: int, worker: int) -> Array:
    """The packets that the other workers sent in the same window."""
    stored, length = recorded.packets[0], recorded.u.shape[1]
    parts = []
    for window in range(windows):
        at = window % len(stored)
        other = at // WORKERS * WORKERS + (at + worker) % WORKERS
        parts.append(stored[other] + window * length)
    return np.concatenate(parts).astype(np.int32)


def kept(count: int) -> int:
    """How many elements a step sends."""
    return max(1, round(count * (1 - SPARSITY)))


def comparisons(
    case: Case, steps: Mapping[str, Step], choices: Mapping[str, Choose]
) -> list[Comparison]:
    """`steps` and `choices` are the other implementations of dgc_step and topk."""
    first = {"eager": steps["eager"]} if "eager" in steps else {}
    half = [g.bfloat16() for g in case.gradients]
    start = (case.u, case.v)
    return [
        dgc_step("dgc_step", start, case.gradients, steps),
        dgc_step("dgc_step bfloat16", start, half, first),
        _topk(case.v.clone(), case.k, choices),
        _decode_update(case.u, case.packets),
    ]


def dgc_step(
    kernel: str,
    start: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    steps: Mapping[str, Step],
    *,
    cold: bool = False,
) -> Comparison:
    """`cold`: without a workspace from the step before."""
    u, v = (x.clone() for x in start)
    count, k = u.numel(), kept(u.numel())
    workspace = None if cold else kernels.dgc_workspace(u, v, k)
    indices = torch.empty(k, dtype=torch.int32, device=u.device)
    values = u.new_empty(k)

    def ours(i: int) -> list[Tensor]:
        kernels.dgc_step(
            gradients[i],
            u,
            v,
            k,
            momentum=MOMENTUM,
            indices=indices,
            values=values,
            workspace=workspace,
        )
        return [u, v, indices, values]

    def wanted() -> Sequence[Array]:
        gradient, a, b = (host(x) for x in (gradients[0], *start))
        return reference.dgc_step(gradient, a, b, k, momentum=MOMENTUM)[:4]

    def composed(step: Step, own: Tensors, i: int) -> list[Tensor]:
        return [step(own, gradients[i])]

    calls: dict[str, Call] = {OURS: ours}
    pairs = [(u, v)]
    for name, step in steps.items():
        own = Tensors(start[0].clone(), start[1].clone(), k, MOMENTUM)
        calls[name] = partial(composed, step, own)
        pairs.append((own.u, own.v))
    return Comparison(
        kernel,
        Traffic((8 + gradients[0].element_size()) * count, 8 * count),
        wanted,
        calls,
        lambda: restart(pairs, start),
        rounding=1e-5,
        compared=_magnitudes,
        skipped=(SAMPLED,),
        waits=WAITS,
    )


def _topk(x: Tensor, k: int, choices: Mapping[str, Choose]) -> Comparison:
    workspace = kernels.topk_workspace(x, k)
    indices, values = torch.empty(k, dtype=torch.int32, device=x.device), x.new_empty(k)

    def ours(_: int) -> list[Tensor]:
        kernels.topk(x, k, indices=indices, values=values, workspace=workspace)
        return [indices, values]

    def others(choose: Choose, _: int) -> list[Tensor]:
        return [choose(x, k)[0]]

    calls: dict[str, Call] = {name: partial(others, choose) for name, choose in choices.items()}
    return Comparison(
        "topk",
        Traffic(x.nbytes, 8 * k),
        lambda: reference.topk(host(x), k),
        {OURS: ours} | calls,
        compared=_magnitudes,
        waits=WAITS,
    )


def _decode_update(start: Tensor, packets: Sequence[Packet]) -> Comparison:
    param, dense, scale = start.clone(), torch.zeros_like(start), 1 / WORKERS
    entries, lines = 8 * sum(i.numel() for i, _ in packets), touched(packets)
    whole = 2 * start.nbytes  # read, and written: to clear the gradient, and SGD

    def through_grad(_: int) -> list[Tensor]:
        kernels.decode_sum(dense, packets, scale)
        return [param.add_(dense, alpha=-LEARNING_RATE)]

    def wanted() -> list[Array]:
        pairs = [(host(i), host(v)) for i, v in packets]
        return [reference.decode_update(host(start), pairs, LEARNING_RATE, scale)]

    return Comparison(
        "decode_update",
        Traffic(entries + lines, lines),
        wanted,
        {
            OURS: lambda _: [kernels.decode_update(param, packets, LEARNING_RATE, scale)],
            "through p.grad": through_grad,
        },
        lambda: param.copy_(start),
        rounding=1e-6,
        more={"through p.grad": Traffic(entries + lines + whole, lines + whole)},
    )


def restart(pairs: Sequence[tuple[Any, Any]], start: tuple[Tensor, Tensor]) -> None:
    """Copies `start` to each pair."""
    for pair in pairs:
        for x, begin in zip(pair, start, strict=True):
            x.copy_(begin.reshape(x.shape))


def _magnitudes(results: Sequence[Array]) -> list[Array]:
    """Of the values, which come last: others may choose among equal ones, in any order."""
    return [np.sort(np.abs(results[-1]))]
