"""Reads ahead in a thread and moves batches to the device meanwhile. Called by users."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pycomm.data.nested import on_tensors
from pycomm.errors import InvalidArgument

__all__ = ["Prefetcher"]

LOOK_S = 0.1  # how often a thread that cannot go on sees whether it still should


class Prefetcher:
    """The batches of a loader, `depth` of which are ready before they are asked for.

        for x, y in Prefetcher(loader, "cuda", convert=lambda b: (b[0].float() / 255, b[1])): ...

    Send uint8 and convert on the device: a quarter of the bytes on the way.

    Args:
        loader: any iterable of tensors, or lists, tuples and dicts of them; iterated once per
            iteration of this.
        device: where the tensors go.
        depth: how many batches wait at most; 2 is double buffering.
        convert: called with each batch once it is on the device; what it returns is given.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str = "cpu",
        depth: int = 2,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        if depth < 1:
            raise InvalidArgument(f"depth={depth}: at least 1")
        self._loader, self._device = loader, torch.device(device)
        self._depth, self._convert = depth, convert

    def __len__(self) -> int:
        """The loader's."""
        return len(self._loader)  # type: ignore[arg-type]  # its TypeError is the right one

    def __iter__(self) -> Iterator[Any]:
        """One pass over the loader. Its errors are raised where their batch would have come."""
        ready: queue.Queue[tuple[str, Any, Any]] = queue.Queue(self._depth)
        stop = threading.Event()
        reader = threading.Thread(target=self._read, args=(ready, stop), daemon=True)
        reader.start()
        try:
            while True:
                kind, batch, moved = ready.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise batch
                if moved is not None:
                    stream = torch.cuda.current_stream(self._device)
                    stream.wait_event(moved)
                    on_tensors(batch, functools.partial(_used_on, stream))
                yield batch
        finally:
            stop.set()
            reader.join()

    def _read(self, ready: queue.Queue[tuple[str, Any, Any]], stop: threading.Event) -> None:
        """The thread's work, until the loader ends or nobody wants more."""
        last: tuple[str, Any, Any] = ("end", None, None)
        try:
            stream: Any = None
            if self._device.type == "cuda":
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            for batch in self._loader:
                if not _put(ready, ("batch", *self._moved(batch, stream)), stop):
                    return
        except BaseException as error:  # goes to whoever reads
            last = ("error", error, None)
        _put(ready, last, stop)

    def _moved(self, batch: Any, stream: torch.cuda.Stream | None) -> tuple[Any, Any]:
        """The batch on the device, and the event after which it is there (CUDA)."""
        convert = self._convert or (lambda b: b)
        if stream is None:
            return convert(on_tensors(batch, lambda x: x.to(self._device))), None
        with torch.cuda.stream(stream):
            there = on_tensors(batch, lambda x: _pinned(x).to(self._device, non_blocking=True))
            there = convert(there)
            return there, stream.record_event()


def _used_on(stream: torch.cuda.Stream, x: torch.Tensor) -> None:
    """Its memory is not given away before the stream has passed this point."""
    x.record_stream(stream)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_cuda or x.is_pinned() else x.pin_memory()


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Waits for room; False where nobody wants the item any more."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=LOOK_S)
            return True
        except queue.Full:  # looks at `stop` again
            pass
    return False
