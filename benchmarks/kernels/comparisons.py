"""The comparisons of `bench kernels` that need pycomm's repository, beside those of sparse.py.

    dgc_step x 161       20 bytes an element, in tensors in the proportions of ResNet-50's, with a k
                         for each
    dgc_step cold        20, on random numbers, without a workspace from the step before
    DGC                  on the processor: a step of pycomm.DGC on one rank, with the optimizer's:
                         20 bytes with fused=True, 36 through p.grad

single_kernels.py and update_kernels.py have more; libraries.py has the libraries beside torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

import pycomm
from benchmarks.kernels import single_kernels, update_kernels
from benchmarks.kernels.libraries import LOADERS
from benchmarks.training.models import resnet50_shapes
from pycomm import kernels, reference
from pycomm.bench.kernels.comparison import OURS, Array, Call, Comparison, Traffic, host
from pycomm.bench.kernels.residuals import MOMENTUM, SPARSITY, STEPS
from pycomm.bench.kernels.sparse import Case, dgc_step, kept, restart
from pycomm.bench.kernels.torch_steps import Step, Tensors
from pycomm.compress.dgc import compressor_of

__all__ = ["LOADERS", "comparisons"]


def comparisons(case: Case, steps: Mapping[str, Step], with_dgc: bool) -> list[Comparison]:
    """All, DGC only on request; `steps` are the other implementations of dgc_step."""
    first = {"eager": steps["eager"]} if "eager" in steps else {}
    random = torch.Generator(case.u.device).manual_seed(0)
    made = [torch.randn(case.count, generator=random, device=case.u.device) for _ in range(3)]
    found = [
        dgc_step("dgc_step cold", (made[0], made[1]), [made[2]] * STEPS, first, cold=True),
        _dgc_step_of_many(case, first),
        *single_kernels.comparisons(case.v, case.packets, case.gradients),
        *update_kernels.comparisons(case),
    ]
    return [*found, _whole_step(case)] if with_dgc else found


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
        lambda: restart([(u, v), own], (case.u, case.v)),
        skipped=tuple(steps),  # they may choose another of two elements that round alike
    )


def proportions(count: int) -> list[int]:
    """The lengths of ResNet-50's 161 tensors, in proportion, all aligned to 16 bytes."""
    *lengths, weight, bias = map(math.prod, resnet50_shapes())
    lengths += [bias, weight]  # the last one takes the remainder
    share = count / sum(lengths)
    scaled = [max(4, int(n * share) // 4 * 4) for n in lengths[:-1]]
    return [*scaled, count - sum(scaled)]


def _whole_step(case: Case) -> Comparison:
    """A step of DGC from the last gradient on, as a DataParallel goes through it: in host memory,
    by this process as the only rank."""
    pycomm.init()
    target = torch.zeros_like(case.u)
    given = {OURS: case.gradients, "through p.grad": [target] * STEPS}
    calls: dict[str, Call] = {}
    restarts: list[Callable[[], None]] = []
    for peer, gradients in given.items():
        calls[peer], reset = _dgc(case, gradients, fused=peer == OURS)
        restarts.append(reset)
    n = case.count
    return Comparison(
        "DGC",
        Traffic(12 * n, 8 * n),
        list,
        calls,
        lambda: [reset() for reset in restarts],
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

    def reset() -> None:
        assert memory.v is not None
        restart([(memory.u, memory.v)], (case.u, case.v))

    return step, reset
