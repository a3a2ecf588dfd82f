"""DGC, the compression that users construct; compressor.py runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm.compress.compressor import Compressor
from pycomm.compress.options import Options
from pycomm.compress.schedule import SparsityWarmup


class DGC:
    """Deep gradient compression for a torch.optim.SGD: error feedback with momentum correction.

        dgc = pycomm.DGC(optimizer, sparsity=[0.999])
        model = pycomm.DataParallel(model, compression=dgc)      # or, around torch's own:
        ddp.register_comm_hook(dgc, pycomm.dgc_hook)

    DGC takes over momentum, weight decay and Nesterov of all the optimizer's parameters, with the
    values in its groups; the optimizer does `p -= lr * p.grad`. In each step, of the gradient g of
    a parameter w on each of N ranks, with momentum m:

        u = m * u + g;  v = v + u        velocity u and residual v, [elements of w]
        S = the k largest of |v|         ties to the lower index
        send v[S];  v[S] = u[S] = 0      w.grad = 1/N * the sum of all ranks' v[S]

    Source: Lin et al., Deep Gradient Compression, arXiv 1712.01887, sections 3.2 and 3.3. The page
    "Gradient compression" has the formulas with clipping, decay and Nesterov, and a step's stages.

    Args:
        optimizer: a torch.optim.SGD without dampening and maximize.
        rampup_begin_step: the first step that compresses, counted from 0; earlier steps are dense.
        rampup_step: number of steps of the sparsity warm-up, shared evenly by the levels of
            `sparsity`; afterwards the last level stays.
        sparsity: the fraction of elements that is not sent, by level, in 0 <= s < 1 and not
            decreasing. A number is one level.
        clip_norm: C: the gradient of each of N ranks is clipped to a norm of C sqrt(N) before
            accumulation, an averaged gradient to C. None: no clipping.
        clip: "parameter": the norm of each parameter; "global": one norm of all that is compressed.
        masking: momentum factor masking: clear the velocity of sent elements.
        momentum_correction: apply momentum before the selection. False: the optimizer applies
            momentum and Nesterov to the exchanged gradients.
        decay_correction: the same for weight decay.
        select: the largest elements of each "parameter", or of the whole "model".
        min_count: parameters with fewer elements are sent uncompressed.
        k_rule: "round", "paddle" or "ceil": how the number of sent elements is rounded.
        value_dtype: dtype of transmitted values: "float32", or in compact packets also "bfloat16",
            "3bit", "2bit" or "1bit". The rounding error stays in the residual v.
        codec: "raw": 4 bytes for an index, and values of the parameter's own dtype, float32 or
            float64. "compact": both are encoded on the parameter's device, the host or CUDA, and
            the packets are sent through host memory after the last gradient of a step. "auto":
            "raw" for float32, unless `exchange` needs compact packets.
        exchange: "gather": all-gather of packets. "dense_masked": all-reduce of dense arrays of the
            selected elements. "sharded": each rank owns a shard, sums the packets for it and sends
            the largest sums on; the rest stays in its owner residual. The bytes received do not
            depend on the number of ranks. "hierarchical": the ranks of a host average gradients,
            and hosts exchange packets by "gather" or "sharded". "auto": the fewest bytes, counted
            by rank 0 for each level. "auto_time": the least time, from rank 0's measured link and
            codec speed; also "dense" until the first compressed step. "sharded" and "hierarchical"
            need compact packets; the automatic modes choose them only with these, and send "1bit"
            values above a density of 0.17 unless `value_dtype` is "float32".
        owner_k_factor: all owners of "sharded" together send this many times k elements: a larger
            factor leaves a smaller owner residual and makes the all-gather phase larger.
        scaler: the GradScaler or StaticLossScaler of the training, if any.
        fused: optimizer.step() applies packets to the parameters directly. Until then p.grad of a
            compressed parameter is this rank's own gradient, and None afterwards. Same bits for
            float32 and float64 where torch's SGD uses a fused multiply-add.

    Raises:
        Unsupported: another optimizer than SGD, sharded or not real floating parameters, or compact
            packets of parameters that are neither in host memory nor on CUDA.
        InvalidArgument: any other invalid argument.
    """

    def __init__(  # noqa: PLR0913 - all but the first have defaults
        self,
        optimizer: torch.optim.Optimizer,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: float | Sequence[float] = (0.999,),
        *,
        clip_norm: float | None = None,
        clip: str = "parameter",
        masking: bool = True,
        momentum_correction: bool = True,
        decay_correction: bool = True,
        select: str = "parameter",
        min_count: int = 16384,
        k_rule: str = "round",
        value_dtype: str = "float32",
        codec: str = "auto",
        exchange: str = "auto",
        owner_k_factor: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        fused: bool = False,
    ) -> None:
        options = Options(
            warmup=SparsityWarmup.of(rampup_begin_step, rampup_step, sparsity),
            clip_norm=clip_norm,
            clip=clip,
            masking=masking,
            momentum_correction=momentum_correction,
            decay_correction=decay_correction,
            select=select,
            min_count=min_count,
            k_rule=k_rule,
            value_dtype=value_dtype,
            codec=codec,
            exchange=exchange,
            owner_k_factor=owner_k_factor,
            fused=fused,
        )
        self._compressor = Compressor(optimizer, options, scaler)

    @property
    def level(self) -> int | None:
        """The index in `sparsity` of the next step's level; None: dense."""
        return self._compressor.level

    def stats(self) -> dict[str, Any]:
        """Numbers of the last committed step, on this rank.

        Returns:
            step: committed steps. level: sparsity, None if dense. k: elements that each rank sends.
            sent_bytes: bytes that this rank gave to exchanges in the step. dense_bytes: the same
            without compression. exchange: "dense", "gather", "dense_masked", "sharded" or
            "hierarchical" (then the first rank of a host counts its packets). value_dtype: of
            compact packets, None if there are none. exchange_costs: by exchange, the bytes counted
            by "auto", or the seconds beyond the backward pass estimated by "auto_time"; {} for
            another `exchange`.
        """
        return self._compressor.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as plain values and flat tensors in the memory order of a parameter.

        It loads at the same number of ranks, bit for bit. A failed backward pass is not in it.

        Returns:
            version, rank, size, step: numbers. switched: whether a step was compressed. exchange:
            by index of the level, what rank 0 chose. u, v: by name of the parameter, [elements],
            float32, or float64 for float64; they differ by rank. owner_residual: by name,
            [elements of the shard], or under an empty name if the whole model is selected at once.
            hosts: the host of each rank if the ranks of a host share u and v, else [].

        Raises:
            InvalidArgument: inside backward().
        """
        return self._compressor.save()

    def gather_state(self, dst: int = 0) -> dict[str, Any] | None:
        """Collective. Gathers the states of all ranks; the result loads at any number of ranks.

        Args:
            dst: the rank that receives the states.

        Returns:
            On rank `dst` version, size, and ranks: a list of what state_dict() returns on each
            rank. None on the others.

        Raises:
            InvalidArgument: inside backward(), or `dst` is no rank.
            Error: as pycomm.gather.
        """
        return self._compressor.gather(dst)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores a state. Gradients of an earlier backward pass are dropped.

        At another number of ranks each rank takes the mean of u and of v over the saved ranks, so
        the mean residual stays the same. Nothing changes if it raises.

        Args:
            saved: of state_dict() on this rank, or of gather_state() on any rank.

        Raises:
            InvalidArgument: the state lacks values, or is of another version or model, or it is one
                rank's state of another rank or number of ranks, or the call is inside backward().
        """
        self._compressor.load(saved)

    def detach(self) -> None:
        """Collective. Returns momentum and decay to the optimizer; DGC cannot be used afterwards.

        The optimizer's velocity becomes the mean of u over all ranks. The residual is dropped. If
        that matters, train dense or at a low sparsity for some steps before.

        Raises:
            InvalidArgument: nothing changes. On every rank: the gradients of a backward pass wait
                for the optimizer's step(). On one rank: it called inside backward().
            Error: as pycomm.all_reduce.
        """
        self._compressor.detach()


def compressor_of(dgc: DGC) -> Compressor:
    """The compressor of `dgc`, for the reducers of pycomm and of torch."""
    return dgc._compressor
