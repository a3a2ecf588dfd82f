"""The kernels of `pycomm.kernels` that training joins into larger ones, each alone beside torch.

A contest is one kernel on float32 arrays of its own: the bytes that nobody who does this can spare,
the reference's result, pycomm's call and those of torch's operations. pycomm must give that result
bit by bit; the others the same numbers, up to what another order of sums rounds. Nothing here is
timed: that is kernels.py, which calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pycomm import kernels, reference

OURS = "pycomm"
LINE = 64
"""Bytes of a cache line."""
Array = Any  # of NumPy
Packet = tuple[Array, Array]
Call = Callable[[int], Any]


class Traffic(NamedTuple):
    """Bytes that have to come from memory and go there, whoever does it."""

    read: float
    written: float


@dataclass(frozen=True)
class Contest:
    """Calls are given the number of the step and return their result: arrays in a list."""

    kernel: str
    traffic: Traffic
    wanted: Callable[[], Sequence[Array]]  # of step 0 after restart()
    calls: dict[str, Call]
    restart: Callable[[], None] = lambda: None
    rounding: float = 0  # of torch's results, beside the largest magnitude of the reference's


def touched(packets: Sequence[Packet]) -> int:
    """Bytes of the cache lines of a float32 array in which the packets have an index."""
    places = np.concatenate([indices for indices, _ in packets])
    return LINE * int(np.unique(places // (LINE // 4)).size)


def wrong(contest: Contest) -> str:
    """Who differs from the reference, else ""."""
    wanted = [np.asarray(x).reshape(-1) for x in contest.wanted()]
    for peer, call in contest.calls.items():
        contest.restart()
        found = [_numpy(x).reshape(-1) for x in call(0)]
        pairs = zip(found, wanted, strict=True)
        if peer == OURS:
            same = all(a.tobytes() == b.tobytes() for a, b in pairs)
        else:
            same = all(_near(a, b, contest.rounding) for a, b in pairs)
        if not same:
            return f"{contest.kernel}: {peer} and the reference differ"
    contest.restart()
    return ""


def contests(x: Array, packets: Sequence[Packet], gradients: Sequence[Array]) -> list[Contest]:
    """All of them, on copies of x [count]; packets have its indices, gradients its shape."""
    k = packets[0][0].size
    return [
        _threshold(x.copy(), k),
        _norm(x.copy()),
        _clip(x),
        _cast(x.copy()),
        _reduce(gradients),
        _scatter_add(x, packets[0]),
        _decode_sum(x.size, packets),
        _momentum_mask(x, packets[0][0]),
        *_encoded(x),
    ]


def _threshold(x: Array, k: int) -> Contest:
    other, room = torch.from_numpy(x), kernels.topk_workspace(x, k)
    return Contest(
        "threshold",
        Traffic(x.nbytes, 4),
        lambda: [reference.threshold(x, k)],
        {
            OURS: lambda _: [kernels.threshold(x, k, workspace=room)],
            "torch.topk": lambda _: [other.abs().topk(k, sorted=False).values.min()],
        },
    )


def _norm(x: Array) -> Contest:
    other, room = torch.from_numpy(x), kernels.norm_workspace(x)
    norm = torch.linalg.vector_norm
    return Contest(
        "norm",
        Traffic(x.nbytes, 8),
        lambda: [reference.norm(x)],
        {
            OURS: lambda _: [kernels.norm(x, workspace=room)],
            "vector_norm": lambda _: [norm(other)],
            "in float64": lambda _: [norm(other, dtype=torch.float64)],
        },
        rounding=3e-3,  # float32 sums of 2^24 squares
    )


def _clip(start: Array) -> Contest:
    """Read for the norm, then read and written. The limit sinks: pycomm leaves alone what is under
    it."""
    x, before = start.copy(), float(np.linalg.norm(start))
    parameter = torch.nn.Parameter(torch.from_numpy(x))
    parameter.grad = torch.from_numpy(x)

    def limit(step: int) -> float:
        return before * 0.9 ** (step + 1)

    def composed(step: int) -> list[Array]:
        torch.nn.utils.clip_grad_norm_([parameter], limit(step))
        return [x]

    return Contest(
        "clip_",
        Traffic(2 * x.nbytes, x.nbytes),
        lambda: [reference.clip(start, limit(0))],
        {OURS: lambda i: [kernels.clip_(x, limit(i))], "clip_grad_norm_": composed},
        lambda: np.copyto(x, start),
        rounding=3e-3,
    )


def _cast(x: Array) -> Contest:
    """To bfloat16, as gradients travel."""
    other = torch.from_numpy(x)
    half = torch.empty(x.size, dtype=torch.bfloat16)
    return Contest(
        "cast",
        Traffic(x.nbytes, x.nbytes / 2),
        lambda: [reference.cast(x, "bfloat16")],
        {
            OURS: lambda _: [kernels.cast(other, "bfloat16", out=half)],
            "copy_": lambda _: [half.copy_(other)],
            ".to": lambda _: [other.to(torch.bfloat16)],
        },
    )


def _reduce(xs: Sequence[Array]) -> Contest:
    """Each array read once, the sum written."""
    out, others = np.empty_like(xs[0]), [torch.from_numpy(x) for x in xs]
    summed = torch.from_numpy(out)

    def chained(_: int) -> list[torch.Tensor]:
        torch.add(others[0], others[1], out=summed)
        for other in others[2:]:
            summed.add_(other)
        return [summed]

    return Contest(
        "reduce_",
        Traffic(sum(x.nbytes for x in xs), out.nbytes),
        lambda: [reference.reduce(xs)],
        {
            OURS: lambda _: [kernels.reduce_(out, xs)],
            "add_": chained,
            "stack.sum": lambda _: [torch.stack(others).sum(0)],
        },
        rounding=1e-5,
    )


def _scatter_add(start: Array, packet: Packet) -> Contest:
    """The packet read; each cache line that it touches read and written."""
    out, (indices, values), lines = start.copy(), packet, touched([packet])
    other, where, what = (torch.from_numpy(x) for x in (out, indices, values))
    return Contest(
        "scatter_add",
        Traffic(8 * indices.size + lines, lines),
        lambda: [reference.scatter_add(start, indices, values)],
        {
            OURS: lambda _: [kernels.scatter_add(out, indices, values)],
            "index_add_": lambda _: [other.index_add_(0, where, what)],
        },
        lambda: np.copyto(out, start),
    )


def _decode_sum(count: int, packets: Sequence[Packet]) -> Contest:
    """The packets read, all of the sum written."""
    out, scale = np.empty(count, np.float32), 1 / len(packets)
    other = torch.from_numpy(out)
    pairs = [(torch.from_numpy(i), torch.from_numpy(v)) for i, v in packets]

    def composed(_: int) -> list[torch.Tensor]:
        other.zero_()
        for where, what in pairs:
            other.index_add_(0, where, what, alpha=scale)
        return [other]

    return Contest(
        "decode_sum",
        Traffic(8 * sum(i.size for i, _ in packets), out.nbytes),
        lambda: [reference.decode_sum(out, packets, scale)],
        {OURS: lambda _: [kernels.decode_sum(out, packets, scale)], "index_add_": composed},
    )


def _momentum_mask(start: Array, indices: Array) -> Contest:
    """The indices read; each cache line that they touch, of u and of v, read and written."""
    u, v, lines = start.copy(), start.copy(), 2 * touched([(indices, indices)])
    tensors, where = (torch.from_numpy(u), torch.from_numpy(v)), torch.from_numpy(indices).long()
    keep = torch.ones(start.size).index_fill_(0, where, 0)

    def ours(_: int) -> list[Array]:
        kernels.momentum_mask(u, v, indices)
        return [u, v]

    def restart() -> None:
        np.copyto(u, start)
        np.copyto(v, start)

    return Contest(
        "momentum_mask",
        Traffic(4 * indices.size + lines, lines),
        lambda: reference.momentum_mask(start, start, indices),
        {
            OURS: ours,
            "index_fill_": lambda _: [t.index_fill_(0, where, 0) for t in tensors],
            "mul_ by a mask": lambda _: [t.mul_(keep) for t in tensors],
        },
        restart,
    )


def _encoded(x: Array) -> list[Contest]:
    """Raw packets of every fourth element, a ramp's first: enough bytes to see the memory. Encoding
    reads the pairs and writes them behind the header. Unpacking gives views: the header is read."""
    indices = np.arange(0, x.size, 4, dtype=np.int32)
    values = np.ascontiguousarray(x[::4])
    packet = kernels.encode(indices, values, x.size)
    room, head = np.empty_like(packet), kernels.packet_bytes(0)
    other, into = torch.from_numpy(packet), torch.empty(packet.size, dtype=torch.uint8)
    middle = packet.size - indices.nbytes
    parts = (
        other[:head].clone(),
        *(torch.from_numpy(p).view(torch.uint8) for p in (values, indices)),
    )
    return [
        Contest(
            "encode",
            Traffic(indices.nbytes + values.nbytes, packet.nbytes),
            lambda: [np.frombuffer(reference.encode(indices, values, x.size)[0], np.uint8)],
            {
                OURS: lambda _: [kernels.encode(indices, values, x.size, out=room)],
                "torch.cat": lambda _: [torch.cat(parts, out=into)],
            },
        ),
        Contest(
            "unpack",
            Traffic(head, 0),
            lambda: reference.unpack(packet.tobytes()),
            {
                OURS: lambda _: kernels.unpack(packet),
                "view": lambda _: [
                    other[middle:].view(torch.int32),
                    other[head:middle].view(torch.float32),
                ],
            },
        ),
    ]


def _numpy(x: Any) -> Array:
    if isinstance(x, torch.Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    return np.asarray(x)


def _near(found: Array, wanted: Array, rounding: float) -> bool:
    atol = rounding * float(np.abs(wanted).max(initial=0))
    return bool(np.allclose(found, wanted, rtol=0, atol=atol))
