"""A link with a round-trip time between two hosts of pycomm.bench.support.netns, for benchmarks.

    with Network(2, links=0) as net, DelayedLink(*net.hosts) as line:
        line.set(0.05)  # seconds there and back

Each host gets the interface eth0, a TUN device. A separate process forwards the packets of each to
the other after half a round trip. Has the requirements of netns.py, and needs /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from pycomm.bench.support.netns import Host, enter

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
LARGEST = 1 << 16  # bytes of a packet


class DelayedLink:
    """The link between two hosts; without delay until set()."""

    def __init__(self, near: Host, far: Host) -> None:
        self._hosts = near, far
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DelayedLink:
        """Makes the link. Raises OSError if the kernel has no TUN devices."""
        names = [host.name for host in self._hosts]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.reliability.delayed_link", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if self._answer() != "made":
                raise OSError("no TUN devices could be made: the process that does has ended")
            for host in self._hosts:
                host.ip("addr", "add", f"{host.ipv4()}/24", "dev", "eth0")
                host.ip("link", "set", "eth0", "up")
        except BaseException:  # Ctrl-C too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, and with it both interfaces."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def set(self, round_trip_s: float) -> None:
        """Delays packets from now on by half of this."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{round_trip_s}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _open(namespace: str) -> int:
    enter(namespace)
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return descriptor


def _forward(ends: tuple[int, int]) -> None:
    """Forwards until the parent ends this process or closes its input."""
    delay_s = 0.0
    waiting: deque[tuple[float, int, bytes]] = deque()
    incoming = select.poll()
    for descriptor in (*ends, sys.stdin.fileno()):
        incoming.register(descriptor, select.POLLIN)
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a full queue drops it, as on any line
                os.write(end, packet)
        left_ms = (waiting[0][0] - now) * 1e3 if waiting else None
        for descriptor, _ in incoming.poll(left_ms):
            if descriptor not in other:
                line = sys.stdin.readline()
                if not line:
                    return
                delay_s = float(line) / 2
                print("set", flush=True)
                continue
            with contextlib.suppress(BlockingIOError):  # no more packets
                while True:
                    packet = os.read(descriptor, LARGEST)
                    waiting.append((time.monotonic() + delay_s, other[descriptor], packet))


if __name__ == "__main__":
    made = _open(sys.argv[1]), _open(sys.argv[2])
    print("made", flush=True)
    _forward(made)
