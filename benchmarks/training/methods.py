"""The methods that the convergence benchmark compares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pycomm

__all__ = ["METHODS", "Method"]

RAMP = (0.75, 0.9375, 0.984375, 0.996)
GENTLE = (0.25, 0.5, *RAMP[:3])  # the first steps matter most
RAMP_TO_HUNDREDTH = [*RAMP[:3], 0.99]
# After the warm-up a rank sends at least 500 times fewer bytes, headers and lengths included, with
# both models: to all ranks, and through owners. Owners keep a residual of what they do not forward,
# which is smaller if they forward more elements than each rank has sent.
COMPACT = {"sparsity": [*RAMP[:3], 0.9945], "value_dtype": "2bit", "exchange": "gather"}
SHARDED = {"sparsity": [*RAMP[:3], 0.9965], "value_dtype": "2bit", "exchange": "sharded"}
SHARDED_HUNDREDTH = {**SHARDED, "sparsity": RAMP_TO_HUNDREDTH}
SHARDED_4K = {**SHARDED, "sparsity": [*RAMP[:3], 0.9974], "owner_k_factor": 4, "masking": False}
THREE_BITS = {"value_dtype": "3bit", "masking": False}
GENTLY = {**COMPACT, **THREE_BITS, "sparsity": [*GENTLE, 0.995]}
SHARDED_GENTLY = {**SHARDED, **THREE_BITS, "sparsity": [*GENTLE, 0.9968]}
# 75 times fewer bytes after the warm-up.
SEVENTY_FIVE = {**COMPACT, **THREE_BITS, "sparsity": [*GENTLE[:3], 0.9, 0.951]}


@dataclass(frozen=True)
class Adaptive:
    """An optimizer instead of SGD, without weight decay: dense, or with compression.

    Attributes:
        kind: "adamw", "soap" or "muon", which has the matrices inside of blocks; AdamW has the
            other parameters, with the same rate.
        betas: of AdamW and SOAP.
        rates: the peak of the learning rate by workload, found by seed 0.
        updates: of LocalSGD, if updates are compressed: compression, k_steps, outer.
        gradients: of DataParallel, if gradients are compressed.
        reference: the method that costs are relative to.
    """

    kind: str
    betas: tuple[float, float]
    rates: dict[str, float]
    updates: dict[str, Any] | None = None
    gradients: pycomm.Quantize | None = None
    reference: str = "adamw"

    def rate_at(self, workload: str, step: int, steps: int) -> float:
        """Rises over a twentieth of the run, then half a cosine down to 2 %."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return self.rates[workload] * min(1, (step + 1) / (steps / 20)) * (0.02 + 0.98 * cosine)


def _rates(images: float, text: float, larger: float | None = None) -> dict[str, float]:
    """Of the larger model three quarters of `text`, which AdamW with TopK(200) confirmed."""
    return {"images": images, "text": text, "larger text": larger or 0.75 * text}


def _updates(ratio: float, rate: float, kind: str = "adamw", exchange: str = "auto") -> Adaptive:
    options = {"compression": pycomm.TopK(ratio=ratio, exchange=exchange)}
    return Adaptive(kind, (0.0, 0.99), _rates(0.008, rate), options, None, kind)


def _all_updates(compression: pycomm.Quantize | pycomm.TopK) -> Adaptive:
    """Every update is sent, at a few bits."""
    return Adaptive("adamw", (0.5, 0.99), _rates(0.006, 0.03), {"compression": compression})


def _rounds(k_steps: int) -> Adaptive:
    """A compressed exchange every `k_steps` steps."""
    return replace(ADAMW, updates={"compression": pycomm.TopK(ratio=50), "k_steps": k_steps})


ADAMW = Adaptive("adamw", (0.7, 0.95), _rates(0.004, 0.009, larger=0.006))
MUON = Adaptive("muon", (0.7, 0.95), _rates(0.004, 0.01), reference="muon")
MUON_TOPK = {"compression": pycomm.TopK(ratio=50)}
SOAP_OPTIMIZER = Adaptive("soap", (0.7, 0.95), _rates(0.004, 0.006), reference="soap")


@dataclass(frozen=True)
class Method:
    """DGC's options, or LocalSGD's, or another optimizer's, or neither: dense SGD."""

    name: str
    dgc: dict[str, Any] | None = None
    local: dict[str, Any] | None = None
    adaptive: Adaptive | None = None
    feedback: bool = True  # False: no residual, unsent elements are dropped
    ramp: float = 0.25  # fraction of the run
    clip: bool = True  # if dense clips


METHODS = {
    method.name: method
    for method in (
        Method("dense"),
        Method("dgc", {"sparsity": [*RAMP, 0.999]}),
        Method("dgc without masking", {"sparsity": [*RAMP, 0.999], "masking": False}),
        Method(
            "dgc without momentum correction",
            {"sparsity": [*RAMP, 0.999], "momentum_correction": False},
        ),
        Method("dgc without ramp", {"sparsity": [0.999]}, ramp=0.0),
        Method(
            "top-k without feedback",
            {"sparsity": [*RAMP, 0.999], "momentum_correction": False},
            feedback=False,
        ),
        Method("dgc 0.99", {"sparsity": RAMP_TO_HUNDREDTH}),
        Method("dgc 0.99 without masking", {"sparsity": RAMP_TO_HUNDREDTH, "masking": False}),
        Method("dgc compact", COMPACT),
        Method("dgc compact without masking", {**COMPACT, "masking": False}),
        Method(
            "dgc compact without masking over a long ramp", {**COMPACT, "masking": False}, ramp=0.5
        ),
        Method("dgc compact over a gentle ramp", GENTLY, ramp=0.5),
        Method("dgc 75x", SEVENTY_FIVE, ramp=0.5, clip=False),
        Method("dgc sharded", SHARDED),
        Method("dgc sharded without masking", {**SHARDED, "masking": False}),
        Method(
            "dgc sharded without masking over a long ramp", {**SHARDED, "masking": False}, ramp=0.5
        ),
        Method(
            "dgc sharded 0.99 without masking over a long ramp",
            {**SHARDED_HUNDREDTH, "masking": False},
            ramp=0.5,
        ),
        Method("dgc sharded over a gentle ramp", SHARDED_GENTLY, ramp=0.5),
        Method("dgc sharded 4 k without masking", SHARDED_4K),
        *(Method(f"local {k}", local={"k_steps": k}) for k in (1, 2, 4, 8, 16)),
        Method("local adaptive", local={"init_k_steps": 4}),
        Method("adamw", adaptive=ADAMW),
        Method("adamw usual betas", adaptive=replace(ADAMW, betas=(0.9, 0.95))),
        Method("adamw topk 32", adaptive=_all_updates(pycomm.TopK(ratio=32))),
        Method("adamw topk 50", adaptive=_updates(50, 0.022)),
        *(Method(f"adamw topk {n}", adaptive=_updates(n, 0.016)) for n in (200, 500)),
        *(
            Method(f"adamw topk {n} sharded", adaptive=_updates(n, 0.016, exchange="sharded"))
            for n in (200, 500)
        ),
        *(
            Method(
                f"adamw quantize {up} {down}",
                adaptive=replace(ADAMW, gradients=pycomm.Quantize(up, down)),
            )
            for up, down in ((3, 8), (3, 3))
        ),
        *(
            Method(
                f"adamw quantized updates {up} {down}",
                adaptive=_all_updates(pycomm.Quantize(up, down)),
            )
            for up, down in ((1, 8), (1, 1))
        ),
        *(Method(f"adamw topk 50 every {k} steps", adaptive=_rounds(k)) for k in (5, 30)),
        Method("muon", adaptive=MUON),
        Method(
            "muon topk 50",
            adaptive=replace(
                MUON, betas=(0.0, 0.99), rates=_rates(0.008, 0.015), updates=MUON_TOPK
            ),
        ),
        Method("soap", adaptive=SOAP_OPTIMIZER),
        *(Method(f"soap topk {n}", adaptive=_updates(n, 0.018, "soap")) for n in (200, 500)),
    )
}
