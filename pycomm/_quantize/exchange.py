"""The quantized all-reduce of one array, in stages, so that several can overlap."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pycomm import _core
from pycomm._arguments import shown
from pycomm._core_api import arrays
from pycomm._core_api.arrays import ArrayRef
from pycomm._core_api.calls import Waitable, Work, limit
from pycomm._quantize.layout import Layout
from pycomm._quantize.options import Quantize
from pycomm._quantize.state import Feedback, QuantizeState
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group
from pycomm.kernels import quantized


class Transport(Protocol):
    """Starts transfers of bytes, in the same order on all ranks: a CommunicatorPool, or one
    group."""

    def all_to_all_v(
        self, x: Any, out: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Waitable:
        """See CommunicatorPool."""

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Waitable:
        """See CommunicatorPool."""


class QuantizedExchange:
    """One all-reduce: start(), sum_up() and finish(), then feedback.turn(), if it is complete.

    Args:
        options: bits in both phases.
        layout: the blocks of the array.
        feedback: of this layout; None: no error feedback.
        transport: the ranks.
        scale: factor of the sums.

    Attributes:
        sent_bytes: bytes that this rank sent to other ranks in both phases, as one copy.
    """

    def __init__(
        self,
        options: Quantize,
        layout: Layout,
        feedback: Feedback | None,
        transport: Transport,
        scale: float,
    ) -> None:
        self._options, self._layout, self._transport = options, layout, transport
        self._scale = scale
        self._feedback = feedback
        self._works: list[Waitable] = []
        self._like: ArrayRef | None = None
        self._received: Any = None
        self.sent_bytes = 0

    def start(self, x: Any) -> None:
        """Quantizes x and starts the all-to-all. Does not keep x."""
        self._like = _like(x)
        layout, bits, feedback = self._layout, self._options.bits, self._feedback
        before, after = (None, None) if feedback is None else (feedback.current, feedback.next)
        packets = quantized.encode(
            x,
            bits,
            before and before[0],
            self._empty(layout.blocks.nbytes(bits)),
            lost=after and after[0],
            blocks=layout.blocks,
        )
        sizes = layout.sizes(bits)
        own = sizes[layout.rank]
        self._received = self._empty(own * layout.size)
        self._works.append(
            self._transport.all_to_all_v(packets, self._received, sizes, [own] * layout.size)
        )
        self.sent_bytes = len(packets) - own

    def sum_up(self) -> None:
        """Waits for the packets of this owner, adds them and starts the all-gather."""
        layout, options, feedback = self._layout, self._options, self._feedback
        self._works[-1].wait()
        total = self._empty(layout.own_count, "float32")
        for rank, packet in enumerate(self._received.reshape(layout.size, -1)):
            quantized.decode(
                packet,
                options.bits,
                total,
                accumulate=rank > 0,
                blocks=layout.own_blocks,
                check=False,  # the check of what owners send finds all
            )
        before, after = (None, None) if feedback is None else (feedback.current, feedback.next)
        packet = quantized.encode(
            total,
            options.down_bits,
            before and before[1],
            self._empty(layout.own_blocks.nbytes(options.down_bits)),
            lost=after and after[1],
            blocks=layout.own_blocks,
        )
        sizes = layout.sizes(options.down_bits)
        self._received = self._empty(sum(sizes))
        self._works.append(self._transport.all_gather_v(packet, self._received, sizes))
        self.sent_bytes += len(packet)

    def finish(self, out: Any) -> bool:
        """Waits for the sums and writes scale * sum to `out`.

        Returns:
            Whether all sums are finite, which is the same on all ranks.
        """
        self._works[-1].wait()
        bits, blocks = self._options.down_bits, self._layout.blocks
        finite = quantized.decode(self._received, bits, out, scale=self._scale, blocks=blocks)
        for work in self._works:
            work.wait_for_device()
        return finite

    def cancel(self) -> None:
        """Waits for the transfers that were started; a failed one is complete, too."""
        for work in self._works:
            with contextlib.suppress(Exception):  # the pass failed, and its error was raised
                work.wait_for_device()

    def _empty(self, count: int, dtype: str = "uint8") -> Any:
        """An array where x is."""
        assert self._like is not None
        return arrays.new(self._like, (count,), dtype)


def _like(x: Any) -> ArrayRef:
    """A small array where x is; does not keep x."""
    found = arrays.as_array_ref(x, "x")
    if found.device.kind == "cpu":
        return _HOST
    return arrays.as_array_ref(arrays.new(found, (1,), "uint8"), "an array")


_HOST = arrays.as_array_ref(np.empty(0, np.uint8), "an array")


class _GroupTransport:
    """Transfers in one group that end by a deadline."""

    def __init__(self, group: Group, timeout_s: float | None) -> None:
        self._group = group
        self._end = None if timeout_s is None else time.monotonic() + limit(timeout_s)

    def all_to_all_v(
        self, x: Any, out: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Work:
        return self._start("all_to_all", x, out, [*send_counts, *recv_counts])

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        return self._start("all_gather", x, out, counts)

    def _start(self, verb: str, x: Any, out: Any, counts: Sequence[int]) -> Work:
        timeout_s = None if self._end is None else max(self._end - time.monotonic(), 1e-3)
        work: Work = _core.Call(verb, counts=counts, timeout_s=timeout_s)(
            self._group, x, out, out, True
        )
        return work


@functools.lru_cache(64)
def _layout(count: int, rank: int, size: int) -> Layout:
    return Layout([(count, 0)], rank, size)


def all_reduce(
    x: Any,
    op: Any,
    compression: Quantize | None,
    state: QuantizeState | None,
    group: Group,
    timeout_s: float | None,
) -> Any:
    """pycomm.all_reduce with `compression`."""
    if not isinstance(compression, Quantize):
        raise InvalidArgument(
            f"all_reduce: invalid compression: got {shown(compression)}, expected pycomm.Quantize()"
        )
    if compression.exchange == "auto_time":
        raise InvalidArgument(
            'all_reduce: invalid exchange: got "auto_time", expected "sharded" or "auto": '
            "DataParallel and LocalSGD choose by time"
        )
    if state is not None and not isinstance(state, QuantizeState):
        raise InvalidArgument(
            f"all_reduce: invalid state: got {type(state).__name__}, expected one of "
            "compression.state()"
        )
    name = _core.reduce_op_name(op)
    if name not in ("sum", "avg"):
        raise Unsupported(f'all_reduce: compression needs op "sum" or "mean", got {op!r}')
    found = arrays.as_array_ref(x, "x", write=True)
    quantized.check_array(found, "all_reduce with compression")
    if group.size == 1 or found.count == 0:
        return x
    layout = _layout(found.count, group.rank, group.size)
    feedback = None
    if compression.error_feedback and state is not None:
        feedback = state.feedback(layout, found)
    transport = _GroupTransport(group, timeout_s)
    scale = 1.0 / group.size if name == "avg" else 1.0
    exchange = QuantizedExchange(compression, layout, feedback, transport, scale)
    exchange.start(x)
    exchange.sum_up()
    if exchange.finish(x) and feedback is not None:
        feedback.turn()
    return x
