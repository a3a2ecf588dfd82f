"""A link with delay, rate and loss between hosts of pycomm.bench.support.netns.

    with Network(2, links=0) as net, DelayedLink(net.hosts) as link:
        link.set(LinkSettings(delay_s=0.05, bytes_per_s=125e6, loss=0.001))

Each host gets the interface eth0, a TUN device. A separate process forwards the IPv4 packets, as a
router does: in each direction of each host a token bucket limits the rate, and a queue of limited
size drops what does not fit. The kernel passes up to 64 KiB of one TCP connection at once, as
network cards do (TSO and GRO), so one thread forwards several Gbit/s. Loss and rate still apply to
packets of the MTU. Has the requirements of netns.py, and needs /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import inet_aton

from benchmarks.support.command import ROOT
from pycomm.bench.support import netns
from pycomm.bench.support.netns import Host, enter

TUN = Path("/dev/net/tun")
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02

VNET = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, type, header, segment, checksum
GSO_TCPV4 = 1
TCP_FIN_PSH = 0x09
ETHERNET = 14  # bytes in front of each packet, which count as in tc
LARGEST = VNET.size + (1 << 16)  # bytes that one read returns
READS = 16  # packets of a host before the next host
WAITING = "10000"  # packets between the kernel and this process, which the model does not have
BURST = 256 << 10  # bytes of a token bucket, as in Network.shape()


@dataclass(frozen=True)
class LinkSettings:
    """The same for every host, in both directions.

    Args:
        delay_s: one way.
        bytes_per_s: of each host, including headers; 0: no limit.
        loss: the share of packets that are dropped at random.
        seed: of the loss.
        queue_bytes: at a host's rate limit; 0: the bandwidth-delay product of a round trip, at
            least BURST.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    seed: int = 0
    queue_bytes: float = 0.0

    def queue_s(self) -> float:
        """Seconds in which a full queue is sent."""
        round_trip_bytes = 2 * self.delay_s * self.bytes_per_s
        return max(self.queue_bytes or round_trip_bytes, BURST) / self.bytes_per_s


class DelayedLink:
    """The link between some hosts; without delay, limit and loss until set()."""

    def __init__(self, hosts: Sequence[Host], mtu: int = 1500) -> None:
        self._hosts, self._mtu = hosts, mtu

    def __enter__(self) -> DelayedLink:
        """Makes the link. Raises OSError if the kernel has no TUN devices."""
        command = [sys.executable, "-m", "benchmarks.support.delayed_link"]
        command += [f"{host.name}={host.ipv4()}" for host in self._hosts]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        try:
            if self._answer() != "made":
                raise OSError("no TUN devices could be made: the process that does has ended")
            for host in self._hosts:
                host.ip("addr", "add", f"{host.ipv4()}/24", "dev", "eth0")
                host.ip("link", "set", "eth0", "mtu", str(self._mtu), "txqueuelen", WAITING, "up")
        except BaseException:  # Ctrl-C too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process, and with it the interfaces."""
        self._process.kill()
        self._process.communicate()

    def set(self, settings: LinkSettings) -> None:
        """Applies to packets from now on. Forgets the state of the random loss."""
        print(json.dumps(asdict(settings)), file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def missing() -> str:
    """The reason why a delayed link is impossible on this machine, or ""."""
    return netns.missing() or ("" if TUN.exists() else f"needs {TUN}")


class Packet:
    """What a TUN device passes: a virtio_net_hdr and an IPv4 packet, of one or more segments."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        _, kind, _, self.segment, _, _ = VNET.unpack_from(data)
        self.length = len(data) - VNET.size  # without the virtio_net_hdr
        self.source, self.target = data[22:26], data[26:30]
        self.ip = (data[VNET.size] & 0x0F) * 4
        self.segments, self.headers = 1, 0
        if kind & 0x7F == GSO_TCPV4:
            self.headers = self.ip + (data[VNET.size + self.ip + 12] >> 4) * 4
            self.segments = max(1, math.ceil((self.length - self.headers) / self.segment))

    def wire_bytes(self) -> int:
        """Bytes of all segments, each with its headers."""
        return self.length + (self.segments - 1) * self.headers + self.segments * ETHERNET

    def without(self, lost: Sequence[int]) -> list[Packet]:
        """The runs of segments between the lost ones, whose indices ascend."""
        ends = [-1, *lost, self.segments]
        runs = [(begin + 1, end) for begin, end in itertools.pairwise(ends)]
        return [self._run(begin, end) for begin, end in runs if begin < end]

    def _run(self, begin: int, end: int) -> Packet:
        if end - begin == self.segments:
            return self
        first, last = begin * self.segment, min(end * self.segment, self.length - self.headers)
        head, tcp = bytearray(self.data[: VNET.size + self.headers]), VNET.size + self.ip
        if end - begin == 1:
            head[1:2], head[4:6] = b"\0", b"\0\0"  # one segment: neither GSO type nor size
        length = self.headers + last - first
        struct.pack_into("!H", head, VNET.size + 2, length)
        struct.pack_into("!H", head, VNET.size + 10, 0)
        struct.pack_into("!H", head, VNET.size + 10, 0xFFFF - _sum(head[VNET.size : tcp]))
        (sequence,) = struct.unpack_from("!I", head, tcp + 4)
        struct.pack_into("!I", head, tcp + 4, (sequence + first) % (1 << 32))
        if end < self.segments:
            head[tcp + 13] &= ~TCP_FIN_PSH
        # The checksum field has the sum of the pseudo header, which includes the length.
        (pseudo,) = struct.unpack_from("!H", head, tcp + 16)
        struct.pack_into("!H", head, tcp + 16, (pseudo + length - self.length) % 0xFFFF)
        data = VNET.size + self.headers
        return Packet(bytes(head) + self.data[data + first : data + last])


def _sum(header: bytearray) -> int:
    """In one's complement, as in a checksum."""
    words: tuple[int, ...] = struct.unpack(f"!{len(header) // 2}H", header)
    return sum(words) % 0xFFFF


class Router:
    """Decides when each packet arrives, and which are dropped. Times are monotonic seconds."""

    def __init__(self, addresses: Sequence[bytes]) -> None:
        self._waiting: dict[bytes, deque[tuple[float, bytes]]] = {a: deque() for a in addresses}
        self.set(LinkSettings())

    def set(self, settings: LinkSettings) -> None:
        """Applies to packets from now on."""
        self._settings = settings
        # The time at which the last packet of a host has been sent, by address and direction.
        self._sent_at: dict[tuple[bytes, str], float] = {}
        self._random = random.Random(settings.seed)
        self._kept = self._until_loss()

    def put(self, data: bytes, now: float) -> None:
        """Takes a packet of a host."""
        if len(data) < VNET.size + 20 or data[VNET.size] >> 4 != 4:
            return  # IPv6: hosts have IPv4 addresses only
        packet = Packet(data)
        if packet.target not in self._waiting:
            return
        for part in packet.without([*self._lost(packet.segments)]):
            self._forward(part, now)

    def take(self, now: float) -> Iterator[tuple[bytes, bytes]]:
        """The packets that arrive until `now`, each after the address of its host."""
        for address, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= now:
                yield address, waiting.popleft()[1]

    def next_s(self) -> float | None:
        """When the next packet arrives; None: none is on its way."""
        return min((waiting[0][0] for waiting in self._waiting.values() if waiting), default=None)

    def _forward(self, packet: Packet, now: float) -> None:
        arrives = now
        if self._settings.bytes_per_s:
            took = packet.wire_bytes() / self._settings.bytes_per_s
            begins = now - BURST / self._settings.bytes_per_s
            places = (packet.source, "out"), (packet.target, "in")
            ends = {}
            for place in places:
                begins = max(begins, self._sent_at.get(place, begins))
                ends[place] = begins + took
            if begins - now > self._settings.queue_s():
                return
            self._sent_at |= ends
            arrives = max(now, begins + took)
        self._waiting[packet.target].append((arrives + self._settings.delay_s, packet.data))

    def _lost(self, segments: int) -> Iterator[int]:
        """The indices of the next packets that are lost, of so many."""
        at = self._kept
        while at < segments:
            yield int(at)
            at += 1 + self._until_loss()
        self._kept = at - segments

    def _until_loss(self) -> float:
        """The number of packets that are not lost before the next one that is."""
        loss = self._settings.loss
        if loss <= 0:
            return math.inf
        if loss >= 1:
            return 0
        return math.floor(math.log(1 - self._random.random()) / math.log1p(-loss))


def _open(namespace: str) -> int:
    enter(namespace)
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return descriptor


def _forward(ends: Mapping[bytes, int]) -> None:
    """Forwards until the parent ends this process or closes its input."""
    router = Router([*ends])
    orders = sys.stdin.fileno()
    while True:
        now = time.monotonic()
        for address, packet in router.take(now):
            with contextlib.suppress(OSError):  # the kernel has no memory: lost, as on any link
                os.write(ends[address], packet)
        at = router.next_s()
        left_s = None if at is None else max(0.0, at - time.monotonic())
        # poll() waits for whole milliseconds only.
        ready, _, _ = select.select([*ends.values(), orders], [], [], left_s)
        for descriptor in ready:
            if descriptor == orders:
                words = sys.stdin.readline()
                if not words:
                    return
                router.set(LinkSettings(**json.loads(words)))
                print("set", flush=True)
                continue
            with contextlib.suppress(BlockingIOError):  # no more packets
                for _ in range(READS):
                    router.put(os.read(descriptor, LARGEST), time.monotonic())


if __name__ == "__main__":  # the forwarding process, with a word NAME=ADDRESS for each host
    words = (word.split("=") for word in sys.argv[1:])
    made = {inet_aton(address): _open(name) for name, address in words}
    with contextlib.suppress(OSError):  # without the right the link is less exact on a busy machine
        os.nice(-10)
    print("made", flush=True)
    _forward(made)
