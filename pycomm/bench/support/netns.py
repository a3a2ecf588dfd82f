"""Simulated hosts on one machine: network namespaces connected by bridges.

A namespace has its own interfaces, routes and abstract sockets, so pycomm treats it as a host.

    with Network(2, links=2) as net:
        net.shape(0, "1gbit")                       # link 0 of every host, both ways
        ranks = [host.start([sys.executable, "-c", code], {"PYCOMM_RANK": str(i)})
                 for i, host in enumerate(net.hosts)]
        net.hosts[0].counters(0).sent               # bytes, as the interface counted them

Host `i` has the interface `eth0` on link 0, `eth1` on link 1 and so on, with the addresses of
`Host.ipv4` and `Host.ipv6`. On all hosts the name `host<i>` resolves to its address on link 0. The
network is isolated, and the `with` block removes it, also on SIGTERM and SIGHUP. After `kill -9`
the next network of this machine removes it. It needs root, iproute2 and a kernel with veth and
bridges: `missing()` returns what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATE = re.compile(r"(\d+)(mbit|gbit)")  # of a link, in tc's format
CLONE_NEWNET = 0x40000000

_numbers = itertools.count()


def missing() -> str:
    """Why simulated hosts are impossible on this machine, or ""."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root and iproute2 to create network namespaces"
    return _refused()


@functools.cache
def _refused() -> str:
    try:
        with Network(1):
            return ""
    except OSError as error:
        return f"needs a kernel that can create namespaces, bridges and veths: {error}"


@contextlib.contextmanager
def behind(rate: str, size: int) -> Iterator[list[str]]:
    """The names of `size` hosts with links of `rate` ("1gbit"); an empty list if rate is ""."""
    if not rate:
        yield []
        return
    with Network(size, ipv6=False) as net:
        net.shape(0, rate)
        yield [host.name for host in net.hosts]


def enter(name: str) -> None:
    """Moves this thread, and threads that it starts, to the host of that name. Open sockets stay in
    their namespace.

    Raises:
        OSError: the namespace does not exist, or the process is not allowed to enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the network namespace {name}")


@dataclass(frozen=True)
class Counters:
    """Counters of an interface: bytes, including Ethernet headers, and packets.

    A packet before segmentation offload (up to 64 KiB) counts as one packet with one header.
    """

    sent: int
    received: int
    packets_sent: int
    packets_received: int


class Host:
    """One namespace, created by Network."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self._started: list[subprocess.Popen[str]] = []

    def ipv4(self, link: int = 0) -> str:
        """Its address on a link."""
        return f"10.99.{link}.{self.number + 1}"

    def ipv6(self, link: int = 0) -> str:
        """The same for IPv6."""
        return f"fd00:99:{link}::{self.number + 1}"

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Starts a command on this host; the end of the network kills it.

        Args:
            command: program and arguments.
            env: variables that are added to this process's environment.
            stdin, stderr: as in subprocess.Popen. A caller that does not read a pipe to its end
                must pass None, which inherits this process's stream.

        Returns:
            The process; its stdout is a pipe, in text mode.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *command: str) -> str:
        """Runs a command and returns its output; OSError if it fails."""
        return _run("ip", "netns", "exec", self.name, *command)

    def ip(self, *words: str) -> str:
        """Runs `ip ...` in this namespace."""
        return _run("ip", "-n", self.name, *words)

    def counters(self, link: int = 0) -> Counters:
        """The counters of the host's interface on a link."""
        names = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
        files = [f"/sys/class/net/eth{link}/statistics/{name}" for name in names]
        return Counters(*map(int, self.run("cat", *files).split()))

    def end(self) -> None:
        """Kills processes of start() that still run."""
        for process in self._started:
            process.kill()
            process.communicate()


class Network:
    """`hosts` hosts on `links` bridges; the bridges are in a namespace of their own.

    Args:
        hosts: number of hosts.
        links: number of networks; each host has an interface on each of them.
        ipv4, ipv6: whether the interfaces have such addresses; at least one.
    """

    def __init__(self, hosts: int, links: int = 1, *, ipv4: bool = True, ipv6: bool = True) -> None:
        tag = f"pyc{os.getpid()}n{next(_numbers)}"
        self.hosts = [Host(f"{tag}h{number}", number) for number in range(hosts)]
        self.links = links
        self._switch = f"{tag}s"
        self._ipv4, self._ipv6 = ipv4, ipv6
        self._handled: list[signal.Signals] = []  # that remove the network

    def __enter__(self) -> Network:
        """Creates the network; removes those of processes that were killed."""
        _remove_unused()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _exit)
                    self._handled.append(number)
        try:
            _run("ip", "netns", "add", self._switch)
            _without_ipv6(self._switch)
            _without_filters(self._switch)
            for link in range(self.links):
                self._inside("link", "add", f"br{link}", "type", "bridge", "mcast_snooping", "0")
                self._inside("link", "set", f"br{link}", "up")
            for host in self.hosts:
                self._make(host)
        except BaseException:  # includes Ctrl-C: remove what was created
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Kills started processes and removes the network."""
        for host in self.hosts:
            host.end()
            _try("netns", "del", host.name)
            shutil.rmtree(_etc(host), ignore_errors=True)
        _try("netns", "del", self._switch)
        while self._handled:
            signal.signal(self._handled.pop(), signal.SIG_DFL)
        with contextlib.suppress(OSError):  # others use the folder, or it is gone
            _etc(self.hosts[0]).parent.rmdir()

    def shape(self, link: int, rate: str, burst: str = "256kb", latency: str = "50ms") -> None:
        """Limits every host's interface on `link` to `rate` ("1gbit"), in both directions."""
        shaping = ("root", "tbf", "rate", rate, "burst", burst, "latency", latency)
        for host in self.hosts:
            port = f"p{host.number}l{link}"
            _run("tc", "-n", host.name, "qdisc", "replace", "dev", f"eth{link}", *shaping)
            _run("tc", "-n", self._switch, "qdisc", "replace", "dev", port, *shaping)

    def cut(self, link: int) -> None:
        """Disables segmentation offload on `link`, so packets have the size of those on a wire."""
        for host in self.hosts:
            host.ip("link", "set", f"eth{link}", "gso_max_segs", "1")

    def _inside(self, *words: str) -> None:
        _run("ip", "-n", self._switch, *words)

    def _make(self, host: Host) -> None:
        _run("ip", "netns", "add", host.name)
        if not self._ipv6:
            _without_ipv6(host.name)
        host.ip("link", "set", "lo", "up")
        for link in range(self.links):
            port = f"p{host.number}l{link}"
            self._inside(
                *("link", "add", port, "type", "veth"),
                *("peer", "name", f"eth{link}", "netns", host.name),
            )
            self._inside("link", "set", port, "master", f"br{link}", "up")
            if self._ipv4:
                host.ip("addr", "add", f"{host.ipv4(link)}/24", "dev", f"eth{link}")
            if self._ipv6:
                host.ip("addr", "add", f"{host.ipv6(link)}/64", "dev", f"eth{link}", "nodad")
            host.ip("link", "set", f"eth{link}", "up")
        # `ip netns exec` mounts this file over /etc/hosts.
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in self.hosts:
            lines += [f"{other.ipv4()} host{other.number}"] if self._ipv4 else []
            lines += [f"{other.ipv6()} host{other.number}"] if self._ipv6 else []
        _etc(host).mkdir(parents=True)
        (_etc(host) / "hosts").write_text("\n".join(lines) + "\n")


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _remove_unused() -> None:
    """Removes the namespaces of processes that were killed, as their names show."""
    folder = Path("/run/netns")
    for path in folder.glob("pyc*n*") if folder.is_dir() else ():
        made = re.fullmatch(r"pyc(\d+)n\d+(s|h\d+)", path.name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            _try("netns", "del", path.name)
            shutil.rmtree(Path("/etc/netns") / path.name, ignore_errors=True)


def _without_ipv6(namespace: str) -> None:
    """Disables IPv6, including its neighbor discovery."""
    for interfaces in ("all", "default"):
        path = f"/proc/sys/net/ipv6/conf/{interfaces}/disable_ipv6"
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"! test -e {path} || echo 1 > {path}")


def _without_filters(namespace: str) -> None:
    """Disables firewall rules on its bridges, because a switch does not evaluate any."""
    for family in ("iptables", "ip6tables", "arptables"):
        path = f"/proc/sys/net/bridge/bridge-nf-call-{family}"
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"! test -e {path} || echo 0 > {path}")


def _etc(host: Host) -> Path:
    return Path("/etc/netns") / host.name


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _try(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
