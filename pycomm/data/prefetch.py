"""pycomm.data.Prefetcher: reads batches ahead in a thread and copies them to the device."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pycomm._arguments import function, integer, refuse
from pycomm._training.arguments import device_of
from pycomm.data.nested import on_tensors

POLL_S = 0.1  # between checks of a blocked thread whether to stop


class Prefetcher:
    """The batches of a loader, up to `depth` of which are prepared in advance.

        for x, y in Prefetcher(loader, "cuda", convert=lambda b: (b[0].float() / 255, b[1])): ...

    Copy uint8 and convert on the device: this transfers a quarter of the bytes.

    Args:
        loader: any iterable of tensors, or lists, tuples and dicts of them; each iteration iterates
            over it once.
        device: the device of the result.
        depth: maximum number of prepared batches; 2 is double buffering.
        convert: applied to each batch on the device; its result is returned.

    Raises:
        InvalidArgument: an argument is invalid.
        Exception: iterating raises an error of the loader, or of `convert`, in place of its batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str = "cpu",
        depth: int = 2,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        if not hasattr(type(loader), "__iter__"):
            refuse("loader", loader, "an iterable of batches")
        if convert is not None:
            function("convert", convert, "a function, or None")
        self._device = device_of("device", device)
        self._loader, self._convert = loader, convert
        self._depth = integer("depth", depth, 1)

    def __len__(self) -> int:
        """The loader's length."""
        return len(self._loader)  # type: ignore[arg-type]  # its TypeError is the right one

    def __iter__(self) -> Iterator[Any]:
        """Iterates once over the loader; raises its errors in place of the batch."""
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
        """The thread's function: runs until the loader ends or the reader stops."""
        last: tuple[str, Any, Any] = ("end", None, None)
        try:
            stream: Any = None
            if self._device.type == "cuda":
                stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            for batch in self._loader:
                if not _put(ready, ("batch", *self._moved(batch, stream)), stop):
                    return
        except BaseException as error:  # raised in the reading thread
            last = ("error", error, None)
        _put(ready, last, stop)

    def _moved(self, batch: Any, stream: torch.cuda.Stream | None) -> tuple[Any, Any]:
        """The batch on the device, and the event of the end of its copy (CUDA)."""
        convert = self._convert or (lambda b: b)
        if stream is None:
            return convert(on_tensors(batch, lambda x: x.to(self._device))), None
        source = torch.cuda.current_stream(self._device)  # of this thread, and the loader

        def move(x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:  # for example the rows of a ScatterLoader, which may not have arrived
                here = x.device == stream.device
                stream.wait_stream(source if here else torch.cuda.current_stream(x.device))
                if here:
                    x.record_stream(stream)
            return _pinned(x).to(self._device, non_blocking=True)

        with torch.cuda.stream(stream):
            there = convert(on_tensors(batch, move))
            return there, stream.record_event()


def _used_on(stream: torch.cuda.Stream, x: torch.Tensor) -> None:
    """Keeps the memory of `x` until the stream has passed this point."""
    x.record_stream(stream)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_cuda or x.is_pinned() else x.pin_memory()


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Waits for space in the queue; False if the reader stopped."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=POLL_S)
            return True
        except queue.Full:  # checks `stop` again
            pass
    return False
