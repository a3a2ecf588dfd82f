"""pycomm.SyncBatchNorm: batch normalization with the statistics of all ranks.

    forward     all_gather  [mean, sum of squared deviations, count] of each rank, then combined
    backward    all_reduce  [sum of dy * normalized x, sum of dy]

Sources: Ioffe and Szegedy, Batch Normalization (2015), for both passes; Chan, Golub and LeVeque,
Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979), for combining.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pycomm import collectives
from pycomm._arguments import also_named, flag, integer, number, refuse
from pycomm._training.arguments import check_module, device_of
from pycomm.default_group import chosen, default
from pycomm.errors import InvalidArgument
from pycomm.group import Group

MOST_CHANNELS = 2**31 - 1


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, on the CPU or on CUDA devices.

    Equals torch's BatchNorm1d, 2d or 3d of one process with the concatenated batch, in both passes.
    The batches may differ in size, and be empty on some ranks. With `eval()`, and in a group of
    size 1, it is torch's layer and does not communicate.

    In training, also under no_grad, each forward pass makes an all_gather, and each backward pass
    an all_reduce if the input requires a gradient: every rank makes the same passes in the same
    order. Statistics have at least 32 bits. Gradients of gradients are not supported. As in torch's
    SyncBatchNorm, gradients of weight and bias are those of this rank's part of the batch:
    DataParallel or DDP averages them.

    Args:
        num_features: channels C of the input, of shape [N, C] or [N, C, *].
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None: their mean over all batches.
        affine: has a weight and a bias.
        track_running_stats: has running statistics; False: `eval()` uses those of this rank's
            batch.
        device, dtype: of parameters and buffers.
        group: the ranks; None: the default group at each pass.

    Raises:
        InvalidArgument: an argument is invalid. In forward, before communication: the input is not
            of floats or of this shape; or, on every rank: all ranks together have less than 2
            values per channel.
        Mismatch: in forward: the ranks differ in the number of channels or the dtype.
        Error: as pycomm.all_reduce.
    """

    @also_named(process_group="pass a pycomm group as group=")
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group | None = None,
    ) -> None:
        num_features = integer("num_features", num_features, 0, MOST_CHANNELS)
        eps = number("eps", eps)
        momentum = None if momentum is None else number("momentum", momentum)
        affine = flag("affine", affine)
        track_running_stats = flag("track_running_stats", track_running_stats)
        device = None if device is None else device_of("device", device)
        floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not floats:
            refuse("dtype", dtype, "a dtype of floats, or None")
        if group is not None:
            chosen(group)  # raises for another object
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group = group

    @classmethod
    @also_named(process_group="pass a pycomm group as group=")
    def convert_sync_batchnorm(cls, module: nn.Module, group: Group | None = None) -> nn.Module:
        """Replaces all BatchNorm layers of a module. They keep their parameters, buffers and mode;
        hooks are not kept, as in torch.

        Call it before the optimizer and DataParallel are made. Does not communicate.

        Args:
            module: any module; changed in place, unless it is itself a BatchNorm layer.
            group: the ranks; None: the default group at each pass.

        Returns:
            The module, or its replacement.

        Raises:
            InvalidArgument: an argument is of another type, or a lazy layer has had no input yet.
        """
        check_module("module", module)
        if group is not None:
            chosen(group)  # raises for another object
        return cls._converted(module, group, {})

    @classmethod
    def _converted(
        cls, module: nn.Module, group: Group | None, known: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        """`known`: the layers that are done, since a layer may occur several times."""
        if module in known:
            return known[module]
        made = known[module] = cls._of(module, group) if isinstance(module, _BatchNorm) else module
        for name, child in module._modules.items():
            if child is not None:
                made.add_module(name, cls._converted(child, group, known))
        return made

    @classmethod
    def _of(cls, layer: _BatchNorm, group: Group | None) -> SyncBatchNorm:
        if any(is_lazy(x) for x in (*layer.parameters(), *layer.buffers())):
            raise InvalidArgument(
                f"convert_sync_batchnorm: {type(layer).__name__} has had no input, and its number "
                "of channels is unknown: first run a forward pass"
            )
        made = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            device="meta",  # replaced below
            group=group,
        )
        made.weight, made.bias = layer.weight, layer.bias
        made.running_mean, made.running_var = layer.running_mean, layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        return made.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized input, of its shape and dtype. Collective in training."""
        if not self.training:
            return super().forward(x)
        group = self.group or default()
        if group.size == 1:
            return super().forward(x)
        self._check_input_dim(x)
        with torch.no_grad():
            mean, variance, count = _statistics(x, group)
            if self.track_running_stats:
                self._track(mean, variance, count)
        y: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]  # torch's own
            x, self.weight, self.bias, mean, variance, count, self.eps, group
        )
        return y

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features or not x.is_floating_point():
            raise InvalidArgument(
                f"SyncBatchNorm: got an input of shape {tuple(x.shape)} and {x.dtype}, expected "
                f"floats of shape [N, {self.num_features}] or [N, {self.num_features}, *]"
            )

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Updates the running statistics, whose variance is the unbiased one."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        new = self.momentum
        if new is None:
            new = 1.0 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - new).add_(mean, alpha=new)
        self.running_var.mul_(1 - new).add_(variance * (count / (count - 1)), alpha=new)


def _statistics(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """The mean [C], the biased variance [C] and the count [] over all ranks. Collective.

    Ranks compute them from the same gathered values in the same order, so they have the same bits.
    Does not wait for a device, except where this rank has less than 2 values per channel.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    channels, own = x.shape[1], x.shape[:1].numel() * x.shape[2:].numel()
    mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if own:
        dims = [0, *range(2, x.dim())]
        mean = x.sum(dims, dtype=dtype) / own
        mine[:channels] = mean
        mine[channels:-1] = (x - mean.view(-1, *[1] * (x.dim() - 2))).square_().sum(dims)
        mine[-1] = own
    rows = collectives.all_gather(mine, group=group)
    counts = rows[:, -1:]
    count = counts.sum()
    if own < 2 and float(count) < 2:
        raise InvalidArgument(
            f"SyncBatchNorm: got {int(count)} values per channel on all ranks together, expected "
            "at least 2 in training"
        )
    means, squares = rows[:, :channels], rows[:, channels:-1]
    mean = (means * (counts / count)).sum(0)
    variance = (squares + counts * (means - mean).square()).sum(0) / count
    return mean, variance, count


class _Normalize(torch.autograd.Function):
    """Normalizes with given statistics of all ranks; the gradient regards them as functions of the
    input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: Group,
    ) -> Tensor:
        ctx.eps, ctx.group = eps, group
        ctx.save_for_backward(x, weight, bias, mean, variance, count)
        return _normalized(x, mean, variance, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """dx = weight / deviation * (dy - sum(dy) / n - normalized x * sum(dy * normalized x) / n),
        where the sums and n are over all ranks."""
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        collective = ctx.needs_input_grad[0]
        if x.numel():
            # With fixed statistics: dx is dy * weight / deviation, the others are this rank's sums.
            dx, dot, total = torch.ops.aten.native_batch_norm_backward(
                *(dy, x, scale, mean, variance, None, None),
                *(False, ctx.eps, [collective, True, True]),
            )
        else:
            dx, dot, total = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if collective:
            sums = collectives.all_reduce(torch.stack([dot, total]), group=ctx.group)
            sums *= -scale * (variance + ctx.eps).rsqrt() / count
            dx += _normalized(x, mean, variance, sums[0], sums[1], ctx.eps)
        of_weight = None if weight is None else dot.to(weight.dtype)
        of_bias = None if bias is None else total.to(bias.dtype)
        return (dx if collective else None), of_weight, of_bias, None, None, None, None, None


def _normalized(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """weight * (x - mean) / sqrt(variance + eps) + bias, in the dtype of x."""
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
