"""The kernels of a step of sparse training, as comparisons on the recorded residuals
(residuals.py).

    dgc_step             20 bytes an element
    dgc_step bfloat16    18, with gradients of 2 bytes
    dgc_step x 161       20, in tensors in the proportions of ResNet-50's, with a k for each
    dgc_step cold        20, on random numbers, without a workspace from the step before
    topk                 4 bytes, read
    decode_update        the packets, and each cache line that they touch read and written; through
                         p.grad, 4 bytes more an element to clear it and 12 for SGD
    DGC                  on the processor: a step of pycomm.DGC on one rank, with the optimizer's:
                         20 bytes with fused=True, 36 through p.grad
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pycomm
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
from pycomm.bench.kernels.residuals import MOMENTUM, SPARSITY, STEPS, WORKERS, Residuals
from pycomm.bench.kernels.torch_steps import SAMPLED, Choose, Step, Tensors
from pycomm.compress.dgc import compressor_of

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
    """All but DGC's; `steps` and `choices` are the other implementations of dgc_step and topk."""
    first = {"eager": steps["eager"]} if "eager" in steps else {}
    half = [g.bfloat16() for g in case.gradients]
    cold = torch.Generator(case.u.device).manual_seed(0)
    made = [torch.randn(case.count, generator=cold, device=case.u.device) for _ in range(3)]
    start = (case.u, case.v)
    return [
        _dgc_step("dgc_step", start, case.gradients, steps),
        _dgc_step("dgc_step bfloat16", start, half, first),
        _dgc_step("dgc_step cold", (made[0], made[1]), [made[2]] * STEPS, first, cold=True),
        _dgc_step_of_many(case, first),
        _topk(case.v.clone(), case.k, choices),
        _decode_update(case.u, case.packets),
    ]


def _dgc_step(
    kernel: str,
    start: tuple[Tensor, Tensor],
    gradients: Sequence[Tensor],
    steps: Mapping[str, Step],
    *,
    cold: bool = False,
) -> Comparison:
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
        lambda: _restart(pairs, start),
        rounding=1e-5,
        compared=_magnitudes,
        skipped=(SAMPLED,),
        waits=WAITS,
    )


def _dgc_step_of_many(case: Case, steps: Mapping[str, Step]) -> Comparison:
    """Tensors as a network has them, each of which sends its own k."""
    lengths = proportions(case.count)
    ks = [kept(n) for n in lengths]
    u, v = case.u.clone(), case.v.clone()
    us, vs = (list(torch.split(x, lengths)) for x in (u, v))
    gradients = [list(torch.split(g, lengths)) for g in case.gradients]
    workspace = kernels.dgc_workspace(us, vs, ks)
    indices = torch.empty(sum(ks), dtype=torch.int32, device=u.device)
    values = u.new_empty(sum(ks))
    own = case.u.clone(), case.v.clone()
    parts = list(zip(*(torch.split(x, lengths) for x in own), ks, strict=True))

    def ours(i: int) -> list[Tensor]:
        kernels.dgc_step(
            gradients[i],
            us,
            vs,
            ks,
            momentum=MOMENTUM,
            indices=indices,
            values=values,
            workspace=workspace,
            together=True,
        )
        return [u, v, values]

    def composed(step: Step, i: int) -> list[Tensor]:
        for (a, b, k), gradient in zip(parts, gradients[i], strict=True):
            step(Tensors(a, b, k, MOMENTUM), gradient)
        return list(own)

    def wanted() -> list[Array]:
        start = (torch.split(x, lengths) for x in (case.u, case.v))
        all_of_them = zip(gradients[0], *start, ks, strict=True)
        found = [
            reference.dgc_step(host(g), host(a), host(b), k, momentum=MOMENTUM)
            for g, a, b, k in all_of_them
        ]
        return [np.concatenate(x) for x in zip(*((s.u, s.v, s.values) for s in found), strict=True)]

    calls: dict[str, Call] = {name: partial(composed, step) for name, step in steps.items()}
    return Comparison(
        f"dgc_step x {len(lengths)}",
        Traffic(12 * case.count, 8 * case.count),
        wanted,
        {OURS: ours} | calls,
        lambda: _restart([(u, v), own], (case.u, case.v)),
        skipped=tuple(steps),  # they may choose another of two elements that round alike
    )


def proportions(count: int) -> list[int]:
    """The lengths of ResNet-50's 161 tensors, in proportion, all aligned to 16 bytes."""
    lengths = [64 * 3 * 49, 64, 64]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [width_in * width, 9 * width * width, 4 * width * width]
            norms = [width, width, 4 * width]
            if block == 0:
                convolutions.append(width_in * 4 * width)
                norms.append(4 * width)
            for convolution, norm in zip(convolutions, norms, strict=True):
                lengths += [convolution, norm, norm]
            width_in = 4 * width
    lengths += [1000, 2048 * 1000]  # bias first, so that the last takes the remainder
    share = count / sum(lengths)
    scaled = [max(4, int(n * share) // 4 * 4) for n in lengths[:-1]]
    return [*scaled, count - sum(scaled)]


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


def whole_step(case: Case) -> Comparison:
    """A step of DGC from the last gradient on, as a DataParallel goes through it: in host memory,
    by this process as the only rank."""
    pycomm.init()
    target = torch.zeros_like(case.u)
    given = {OURS: case.gradients, "through p.grad": [target] * STEPS}
    calls: dict[str, Call] = {}
    restarts = []
    for peer, gradients in given.items():
        calls[peer], restart = _dgc(case, gradients, fused=peer == OURS)
        restarts.append(restart)
    n = case.count
    return Comparison(
        "DGC",
        Traffic(12 * n, 8 * n),
        list,
        calls,
        lambda: [restart() for restart in restarts],
        skipped=tuple(calls),  # the tests of DGC check the results
        more={"through p.grad": Traffic(20 * n, 16 * n)},
    )


def _dgc(
    case: Case, gradients: Sequence[Tensor], *, fused: bool
) -> tuple[Call, Callable[[], None]]:
    parameter = torch.nn.Parameter(case.u.clone())
    optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=MOMENTUM)
    dgc = pycomm.DGC(optimizer, sparsity=[SPARSITY], min_count=1, fused=fused)
    compressor = compressor_of(dgc)
    memory = compressor.state.memories[parameter]

    def step(i: int) -> None:
        parameter.grad = gradients[i]
        compressor.add(gradients[i], [parameter], [gradients[i]])
        compressor.finish()
        optimizer.step()

    def restart() -> None:
        assert memory.v is not None
        _restart([(memory.u, memory.v)], (case.u, case.v))

    return step, restart


def _restart(pairs: Sequence[tuple[Any, Any]], start: tuple[Tensor, Tensor]) -> None:
    for pair in pairs:
        for x, begin in zip(pair, start, strict=True):
            x.copy_(begin.reshape(x.shape))


def _magnitudes(results: Sequence[Array]) -> list[Array]:
    """Of the values, which come last: others may choose among equal ones, in any order."""
    return [np.sort(np.abs(results[-1]))]
