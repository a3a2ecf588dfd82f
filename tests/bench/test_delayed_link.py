"""The link with delay, rate and loss of the benchmarks: its model, and a real one."""

import hashlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks.collectives import links
from pycomm import bench as command
from pycomm.bench.support import delayed_link, netns, summaries
from pycomm.bench.support.delayed_link import (
    BURST,
    ETHERNET,
    GSO_TCPV4,
    VNET,
    DelayedLink,
    LinkSettings,
    Packet,
    Router,
)

T = TypeVar("T")
HOSTS = [socket.inet_aton(f"10.99.0.{i + 1}") for i in range(3)]
HEADERS = 20 + 32  # IPv4, TCP with time stamps
SEGMENT = 1000
FIN, PSH, ACK = 1, 8, 16


def ones_complement(data: bytes) -> int:
    return int(sum(struct.unpack(f"!{len(data) // 2}H", data)) % 0xFFFF)


def packet(payload: bytes, source: int = 0, target: int = 1, sequence: int = 2**32 - 1500) -> bytes:
    """What the kernel passes for one TCP packet, of several segments if the payload is long."""
    length = HEADERS + len(payload)
    kind, segment = (GSO_TCPV4, SEGMENT) if len(payload) > SEGMENT else (0, 0)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, length, 7, 0x4000, 64, 6, 0)
    ip += HOSTS[source] + HOSTS[target]
    ip = ip[:10] + struct.pack("!H", 0xFFFF - ones_complement(ip)) + ip[12:]
    pseudo = ones_complement(ip[12:20] + struct.pack("!HH", 6, length - 20))
    flags = FIN | PSH | ACK
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 3, 0x80, flags, 500, pseudo, 0) + bytes(12)
    return VNET.pack(1, kind, HEADERS, segment, 20, 16) + ip + tcp + payload


def fields(data: bytes) -> tuple[int, bytes, int]:
    """Sequence number, payload and flags of a packet whose headers are valid."""
    ip, tcp = data[VNET.size : VNET.size + 20], data[VNET.size + 20 : VNET.size + HEADERS]
    payload = data[VNET.size + HEADERS :]
    assert ones_complement(ip) == 0
    (length,) = struct.unpack_from("!H", ip, 2)
    assert length == HEADERS + len(payload)
    pseudo = ones_complement(ip[12:20] + struct.pack("!HH", 6, length - 20))
    assert struct.unpack_from("!H", tcp, 16)[0] == pseudo
    _, kind, _, segment, _, _ = VNET.unpack_from(data)
    assert (kind, segment) == ((GSO_TCPV4, SEGMENT) if len(payload) > SEGMENT else (0, 0))
    return struct.unpack_from("!I", tcp, 4)[0], payload, tcp[13]


def test_a_lost_segment_leaves_the_others() -> None:
    """Any of them, with the headers that they would have had; sequence numbers wrap."""
    payload = bytes(range(256)) * 16  # 5 segments, the last of 96 bytes
    whole = Packet(packet(payload))
    assert whole.segments == 5
    assert whole.wire_bytes() == 4096 + 5 * (HEADERS + ETHERNET)
    for count in range(1, 6):
        for lost in itertools.combinations(range(5), count):
            parts = whole.without(lost)
            assert sum(part.segments for part in parts) == 5 - count
            arrived = bytearray(payload)
            for begin in (index * SEGMENT for index in lost):
                end = min(begin + SEGMENT, len(payload))
                arrived[begin:end] = b"?" * (end - begin)
            for part in parts:
                sequence, found, flags = fields(part.data)
                at = (sequence + 1500) % 2**32
                assert found == arrived[at : at + len(found)]
                last = at + len(found) == len(payload)
                assert flags == (FIN | PSH | ACK if last else ACK)
                arrived[at : at + len(found)] = bytes(len(found))
            assert set(arrived) <= set(b"\0?")


def test_a_single_packet_is_lost_whole() -> None:
    single = Packet(packet(b"abcd"))
    assert (single.segments, single.wire_bytes()) == (1, HEADERS + 4 + ETHERNET)
    assert single.without([0]) == []


def test_packets_arrive_after_the_delay_at_their_host() -> None:
    router = Router(HOSTS)
    router.set(LinkSettings(delay_s=0.05))
    router.put(packet(b"one", 0, 1), 10.0)
    router.put(packet(b"two", 1, 2), 10.01)
    router.put(b"\0" * VNET.size + b"\x60" + bytes(60), 10.0)  # IPv6
    assert router.next_s() == pytest.approx(10.05)
    assert [*router.take(10.049)] == []
    assert [address for address, _ in router.take(10.055)] == [HOSTS[1]]
    assert [*router.take(11.0)] == [(HOSTS[2], packet(b"two", 1, 2))]
    assert router.next_s() is None


def arrivals(router: Router) -> Iterator[float]:
    while (at := router.next_s()) is not None:
        yield from (at for _ in router.take(at))


def test_packets_arrive_at_the_rate() -> None:
    """Of the sender and of the receiver: two senders share the rate of one receiver."""
    data = packet(bytes(4096))
    each = Packet(data).wire_bytes()
    count = 8 * BURST // each
    for senders, targets in (([0], [1]), ([0, 2], [1]), ([0], [1, 2])):
        router = Router(HOSTS)
        router.set(LinkSettings(0.01, 1e6, queue_bytes=1e9))
        for source, target, _ in itertools.product(senders, targets, range(count)):
            router.put(packet(bytes(4096), source, target), 5.0)
        sent = len(senders) * len(targets) * count * each
        assert max(arrivals(router)) == pytest.approx(5.01 + (sent - BURST) / 1e6, abs=1e-6)


def test_directions_do_not_share_the_rate() -> None:
    router = Router(HOSTS)
    router.set(LinkSettings(0.01, 1e6))
    for source, target in ((0, 1), (1, 2), (2, 0)):
        for _ in range(BURST // Packet(packet(bytes(4096))).wire_bytes()):
            router.put(packet(bytes(4096), source, target), 5.0)
    assert max(arrivals(router)) == pytest.approx(5.01)


def test_the_queue_has_a_limit() -> None:
    """By default the bandwidth-delay product of a round trip."""
    data = packet(bytes(4096))
    each = Packet(data).wire_bytes()
    for settings, queued in (
        (LinkSettings(0.5, 1e6), 1e6),
        (LinkSettings(0.5, 1e6, queue_bytes=4e5), 4e5),
        (LinkSettings(0.0, 1e6), BURST),
    ):
        router = Router(HOSTS)
        router.set(settings)
        for _ in range(1000):
            router.put(data, 0.0)
        assert len([*arrivals(router)]) * each == pytest.approx(queued + BURST, abs=2 * each)


def lost_of(settings: LinkSettings, count: int) -> list[int]:
    """The numbers of the segments that do not arrive, of `count` packets of 5."""
    router = Router(HOSTS)
    router.set(settings)
    missing = set(range(5 * count))
    for number in range(count):
        first = 4096 * number
        router.put(packet(bytes(4096), sequence=first), 0.0)
        for _, data in router.take(1.0):
            sequence, payload, _ = fields(data)
            begin = 5 * number + (sequence - first) // SEGMENT
            missing -= set(range(begin, begin + -(-len(payload) // SEGMENT)))
    return sorted(missing)


def test_loss_is_a_share_of_segments_and_repeatable() -> None:
    found = lost_of(LinkSettings(loss=0.01, seed=3), 4000)
    assert len(found) == pytest.approx(200, abs=60)  # 4 standard deviations
    assert lost_of(LinkSettings(loss=0.01, seed=3), 4000) == found
    assert lost_of(LinkSettings(loss=0.01, seed=4), 4000) != found
    assert lost_of(LinkSettings(), 100) == []
    assert len(lost_of(LinkSettings(loss=1.0), 20)) == 100


def on(host: netns.Host, call: Callable[[], T]) -> T:
    """The result of a call on a host, in a thread of its own."""

    def body() -> T:
        netns.enter(host.name)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(body).result()


@pytest.fixture
def network() -> Iterator[netns.Network]:
    if delayed_link.missing():
        pytest.skip(delayed_link.missing())
    with netns.Network(2, links=0, ipv6=False) as net:
        yield net


def connect(net: netns.Network) -> tuple[socket.socket, socket.socket]:
    near, far = net.hosts
    with on(far, lambda: socket.create_server((far.ipv4(), 0))) as listener:
        address = listener.getsockname()
        connected = on(near, lambda: socket.create_connection(address, timeout=20))
        return connected, listener.accept()[0]


def test_a_real_link_delays(network: netns.Network) -> None:
    with DelayedLink(network.hosts) as link:
        link.set(LinkSettings(delay_s=0.05))
        start = time.monotonic()
        near, far = connect(network)
        with near, far:
            assert 0.1 <= time.monotonic() - start < 1
            start = time.monotonic()
            near.send(b"a")
            far.send(far.recv(1))
            near.recv(1)
            assert 0.1 <= time.monotonic() - start < 1


def test_a_real_link_limits_and_loses(network: netns.Network) -> None:
    """The bytes are correct, the sender had to repeat some, and they take their time."""
    count, rate = 2_000_000, 10e6
    data = bytes(bytearray(i * i % 251 for i in range(count)))
    with DelayedLink(network.hosts) as link:
        link.set(LinkSettings(0.001, rate, loss=0.02, seed=1, queue_bytes=1e9))
        near, far = connect(network)
        with near, far:
            sender = threading.Thread(target=near.sendall, args=[data])
            start = time.monotonic()
            sender.start()
            received = bytearray()
            while len(received) < count:
                received += far.recv(1 << 16)
            took = time.monotonic() - start
            sender.join()
            assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
            assert took > (count - BURST) / rate
            info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            (repeated,) = struct.unpack_from("I", info, 100)  # tcpi_total_retrans
            assert repeated > 0


@pytest.mark.skipif(bool(delayed_link.missing()), reason=delayed_link.missing())
def test_a_tiny_run_over_a_delayed_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small call takes one way, and a row says over which link it was."""
    stored = tmp_path / "bench.json"
    args = ["links", "--rates", "1gbit", "--delay", "50ms", "--loss", "0,0.5", "--sizes", "4"]
    args += ["--rounds", "1", "--pauses", "0,0.01", "--peers", "pycomm,sockets"]
    args += ["--sysctl", "net.ipv4.tcp_wmem=4096 16384 8388608", "--json", str(stored)]
    assert command.main(args) == 0
    content = summaries.read(stored)
    assert content["settings"]["mtu"] == 1500
    assert content["settings"]["sysctl"] == ["net.ipv4.tcp_wmem=4096 16384 8388608"]
    rows = content["rows"]
    assert [(row["loss_percent"], row["pause_s"], row["peer"]) for row in rows] == [
        *itertools.product((0.0, 0.5), (0.0, 0.01), ("pycomm", "sockets"))
    ]
    assert all(row["delay_ms"] == 50 for row in rows)
    assert all(50 <= row["time_ms"] < 100 for row in rows)
    assert " 50ms   0.5%  0.01s " in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", [["--delay", "50"], ["--loss", "-1"], ["--pauses", ""], ["--sysctl", "name"]]
)
def test_invalid_options_are_rejected(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (links, delayed_link):  # else an accepted option would start a measurement
        monkeypatch.setattr(module, "missing", lambda: "stops here")
    with pytest.raises(SystemExit):
        links.main(args)
