"""The link with delay, rate and loss of the benchmarks: its model, and a real one."""

import hashlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from bench_runs import stored

from benchmarks.collectives import links
from benchmarks.support import delayed_link
from benchmarks.support.delayed_link import (
    BURST,
    ETHERNET,
    GSO_TCPV4,
    VNET,
    DelayedLink,
    LinkSettings,
    Packet,
    Router,
)
from pycomm.bench.support import netns

T = TypeVar("T")
NEEDS_TUN = pytest.mark.skipif(bool(delayed_link.missing()), reason=delayed_link.missing())
HOSTS = [socket.inet_aton(f"10.99.0.{i + 1}") for i in range(3)]
HEADERS = 20 + 32  # IPv4, TCP with time stamps
SEGMENT = 1000
WRAPS = 2**32 - 1500  # a sequence number that wraps in the second segment
FIN, PSH, ACK = 1, 8, 16


def ones_complement(data: bytes) -> int:
    return int(sum(struct.unpack(f"!{len(data) // 2}H", data)) % 0xFFFF)


def pseudo_of(ip: bytes, length: int) -> int:
    """The sum of the pseudo header, which the kernel leaves in the checksum."""
    return ones_complement(ip[12:20] + struct.pack("!HH", 6, length - 20))


def packet(payload: bytes, source: int = 0, target: int = 1, sequence: int = WRAPS) -> bytes:
    """What the kernel passes for one TCP packet, of several segments if the payload is long."""
    length = HEADERS + len(payload)
    kind, segment = (GSO_TCPV4, SEGMENT) if len(payload) > SEGMENT else (0, 0)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, length, 7, 0x4000, 64, 6, 0)
    ip += HOSTS[source] + HOSTS[target]
    ip = ip[:10] + struct.pack("!H", 0xFFFF - ones_complement(ip)) + ip[12:]
    checksum, flags = pseudo_of(ip, length), FIN | PSH | ACK
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 3, 0x80, flags, 500, checksum, 0) + bytes(12)
    return VNET.pack(1, kind, HEADERS, segment, 20, 16) + ip + tcp + payload


def fields(data: bytes) -> tuple[int, bytes, int]:
    """Sequence number, payload and flags of a packet whose headers are valid."""
    ip, tcp = data[VNET.size : VNET.size + 20], data[VNET.size + 20 : VNET.size + HEADERS]
    payload = data[VNET.size + HEADERS :]
    assert ones_complement(ip) == 0
    (length,) = struct.unpack_from("!H", ip, 2)
    assert length == HEADERS + len(payload)
    assert struct.unpack_from("!H", tcp, 16)[0] == pseudo_of(ip, length)
    _, kind, _, segment, _, _ = VNET.unpack_from(data)
    assert (kind, segment) == ((GSO_TCPV4, SEGMENT) if len(payload) > SEGMENT else (0, 0))
    return struct.unpack_from("!I", tcp, 4)[0], payload, tcp[13]


def test_a_lost_segment_leaves_the_others() -> None:
    """Any of them, with the headers that they would have had; sequence numbers wrap."""
    payload = bytes(range(256)) * 16  # 5 segments, the last of 96 bytes
    whole, single = Packet(packet(payload)), Packet(packet(b"abcd"))
    assert (whole.segments, single.segments) == (5, 1)
    assert whole.wire_bytes() == 4096 + 5 * (HEADERS + ETHERNET)
    assert single.wire_bytes() == 4 + HEADERS + ETHERNET
    assert single.without([0]) == []
    for lost in (some for n in range(1, 6) for some in itertools.combinations(range(5), n)):
        parts = whole.without(lost)
        assert sum(part.segments for part in parts) == 5 - len(lost)
        arrived = bytearray(payload)
        for begin in (index * SEGMENT for index in lost):
            end = min(begin + SEGMENT, len(payload))
            arrived[begin:end] = b"?" * (end - begin)
        for part in parts:
            sequence, found, flags = fields(part.data)
            at = (sequence - WRAPS) % 2**32
            assert found == arrived[at : at + len(found)]
            last = at + len(found) == len(payload)
            assert flags == (FIN | PSH | ACK if last else ACK)
            arrived[at : at + len(found)] = bytes(len(found))
        assert set(arrived) <= set(b"\0?")


def test_packets_arrive_after_the_delay_at_their_host() -> None:
    router = router_of(LinkSettings(delay_s=0.05))
    router.put(packet(b"one", 0, 1), 10.0)
    router.put(packet(b"two", 1, 2), 10.01)
    router.put(b"\0" * VNET.size + b"\x60" + bytes(60), 10.0)  # IPv6
    assert router.next_s() == pytest.approx(10.05)
    assert [*router.take(10.049)] == []
    assert [address for address, _ in router.take(10.055)] == [HOSTS[1]]
    assert [*router.take(11.0)] == [(HOSTS[2], packet(b"two", 1, 2))]
    assert router.next_s() is None


def router_of(settings: LinkSettings) -> Router:
    router = Router(HOSTS)
    router.set(settings)
    return router


def arrivals(settings: LinkSettings, pairs: list[tuple[int, int]], count: int) -> list[float]:
    """When packets of 4 KiB arrive of which each of these (source, target) puts `count` at 5.0."""
    router, found = router_of(settings), []
    for source, target in pairs * count:
        router.put(packet(bytes(4096), source, target), 5.0)
    while (at := router.next_s()) is not None:
        found += [at for _ in router.take(at)]
    return found


EACH = Packet(packet(bytes(4096))).wire_bytes()


@pytest.mark.parametrize("pairs", [[(0, 1)], [(0, 1), (2, 1)], [(0, 1), (0, 2)]])
def test_packets_arrive_at_the_rate(pairs: list[tuple[int, int]]) -> None:
    """Of the sender and of the receiver: two senders share the rate of one receiver."""
    found = arrivals(LinkSettings(0.01, 1e6, queue_bytes=1e9), pairs, 8 * BURST // EACH)
    assert max(found) == pytest.approx(5.01 + (len(found) * EACH - BURST) / 1e6, abs=1e-6)


def test_directions_do_not_share_the_rate() -> None:
    found = arrivals(LinkSettings(0.01, 1e6), [(0, 1), (1, 2), (2, 0)], BURST // EACH)
    assert max(found) == pytest.approx(5.01)


@pytest.mark.parametrize(
    ("settings", "queued"),
    [
        (LinkSettings(0.5, 1e6), 1e6),  # by default the bandwidth-delay product of a round trip
        (LinkSettings(0.5, 1e6, queue_bytes=4e5), 4e5),
        (LinkSettings(0.0, 1e6), BURST),
    ],
)
def test_the_queue_has_a_limit(settings: LinkSettings, queued: float) -> None:
    found = arrivals(settings, [(0, 1)], 1000)
    assert len(found) * EACH == pytest.approx(queued + BURST, abs=2 * EACH)


def lost_of(settings: LinkSettings, count: int) -> list[int]:
    """The numbers of the segments that do not arrive, of `count` packets of 5."""
    router, missing = router_of(settings), set(range(5 * count))
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


@NEEDS_TUN
def test_a_real_link_delays_limits_and_loses() -> None:
    """The bytes are correct, the sender had to repeat some, and they take their time."""
    count, rate = 2_000_000, 10e6
    data = bytes(bytearray(i * i % 251 for i in range(count)))
    with netns.Network(2, links=0, ipv6=False) as net, DelayedLink(net.hosts) as link:
        near_host, far_host = net.hosts
        link.set(LinkSettings(delay_s=0.05))
        with on(far_host, lambda: socket.create_server((far_host.ipv4(), 0))) as listener:
            address, start = listener.getsockname(), time.monotonic()
            near = on(near_host, lambda: socket.create_connection(address, timeout=20))
            assert time.monotonic() - start >= 0.1
            far = listener.accept()[0]
        with near, far:
            start = time.monotonic()
            near.send(b"a")
            far.send(far.recv(1))
            near.recv(1)
            assert time.monotonic() - start >= 0.1
            link.set(LinkSettings(0.001, rate, loss=0.02, seed=1, queue_bytes=1e9))
            sender = threading.Thread(target=near.sendall, args=[data])
            start, received = time.monotonic(), bytearray()
            sender.start()
            while len(received) < count:
                received += far.recv(1 << 16)
            took = time.monotonic() - start
            sender.join()
            info = near.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
    assert took > (count - BURST) / rate
    (repeated,) = struct.unpack_from("I", info, 100)  # tcpi_total_retrans
    assert repeated > 0


@NEEDS_TUN
def test_links_run_with_a_delay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small call takes at least one way, and a row says over which link it was."""
    words = "links --rates 1gbit --delay 50ms --loss 0,0.5 --sizes 4 --rounds 1 --pauses 0,0.01"
    memory = "net.ipv4.tcp_wmem=4096 16384 8388608"
    content = stored(tmp_path, f"{words} --peers pycomm,sockets --sysctl '{memory}'")
    assert (content["settings"]["mtu"], content["settings"]["sysctl"]) == (1500, [memory])
    rows = content["rows"]
    assert [(row["loss_percent"], row["pause_s"], row["peer"]) for row in rows] == [
        *itertools.product((0.0, 0.5), (0.0, 0.01), ("pycomm", "sockets"))
    ]
    assert all(row["delay_ms"] == 50 <= row["time_ms"] for row in rows)
    assert " 50ms   0.5%  0.01s " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["--delay 50", "--loss -1", "--pauses=", "--sysctl name", "--rates 1g", "--peers="]
)
def test_invalid_options_of_links_are_rejected(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (links, delayed_link):  # else an accepted option would start a measurement
        monkeypatch.setattr(module, "missing", lambda: "stops here")
    with pytest.raises(SystemExit):
        links.main(words.split())
