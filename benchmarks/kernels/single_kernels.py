"""The kernels of `pycomm.kernels` that training fuses into larger ones, each compared with torch;
benchmark.py times the calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pycomm import kernels, reference
from pycomm.bench.kernels.comparison import OURS, Comparison, Packet, Traffic, host, touched


def comparisons(
    x: Tensor, packets: Sequence[Packet], gradients: Sequence[Tensor]
) -> list[Comparison]:
    """All of them, on copies of x [count]; packets have its indices, gradients its shape."""
    k = packets[0][0].numel()
    return [
        _threshold(x.clone(), k),
        _norm(x.clone()),
        _clip(x),
        _cast(x.clone()),
        _reduce(gradients),
        _scatter_add(x, packets[0]),
        _decode_sum(x, packets),
        _momentum_mask(x, packets[0][0]),
        *_encoded(x),
    ]


def _threshold(x: Tensor, k: int) -> Comparison:
    workspace, out = kernels.topk_workspace(x, k), x.new_empty(1)
    return Comparison(
        "threshold",
        Traffic(x.nbytes, 4),
        lambda: [reference.threshold(host(x), k)],
        {
            OURS: lambda _: [kernels.threshold(x, k, out=out, workspace=workspace)],
            "torch.topk": lambda _: [x.abs().topk(k, sorted=False).values.min()],
        },
    )


def _norm(x: Tensor) -> Comparison:
    workspace, out = kernels.norm_workspace(x), torch.empty(1, dtype=torch.float64, device=x.device)
    norm = torch.linalg.vector_norm
    return Comparison(
        "norm",
        Traffic(x.nbytes, 8),
        lambda: [reference.norm(host(x))],
        {
            OURS: lambda _: [kernels.norm(x, out=out, workspace=workspace)],
            "vector_norm": lambda _: [norm(x)],
            "in float64": lambda _: [norm(x, dtype=torch.float64)],
        },
        rounding=3e-3,  # float32 sums of 2^24 squares
    )


def _clip(start: Tensor) -> Comparison:
    """Read for the norm, then read and written. The limit decreases: pycomm skips arrays below
    it."""
    x, before = start.clone(), float(torch.linalg.vector_norm(start))
    parameter = torch.nn.Parameter(x)
    parameter.grad = x

    def limit(step: int) -> float:
        return before * 0.9 ** (step + 1)

    def composed(step: int) -> list[Tensor]:
        torch.nn.utils.clip_grad_norm_([parameter], limit(step))
        return [x]

    return Comparison(
        "clip_",
        Traffic(2 * x.nbytes, x.nbytes),
        lambda: [reference.clip(host(start), limit(0))],
        {OURS: lambda i: [kernels.clip_(x, limit(i))], "clip_grad_norm_": composed},
        lambda: x.copy_(start),
        rounding=3e-3,
    )


def _cast(x: Tensor) -> Comparison:
    """To bfloat16, as gradients are sent."""
    half = torch.empty_like(x, dtype=torch.bfloat16)
    return Comparison(
        "cast",
        Traffic(x.nbytes, x.nbytes / 2),
        lambda: [reference.cast(host(x), "bfloat16")],
        {
            OURS: lambda _: [kernels.cast(x, "bfloat16", out=half)],
            "copy_": lambda _: [half.copy_(x)],
            ".to": lambda _: [x.to(torch.bfloat16)],
        },
    )


def _reduce(xs: Sequence[Tensor]) -> Comparison:
    """Each array read once, the sum written."""
    out = torch.empty_like(xs[0])

    def chained(_: int) -> list[Tensor]:
        torch.add(xs[0], xs[1], out=out)
        for x in xs[2:]:
            out.add_(x)
        return [out]

    return Comparison(
        "reduce_",
        Traffic(sum(x.nbytes for x in xs), out.nbytes),
        lambda: [reference.reduce([host(x) for x in xs])],
        {
            OURS: lambda _: [kernels.reduce_(out, xs)],
            "add_": chained,
            "stack.sum": lambda _: [torch.stack(list(xs)).sum(0)],
        },
        rounding=1e-5,
    )


def _scatter_add(start: Tensor, packet: Packet) -> Comparison:
    """The packet read; each cache line that it touches read and written."""
    out, (indices, values), lines = start.clone(), packet, touched([packet])
    return Comparison(
        "scatter_add",
        Traffic(8 * indices.numel() + lines, lines),
        lambda: [reference.scatter_add(host(start), host(indices), host(values))],
        {
            OURS: lambda _: [kernels.scatter_add(out, indices, values)],
            "index_add_": lambda _: [out.index_add_(0, indices, values)],
        },
        lambda: out.copy_(start),
    )


def _decode_sum(like: Tensor, packets: Sequence[Packet]) -> Comparison:
    """The packets read, all of the sum written."""
    out, scale = torch.empty_like(like), 1 / len(packets)

    def composed(_: int) -> list[Tensor]:
        out.zero_()
        for indices, values in packets:
            out.index_add_(0, indices, values, alpha=scale)
        return [out]

    return Comparison(
        "decode_sum",
        Traffic(8 * sum(i.numel() for i, _ in packets), out.nbytes),
        lambda: [reference.decode_sum(host(out), [(host(i), host(v)) for i, v in packets], scale)],
        {OURS: lambda _: [kernels.decode_sum(out, packets, scale)], "index_add_": composed},
        rounding=1e-6,
    )


def _momentum_mask(start: Tensor, indices: Tensor) -> Comparison:
    """The indices read; each cache line that they touch, of u and of v, read and written."""
    u, v, lines = start.clone(), start.clone(), 2 * touched([(indices, indices)])
    where = indices.long()
    keep = torch.ones_like(start).index_fill_(0, where, 0)

    def ours(_: int) -> list[Tensor]:
        kernels.momentum_mask(u, v, indices)
        return [u, v]

    def restart() -> None:
        u.copy_(start)
        v.copy_(start)

    return Comparison(
        "momentum_mask",
        Traffic(4 * indices.numel() + lines, lines),
        lambda: reference.momentum_mask(host(start), host(start), host(indices)),
        {
            OURS: ours,
            "index_fill_": lambda _: [x.index_fill_(0, where, 0) for x in (u, v)],
            "mul_ by a mask": lambda _: [x.mul_(keep) for x in (u, v)],
        },
        restart,
    )


def _encoded(x: Tensor) -> list[Comparison]:
    """Raw packets of every fourth element, as early in a warm-up. Encoding reads the pairs and
    writes them behind the header. Unpacking gives views: the header is read."""
    count = x.numel()
    indices = torch.arange(0, count, 4, dtype=torch.int32, device=x.device)
    values = x[::4].clone()
    packet = kernels.encode(indices, values, count)
    workspace, head = torch.empty_like(packet), kernels.packet_bytes(0)
    into, middle = torch.empty_like(packet), packet.numel() - indices.nbytes

    def encoded() -> bytes:
        return reference.encode(host(indices), host(values), count)[0]

    parts = (packet[:head].clone(), *(part.view(torch.uint8) for part in (values, indices)))

    return [
        Comparison(
            "encode",
            Traffic(indices.nbytes + values.nbytes, packet.nbytes),
            lambda: [np.frombuffer(encoded(), np.uint8)],
            {
                OURS: lambda _: [kernels.encode(indices, values, count, out=workspace)],
                "torch.cat": lambda _: [torch.cat(parts, out=into)],
            },
        ),
        Comparison(
            "unpack",
            Traffic(head, 0),
            lambda: reference.unpack(host(packet).tobytes()),
            {
                OURS: lambda _: kernels.unpack(packet),
                "view": lambda _: [
                    packet[middle:].view(torch.int32),
                    packet[head:middle].view(torch.float32),
                ],
            },
            waits=(OURS, "view"),  # for nothing: views are no work for a device, nor for a graph
        ),
    ]
