"""A relay between a store and its clients that stops forwarding, or disconnects them."""

import contextlib
import socket
import threading
from collections.abc import Iterator

KEY = "0123456789abcdef"


class Relay:
    """Forwards a port. Once `silent` is set it reads bytes and forwards none; once `drop_replies`
    is set, it closes a connection instead of forwarding a reply; cut() closes all current
    connections. For the tests of stores."""

    def __init__(self, port: int) -> None:
        self.silent = threading.Event()
        self.drop_replies = threading.Event()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # close() closed the listener
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except ConnectionRefusedError:  # no listener there yet, or no more
                    near.close()
                    continue
                self._sockets += [near, far]
                for pair in ((near, far, threading.Event()), (far, near, self.drop_replies)):
                    thread = threading.Thread(target=self._pump, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, drop: threading.Event) -> None:
        with contextlib.suppress(OSError):  # a side ended: end the other one, too
            while (some := source.recv(1 << 16)) and not drop.is_set():
                if not self.silent.is_set():
                    sink.sendall(some)
        for end in (source, sink):
            with contextlib.suppress(OSError):  # closed already
                end.shutdown(socket.SHUT_RDWR)

    def disconnect(self) -> None:
        """Closes all current connections."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # closed by its peer
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.disconnect()
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()


@contextlib.contextmanager
def relayed(port: int) -> Iterator[Relay]:
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
