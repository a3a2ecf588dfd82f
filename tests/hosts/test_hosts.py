"""Ranks on different hosts: network namespaces joined by bridges (pycomm/bench/support/netns.py).

A namespace has its own interfaces and its own abstract sockets, so each is a host to pycomm. Needs
root and iproute2. The programs of the ranks are in host_ranks.py.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from host_ranks import training
from host_runs import LIMIT_S, PORT, RANKS, Run
from sample import of_the_day
from torch_ranks import run_fixture  # noqa: F401 - the fixture "run"

from benchmarks.support import delayed_link
from benchmarks.support.delayed_link import DelayedLink, LinkSettings
from benchmarks.support.unauthenticated import MANNERS
from pycomm.bench.support.netns import Counters, Host, Network, missing
from pycomm.observe import flight_recorder

WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

ADDRESSES = {"ipv4": {"ipv6": False}, "ipv6": {"ipv4": False}, "both": {}}


@pytest.fixture
def two_links() -> Iterator[Network]:
    """Two hosts on two links, with IPv4 only: the links carry no unsolicited packets."""
    with Network(2, links=2, ipv6=False) as net:
        yield net


def expected_transports(places: Sequence[int]) -> list[list[str]]:
    ranks = range(len(places))
    return [
        ["self" if a == b else "shm" if places[a] == places[b] else "tcp" for b in ranks]
        for a in ranks
    ]


@pytest.mark.parametrize(
    ("places", "family", "master"),
    [
        ([0, 0, 1, 1], "ipv4", "10.99.0.1"),
        ([0, 0, 0, 1], "ipv6", "fd00:99:0::1"),
        ([1, 0, 0, 0], "both", "[fd00:99:0::2]"),
        ([0, 1, 2, 3], "both", "host0"),
        ([3, 1, 2, 0, 1], "ipv6", "host3"),
    ],
)
def test_verbs_are_correct_across_hosts(places: list[int], family: str, master: str) -> None:
    hosts = max(places) + 1
    with Network(hosts, **ADDRESSES[family]) as net:
        results = Run(net, places, "verbs", {"MASTER_ADDR": master}).start_all().results()
    assert [t["transports"] for t in results] == expected_transports(places)
    ranks_of = [[r for r, p in enumerate(places) if p == place] for place in range(hosts)]
    wanted = [[ranks_of[p].index(r), len(ranks_of[p]), hosts] for r, p in enumerate(places)]
    assert [t["local"] for t in results] == wanted
    assert len({t["bits"] for t in results}) == 1


def bytes_over(host: Host, link: int, before: Counters) -> int:
    now = host.counters(link)
    return now.sent - before.sent + now.received - before.received


@pytest.mark.parametrize(
    "choice", ["eth1", "10.99.1.0/24", "eth7,eth1", "10.99.1.1,10.99.1.2"], ids=str
)
def test_the_chosen_interface_carries_everything(two_links: Network, choice: str) -> None:
    before = [[host.counters(link) for link in (0, 1)] for host in two_links.hosts]
    master = two_links.hosts[0].ipv4(1)
    env = {"MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": choice, "FORM_S": "90"}
    run = Run(two_links, [0, 1], "form", env)
    run.start(0)
    listening: list[str] = []
    while len(listening) < 3:  # the store's two and the transport's, which waits for rank 1
        assert run.ranks[0].poll() is None
        lines = two_links.hosts[0].run("ss", "-Hltn").splitlines()
        listening = sorted(line.split()[3].rpartition(":")[0] for line in lines)
    assert listening == ["*", "*", master]
    assert [t["transports"] for t in run.start_all().results()] == [
        ["self", "tcp"],
        ["tcp", "self"],
    ]
    for host, (unused, used) in zip(two_links.hosts, before, strict=True):
        assert bytes_over(host, 0, unused) == 0
        assert bytes_over(host, 1, used) > 1000


def add_docker(net: Network) -> None:
    for host in net.hosts:
        host.ip("link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        host.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.ip("link", "set", "docker0", "up")
        host.ip("link", "set", "docker1", "up")


def test_default_interface_is_the_route_to_rank_0(two_links: Network) -> None:
    """Not the first interface, and not a bridge that other hosts have with the same address, as all
    hosts with Docker do."""
    add_docker(two_links)
    before = [host.counters(0) for host in two_links.hosts]
    env = {"MASTER_ADDR": two_links.hosts[0].ipv4(1)}
    Run(two_links, [0, 1, 1], "verbs", env).start_all().results()
    for host, counters in zip(two_links.hosts, before, strict=True):
        assert bytes_over(host, 0, counters) == 0


@pytest.mark.parametrize("encrypted", of_the_day([False, True], 2))
def test_a_group_of_gloo_forms_where_gloo_takes_the_loopback(encrypted: bool) -> None:
    """The hosts' own name has an address of the loopback, as in Debian's /etc/hosts, and only the
    variables of torchrun are set. gloo, run by hand, offers that address: on one rank it failed
    after some seconds with "connectFullMesh failed ... Connection refused, remote=[127.0.0.1]", and
    the other one still waited after 90 s, with a limit of 25 s.
    """
    size, loopback = 4, ("127.0.0.1", "127.0.1.1")
    with Network(2, ipv6=False) as net:
        add_docker(net)
        env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "host0", "MASTER_PORT": str(PORT)}
        if encrypted:
            env |= {"PYCOMM_SECRET": secrets.token_hex(32), "PYCOMM_ENCRYPT": "1"}
        ranks = []
        for rank in range(size):
            host = net.hosts[rank % 2]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}
            with Path("/etc/netns", host.name, "hosts").open("a") as hosts:
                hosts.write(f"{loopback[rank % 2]} {socket.gethostname()}\n")
            command = [sys.executable, str(RANKS), "in_place_of_gloo"]
            ranks.append(host.start(command, {**env, **own, "PYCOMM_REPLACE": "gloo"}))
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"rank {rank}: {out}{err}"
            wanted = {"own": loopback[rank % 2], "made": 1, "sums": [10.0], "encrypted": encrypted}
            assert json.loads(out.splitlines()[-1]) == wanted


def test_next_address_is_tried_when_one_is_unreachable() -> None:
    """Rank 0's host has as its own address one that no other host can reach."""
    with Network(2, links=2, ipv6=False) as net:
        net.hosts[1].ip("addr", "flush", "dev", "eth0")
        net.hosts[1].ip("route", "add", "unreachable", "10.99.0.0/24")
        env = {"MASTER_ADDR": net.hosts[0].ipv4(1), "FORM_S": "90"}
        run = Run(net, [0, 1], "form", env)
        run.start(0, {"MASTER_ADDR": net.hosts[0].ipv4(0)})
        results = run.start_all().results()
    assert [t.get("transports") for t in results] == [["self", "tcp"], ["tcp", "self"]], results


# An unauthenticated client connects to each address in every way, and waits for the end. It prints
# how many connections succeeded, how many failed, and in how many it received more than an
# unauthenticated client may.
CLIENT = """
import json, sys
from benchmarks.support.unauthenticated import MANNERS, UnauthenticatedClients
clients = UnauthenticatedClients()
for host, port in (word.rsplit(":", 1) for word in sys.argv[1:] * 3):
    for _ in MANNERS:
        clients.call((host, int(port)))
        clients.go_on()
print("called", flush=True)
sys.stdin.readline()
clients.go_on()
clients.close()
print(json.dumps([clients.connected, clients.refused, clients.let_in]))
"""


def test_unauthenticated_clients_of_another_host_are_rejected_and_the_group_forms() -> None:
    places = [0, 1, 0]
    with Network(3) as net:
        run = Run(net, places, "form", {"FORM_S": "90"})
        run.start(0)
        run.start(1)
        listeners: set[tuple[int, str]] = set()
        while len(listeners) < 3:  # the store's, and those of both ranks, which wait for the third
            assert [rank.poll() for rank in run.ranks.values()] == [None, None]
            for host in net.hosts[:2]:
                lines = host.run("ss", "-Hltn").splitlines()
                listeners |= {(host.number, line.split()[3].rpartition(":")[2]) for line in lines}
        called = [
            f"{address}:{port}"
            for number, port in sorted(listeners)
            for address in (net.hosts[number].ipv4(), net.hosts[number].ipv6())
        ]
        client = net.hosts[2].start([sys.executable, "-c", CLIENT, *called], stdin=subprocess.PIPE)
        assert client.stdout is not None
        assert client.stdout.readline() == "called\n", client.communicate()
        results = run.start_all().results()
        out, err = client.communicate("\n", timeout=LIMIT_S)
    assert [one.get("transports") for one in results] == expected_transports(places), results
    assert out, err
    assert json.loads(out) == [3 * len(called) * len(MANNERS), 0, 0]


def refusal(net: Network, env: dict[str, str]) -> dict[str, Any]:
    """The error of a rank 1 in host 1 that joins with these variables, without rank 0."""
    run = Run(net, [0, 1], "form", {"FORM_S": "90"})
    waiting, process = run.start(0), run.start(1, env)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    waiting.kill()
    waiting.communicate()
    return json.loads(out)


def test_invalid_address_is_rejected_with_the_valid_ones() -> None:
    with Network(2, links=2) as net:
        net.hosts[1].ip("link", "set", "eth1", "down")
        shown = "lo (127.0.0.1, ::1), eth0 (10.99.0.2, fd00:99::2, fe80::"
        for choice in ("eth9", "eth1", "10.99.0.1", "10.98.0.0/16"):
            result = refusal(net, {"GLOO_SOCKET_IFNAME": choice})
            assert result["error"] == "InvalidArgument"
            assert f"GLOO_SOCKET_IFNAME is '{choice}'" in result["text"]
            assert shown in result["text"]
            assert "eth1 (down)" in result["text"]
        listed = net.hosts[1].ip("-6", "-br", "addr", "show", "dev", "eth0").split()
        link_local = next(word for word in listed if word.startswith("fe80")).split("/")[0]
        result = refusal(net, {"GLOO_SOCKET_IFNAME": link_local})
        assert result["error"] == "InvalidArgument"
        assert "link-local" in result["text"]
        result = refusal(net, {"MASTER_ADDR": link_local, "FORM_S": "1"})
        assert result["error"] == "Timeout"
        assert f"needs its interface, as in {link_local}%eth0" in result["text"]


@pytest.mark.parametrize("by", [0, 1])
def test_loopback_is_rejected_for_another_host(by: int) -> None:
    with Network(2, ipv6=False) as net:
        run = Run(net, [0, 1], "form", {"FORM_S": "90"})
        run.start(by, {"GLOO_SOCKET_IFNAME": "lo"})
        for rank, result in enumerate(run.start_all().results()):
            assert result["error"] == "Unsupported", result
            assert result["peer"] == 1 - rank
            assert f"rank {1 - rank} (host " in result["text"]
            assert ("that rank, 127.0.0.1:", "this rank, 127.0.0.1:")[rank == by] in result["text"]


@pytest.mark.parametrize("how", ["silent", "unreachable"])
def test_unreachable_address_is_named(two_links: Network, how: str) -> None:
    """The store is reached by link 0, rank 0's chosen address on link 1 is unreachable."""
    target = two_links.hosts[0].ipv4(1)
    if how == "silent":  # a neighbour that does not exist: packets are lost
        absent = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        two_links.hosts[1].ip("neigh", "replace", target, "dev", "eth1", *absent)
    else:
        two_links.hosts[1].ip("route", "add", "unreachable", f"{target}/32")
    run = Run(two_links, [0, 1], "form", {"GLOO_SOCKET_IFNAME": "eth1", "FORM_S": "3"})
    run.start(0, {"FORM_S": "2"})  # its store ends before rank 1 times out
    zero, one = run.start_all().results()
    assert one["error"] == "Timeout"
    assert "rank 0 (host " in one["text"]
    assert f" at {target}:" in one["text"]
    if how == "unreachable":
        assert "No route to host" in one["text"] or "unreachable" in one["text"]
    assert zero["error"] == "Timeout"
    assert "rank 1 (host " in zero["text"]
    assert f"which did not connect to {target}:" in zero["text"]


@pytest.mark.timeout(300)
def test_training_on_two_hosts_equals_one_host(run: Any) -> None:
    with Network(2) as net:
        at = {"MASTER_ADDR": net.hosts[0].ipv6()}
        results = Run(net, [0, 0, 1, 1], "training", at).start_all().results()
        at["HIERARCHICAL"] = "1"  # and two lanes
        wrapped = Run(net, [0, 0, 1, 1], "training", at).start_all().results()
    alone = run(4, training)
    assert {(t["hosts"], t["lanes"]) for t in alone} == {(1, 1)}
    for each in (results, wrapped, alone):
        # On two hosts the order of summation differs: bits are equal among ranks, not among runs.
        assert len({t["bits"] for t in each}) == 1
        assert each[0]["sums"] == pytest.approx(alone[0]["sums"], rel=1e-5)
    assert {(t["hosts"], t["lanes"]) for t in results + wrapped} == {(2, 2)}


HEADERS = {"ipv4": 14 + 20 + 32, "ipv6": 14 + 40 + 32}  # Ethernet, IP, TCP with timestamps
SEGMENT = 1448  # bytes of data in a packet at most


def resent_packets(host: Host) -> int:
    """The TCP segments that the host has sent again."""
    names, values = (
        line.split() for line in host.run("grep", "Tcp:", "/proc/net/snmp").splitlines()
    )
    return int(values[names.index("RetransSegs")])


@pytest.mark.parametrize("family", HEADERS)
@pytest.mark.parametrize("cut", [False, True], ids=["gso", "no gso"])
def test_counted_bytes_match_the_interface(family: str, cut: bool) -> None:
    with Network(2, **ADDRESSES[family]) as net:
        if cut:
            net.cut(0)
        host = net.hosts[0]
        master = host.ipv4() if family == "ipv4" else host.ipv6()
        run = Run(net, [0, 1], "traffic", {"MASTER_ADDR": master}).start_all()
        marks = []
        for word in ("ready", "done"):
            for rank in (0, 1):
                assert run.ranks[rank].stdout.readline().strip() == word
            marks.append((host.counters(), *map(resent_packets, net.hosts)))
            for rank in (0, 1):
                run.ranks[rank].stdin.write("\n")
                run.ranks[rank].stdin.flush()
        result = run.results()[0]
    before, *resent_before = marks[0]
    after, *resent_after = marks[1]
    headers = HEADERS[family]
    packets = after.packets_sent - before.packets_sent
    sent = after.sent - before.sent - headers * packets
    received = after.received - before.received
    received -= headers * (after.packets_received - before.packets_received)
    # On a busy machine the bridge drops packets, and the interface counts those sent again too.
    resent = [SEGMENT * (b - a) for a, b in zip(resent_before, resent_after, strict=True)]
    assert 0.97 * (sent - resent[0]) <= result["written"] <= 1.03 * sent
    assert 0.97 * (received - resent[1]) <= result["received"] <= 1.03 * received
    assert result["written"] > 64 << 20


def test_near_hosts_are_not_rate_limited() -> None:
    """If the system has bbr, no connection starts with it: its timers would remain."""
    with Network(2) as net:
        for host in net.hosts:
            with contextlib.suppress(OSError):  # a kernel without it: nothing to change
                host.run("sysctl", "-qw", "net.ipv4.tcp_congestion_control=bbr")
        run = Run(net, [0, 1], "traffic").start_all()
        for _ in ("ready", "done"):
            for rank in (0, 1):
                run.ranks[rank].stdout.readline()
            sockets = net.hosts[1].run("ss", "-tinHO", "state", "established")
            for rank in (0, 1):
                run.ranks[rank].stdin.write("\n")
                run.ranks[rank].stdin.flush()
        run.results()
    assert len(sockets.splitlines()) == 2, sockets  # to the store, and to the other rank
    assert "bbr" not in sockets


@pytest.mark.skipif(bool(delayed_link.missing()), reason=delayed_link.missing())
@pytest.mark.parametrize(("delay_ms", "far"), [(2, False), (20, True)])
def test_connections_to_far_hosts_are_paced_and_buffered(delay_ms: int, far: bool) -> None:
    """Even if BBR is not the system's default. The kernel's buffer remains if it grows more."""
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with Network(2, links=0, ipv6=False) as net, DelayedLink(net.hosts) as link:
        link.set(LinkSettings(delay_ms / 1e3))
        grows = {net.hosts[0]: most, net.hosts[1]: 4 * most}
        for host, largest in grows.items():
            host.run("sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            host.run("sysctl", "-qw", f"net.ipv4.tcp_wmem=4096 16384 {largest}")
        run = Run(net, [0, 1], "traffic").start_all()
        for rank in (0, 1):
            assert run.ranks[rank].stdout.readline().strip() == "ready"
        words = ("ss", "-tinmHO", "state", "established")
        sockets = [host.run(*words).splitlines() for host in net.hosts]
        for _ in ("ready", "done"):
            for rank in (0, 1):
                run.ranks[rank].stdin.write("\n")
                run.ranks[rank].stdin.flush()
        run.results()
    available = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
    for lines in sockets:
        assert sum(" bbr " in line for line in lines) == (1 if far and available else 0), lines
    for lines, enlarged in zip(sockets, (far, False), strict=True):
        assert sum(f",tb{2 * most}," in line for line in lines) == enlarged, lines


@pytest.mark.skipif(bool(delayed_link.missing()), reason=delayed_link.missing())
@pytest.mark.parametrize(("delay_ms", "algorithm"), [(2, "ring"), (20, "direct")])
def test_distant_ranks_add_in_one_step(delay_ms: int, algorithm: str, tmp_path: Path) -> None:
    """By the round trip that they measured while they connected."""
    with Network(2, links=0, ipv6=False) as net, DelayedLink(net.hosts) as link:
        link.set(LinkSettings(delay_ms / 1e3))
        Run(net, [0, 1], "middle_sum", {"PYCOMM_TRACE": str(tmp_path)}).start_all().results()
    records = [flight_recorder.read(path) for path in sorted(tmp_path.glob("*.trace"))]
    assert len(records) == 2
    for record in records:
        (call,) = record.records[record.records["count"] == 100_000]
        assert flight_recorder.TABLES["algorithm"][call["algorithm"]] == algorithm


def test_hierarchical_exchange_sends_one_packet_per_host() -> None:
    """DGC's ranks of a host select the same elements; in a step a host receives what one other host
    sent, not what each of its ranks has. `auto` chooses it."""
    with Network(2, ipv6=False) as net:
        run = Run(net, [0, 0, 1, 1], "hierarchical").start_all()
        marks = []
        for word in ("ready", "done"):
            for rank in range(4):
                assert run.ranks[rank].stdout.readline().strip() == word
            marks.append(net.hosts[0].counters())
            for rank in range(4):
                run.ranks[rank].stdin.write("\n")
                run.ranks[rank].stdin.flush()
        results = run.results()
    assert {one["exchange"] for one in results} == {"hierarchical"}
    assert len({one["w"] for one in results}) == 1
    for name in ("u", "v"):
        assert results[0][name] == results[1][name] != results[2][name] == results[3][name]
    assert [one["sent"] > 0 for one in results] == [True, False, True, False]
    assert results[2]["sent"] < 1.3 * results[2]["k"]  # bytes: an index and 2 bits
    assert results[2]["sent"] < marks[1].received - marks[0].received < 1.3 * results[2]["sent"]
