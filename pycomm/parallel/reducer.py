"""Connects autograd's hooks to buckets: sends a bucket when its last gradient is computed.

    backward    ... gradient of the last layer | ... of the first layer | callback at the end
    reducer     view into bucket 0, add(0)     | view, add(1)           | add the rest, finish
    communicators    bucket 0 in transit ...... | bucket 1 in transit .. |

Buckets are sent in a fixed order, the same on all ranks, whatever order autograd uses. Modules and
collectives are known only through slots and the Exchange.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm._training.communicators import CommunicatorPool, tag_of
from pycomm._training.parameters import unknown_parameter
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group
from pycomm.parallel.buckets import Bucket, Limits, Slot, fuse
from pycomm.parallel.exchange import Exchange, average_rows

_collecting = threading.Lock()  # ranks may be threads


class Reducer:
    """Handles the gradients of `slots`; between backward passes it holds only buckets.

    Attributes:
        parameters: identities of the parameters whose gradients are exchanged.
        buckets: in the order of sending.
        sync: False: gradients accumulate on this rank only.
        passes: number of backward passes whose gradients were exchanged.
        forwards: number of forward passes whose gradients will be exchanged, or were. A rank that
            omits a backward pass has another number than the others.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        exchange: Exchange,
        limits: Limits,
        pool: CommunicatorPool,
        find_unused: bool,
    ) -> None:
        self.parameters = frozenset(id(slot.parameter) for slot in slots)
        self.buckets: list[Bucket] = []
        self.sync = True
        self.passes = self.forwards = 0
        self._slots = list(slots)
        self._exchange, self._limits, self._pool = exchange, limits, pool
        self._find_unused = find_unused
        # The order of gradients in the first pass; None: the buckets are final.
        self._order: list[Slot] | None = None if find_unused else []
        self._passed = False  # there was a first pass
        self._abandoned: list[list[Bucket]] = []  # a lost rank may still write to them
        self._next = 0  # next bucket to send
        self._running = False  # a backward pass has begun
        self._lay_out(self._backwards())
        handles: list[Any] = []
        for slot in self._slots:
            register: Any = slot.parameter.register_post_accumulate_grad_hook
            handles.append(register(_Hook(self, slot)))
        weakref.finalize(self, _remove, handles)

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._pool.group

    def check_known(self, module: nn.Module) -> None:
        """Raises InvalidArgument if a gradient of the module would not be exchanged."""
        name = unknown_parameter(module, self.parameters)
        if name is not None:
            raise InvalidArgument(
                f"DataParallel: parameter {name!r} was added, replaced or set to require gradients "
                "after the model was wrapped, so its gradient would stay on this rank: wrap the "
                "model again"
            )

    def prepare(self) -> None:
        """Call it before a forward pass whose gradients will be exchanged. Collective the second
        time."""
        if self._running:  # the last backward pass raised
            self._exchange.cancel()
            self._reset()
            if self._order is not None:  # not agreed on yet
                self._order = []
        if self._passed and self._order is not None:
            self._agree_on_order()

    def resume(self, passes: int, src: int) -> None:
        """Makes the buckets of rank `src` in the pool's new group; drops all gradients.
        Collective."""
        order = torch.tensor([s.place for bucket in self.buckets for s in bucket.slots])
        collectives.broadcast(order, src, group=self.group)
        self._order = None
        for slot in self._slots:
            slot.parameter.grad = slot.view = None
        self._abandoned.append(self.buckets)
        self._lay_out([self._slots[place] for place in order.tolist()])
        self._reset()
        self._passed, self.passes, self.forwards = True, passes, passes

    def idle_pass(self) -> None:
        """Takes part in a backward pass of the other ranks, with gradients of zero, after
        prepare()."""
        self.forwards += 1
        self._exchange.idle = True
        for slot in self._slots:
            slot.parameter.grad = None
        self._finish()

    def _agree_on_order(self) -> None:
        """Makes new buckets in the order in which rank 0's gradients were computed."""
        assert self._order is not None
        usual = self._backwards()
        known = len(self._order) == len(usual)
        order = torch.tensor([s.place for s in self._order] if known else [-1] * len(usual))
        collectives.broadcast(order, 0, group=self.group)
        self._order = None
        places = order.tolist()
        if places and places[0] >= 0 and places != [slot.place for slot in usual]:
            self._lay_out([self._slots[place] for place in places])

    def _backwards(self) -> list[Slot]:
        """The slots of buckets, from the last layer to the first."""
        return [slot for slot in self._slots[::-1] if not slot.sparse]

    def _lay_out(self, order: list[Slot]) -> None:
        self.buckets = [Bucket(slots, self.group) for slots in fuse(order, self._limits)]

    def ready(self, slot: Slot) -> None:
        """Autograd's hook: the gradient of `slot` is computed."""
        parameter, view = slot.parameter, slot.view
        gradient = parameter.grad
        assert gradient is not None
        if view is not None and gradient is not view:
            _adopt(slot, gradient, view)
        if not self.sync:
            return
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if slot.done:
            raise InvalidArgument(
                f"parameter {slot.name!r} got a second gradient in one backward pass: run all but "
                "the last under no_sync(), and checkpoint with use_reentrant=False"
            )
        slot.done = True
        if view is None:
            return
        if self._order is not None:
            self._order.append(slot)
        bucket = slot.bucket
        assert bucket is not None
        bucket.watch_parameters()
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send_full()

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            bucket.watch_parameters()
            self._pool.tag = tag_of(self.forwards, bucket.check)
            lacking = {p for p in bucket.parameters if p.grad is None} if self._find_unused else ()
            self._exchange.add(bucket.flat, bucket.parameters, bucket.views, lacking)
            self._next += 1

    def _finish(self) -> None:
        """The end of a backward pass: missing gradients count as zero; waits for the exchange."""
        unused = [slot for slot in self._slots if not slot.done]
        try:
            for slot in unused:
                if slot.view is not None and slot.parameter.grad is not slot.view:
                    slot.view.zero_()
            for bucket in self.buckets:
                bucket.missing = 0
            self._send_full()
            used = self._used_anywhere() if self._find_unused else [True] * len(self._slots)
            sparse = self._average_sparse(used)
            unused_anywhere = {slot.parameter for slot in unused if not used[slot.place]}
            self._exchange.finish(unused_anywhere, sparse)
            self.passes += 1
        finally:
            idle = self._exchange.idle
            self._reset()
            self._passed = True
        for slot in unused:
            if slot.view is not None and used[slot.place]:
                slot.parameter.grad = slot.view
        if unused and not self._find_unused and not idle:
            raise InvalidArgument(
                f"{len(unused)} of {len(self._slots)} parameters got no gradient, the first is "
                f"{unused[0].name!r}: if that is intended, pass "
                "find_unused_parameters=True"
            )

    def _used_anywhere(self) -> list[bool]:
        """By slot: whether any rank has a gradient for it."""
        here = [slot.parameter.grad is not None for slot in self._slots]
        used = torch.tensor(here, dtype=torch.uint8)
        collectives.all_reduce(used, "max", group=self.group)
        found: list[bool] = used.bool().tolist()
        return found

    def _average_sparse(self, used: Sequence[bool]) -> list[Tensor]:
        """Returns the averages."""
        averages = []
        for slot in self._slots:
            if slot.sparse and used[slot.place]:
                mine = slot.parameter.grad
                if mine is not None and not mine.is_sparse:
                    raise Unsupported(f"the gradient of {slot.name!r} was expected to be sparse")
                average = average_rows(mine, slot.parameter.detach(), self.group)
                slot.parameter.grad = average
                averages.append(average)
        return averages

    def _reset(self) -> None:
        for slot in self._slots:
            slot.done = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
        self._next, self._running, self._exchange.idle = 0, False, False
        self._pool.tag = 0


def check_unwrapped(slots: Sequence[Slot]) -> None:
    """Raises InvalidArgument if a live Reducer already exchanges the gradient of a slot."""
    if _first_wrapped(slots) is None:
        return
    with _collecting:  # gc.collect() returns at once while another thread collects
        gc.collect()  # a deleted wrapper may be part of a reference cycle
    slot = _first_wrapped(slots)
    if slot is not None:
        raise InvalidArgument(
            f"DataParallel: parameter {slot.name!r} belongs to another live DataParallel, which "
            "already exchanges its gradient; use that one, or first delete it (del model) or close "
            "its group"
        )


def _first_wrapped(slots: Sequence[Slot]) -> Slot | None:
    for slot in slots:
        hooks: Any = slot.parameter._post_accumulate_grad_hooks
        for hook in (hooks or {}).values():
            reducer = hook.reducer() if isinstance(hook, _Hook) else None
            if reducer is not None and reducer.group._store is not None:  # it is open
                return slot
    return None


def _adopt(slot: Slot, gradient: Tensor, view: Tensor) -> None:
    """Moves a gradient that autograd computed into its bucket."""
    if gradient.is_sparse:
        raise Unsupported(
            f"parameter {slot.name!r} has a sparse gradient outside nn.Embedding and EmbeddingBag"
        )
    if gradient.requires_grad:
        raise Unsupported("create_graph=True: gradients of gradients are not exchanged")
    view.copy_(gradient)
    slot.parameter.grad = view


class _Hook:
    """Autograd's hook of a parameter. It does not keep the reducer alive."""

    def __init__(self, reducer: Reducer, slot: Slot) -> None:
        self.reducer, self._slot = weakref.ref(reducer), slot

    def __call__(self, _: Tensor) -> None:
        found = self.reducer()
        if found is not None:
            found.ready(self._slot)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
