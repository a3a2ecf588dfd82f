"""`pycomm doctor`: checks a machine, or a cluster, before a run."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pycomm import collectives, config, default_group, objects
from pycomm._tables import Table, console
from pycomm.errors import Error
from pycomm.group import Group
from pycomm.observe import host_checks, link_checks
from pycomm.observe.host_checks import FAILED, OK, WARNING, Finding
from pycomm.observe.link_checks import Link

MOST_CLOCK_MS = 100.0
LEAST_SHARE = 0.5  # of the median rate of links by the same transport
LIMIT_S = 60.0
LINKS = {"  ranks": "<9", "hosts": "<28", "by": "<5", "us": "8.1f", "GB/s": "6.2f"}
LINKS |= {"clock, ms": ".2f"}


RankReport = dict[str, Any]
"""A rank's report on its host, for rank 0: versions, the processors on which it may run, its
host_checks.quota(), and, from the first rank of the host, the fields of its findings."""


@dataclass
class Report:
    """What was found: printed at once, or at the end as JSON."""

    as_json: bool = False
    found: dict[str, list[Finding]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)

    def add(self, title: str, found: list[Finding]) -> None:
        """Adds the findings of a host, or of all."""
        self.found.setdefault(title, []).extend(found)
        if self.as_json:
            return
        print(title)
        shown = Table({"status": "<9", "check": "<15", "result": ""}, headings=False)
        for one in found:
            shown.add(f"  {one.status}", one.name, one.text)
            if one.advice:
                shown.add("", "", one.advice)
        console().print(shown)

    def end(self) -> int:
        """Prints the rest; returns the exit status."""
        found = [one for several in self.found.values() for one in several]
        failed = sum(one.status == FAILED for one in found)
        warned = sum(one.status == WARNING for one in found)
        if self.as_json:
            counts = {"failed": failed, "warnings": warned}
            hosts = {title: list(map(asdict, several)) for title, several in self.found.items()}
            print(json.dumps({"found": hosts, "links": list(map(asdict, self.links))} | counts))
        else:
            print(f"{len(found)} checks: {failed} failed, {warned} with a warning", flush=True)
        return 1 if failed else 0


def main(options: argparse.Namespace) -> int:
    """Checks and prints; returns the exit status, the same on all ranks."""
    here, report = config.environment(), Report(options.json)
    found = host_checks.check(here.size) if here.size == 1 or here.local_rank == 0 else []
    own: RankReport = {
        "versions": host_checks.versions(),
        "processors": sorted(os.sched_getaffinity(0)),
        "quota": host_checks.quota(),
        "found": [asdict(one) for one in found],
    }
    if here.size == 1:
        _add_hosts(report, [own], [socket.gethostname()])
        return report.end()
    try:
        group = default_group.init(timeout_s=LIMIT_S)
    except Error as error:  # it is one of the findings
        advice = "start the same command on every host; check the endpoint and GLOO_SOCKET_IFNAME"
        _add_hosts(report, [own], [socket.gethostname()])
        report.add("all hosts", [Finding("group", FAILED, str(error), advice)])
        return report.end()
    return cluster(group, own, report)


def cluster(group: Group, own: RankReport, report: Report) -> int:
    """Compares the hosts and measures links. Collective; rank 0 prints."""
    by_rank = objects.all_gather_object(own, group=group)
    hosts = labels([member.host for member in group.peer_info()], group.core.hosts)
    if group.rank == 0:
        _add_hosts(report, by_rank, hosts)
    shown = Table(LINKS)
    for link in link_checks.measure(group, link_checks.pairs(hosts)):
        if link is not None:
            report.links.append(link)
            shown.add(*_link(link, hosts))
            if not report.as_json:
                shown.flush(console())
    status = np.zeros(1, np.int64)
    if group.rank == 0:
        versions = compare_versions([one["versions"] for one in by_rank])
        report.add("all hosts", [versions, *check_links(report.links)])
        status[0] = report.end()
    collectives.broadcast(status, 0, group=group)
    return int(status[0])


def labels(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """The host of each rank: its name, with its number if another host has the same name."""
    distinct = set(zip(names, numbers, strict=True))
    alone = [sum(name == other for other, _ in distinct) == 1 for name in names]
    return [
        name if single else f"{name} #{number}"
        for name, number, single in zip(names, numbers, alone, strict=True)
    ]


def compare_versions(versions: Sequence[str]) -> Finding:
    """Whether all ranks have the same versions."""
    if len(set(versions)) == 1:
        return Finding("equal versions", OK, "on all ranks")
    text = "; ".join(sorted(set(versions)))
    return Finding("equal versions", WARNING, text, "install the same on every host")


def check_links(links: Sequence[Link]) -> list[Finding]:
    """Findings about clocks that differ, and links that are slow beside others of their
    transport."""
    found = []
    far = max(links, key=lambda one: abs(one.clock_ms), default=None)
    if far is not None and abs(far.clock_ms) > MOST_CLOCK_MS:
        text = f"ranks {far.a} and {far.b} differ by {far.clock_ms:.0f} ms"
        advice = "synchronize the clocks (chrony): traces and logs do not align"
        found.append(Finding("clocks", WARNING, text, advice))
    for transport in sorted({one.transport for one in links}):
        alike = [one for one in links if one.transport == transport]
        alike.sort(key=lambda one: one.rate_gb_s)
        slow, usual = alike[0], alike[len(alike) // 2].rate_gb_s
        if slow.rate_gb_s < LEAST_SHARE * usual:
            text = f"ranks {slow.a} and {slow.b}: {slow.rate_gb_s:.2f} GB/s, median {usual:.2f}"
            advice = "check the speed of this link, and tcp_wmem if the hosts are distant"
            found.append(Finding(f"slow {transport}", WARNING, text, advice))
    return found


def _add_hosts(report: Report, by_rank: Sequence[RankReport], hosts: Sequence[str]) -> None:
    for host in dict.fromkeys(hosts):
        there = [one for one, name in zip(by_rank, hosts, strict=True) if name == host]
        usable = {processor for one in there for processor in one["processors"]}
        found = [Finding("versions", OK, there[0]["versions"])]
        found.append(host_checks.processors(len(there), len(usable), there[0]["quota"]))
        found += [Finding(**finding) for one in there for finding in one["found"]]
        report.add(host, found)


def _link(one: Link, hosts: Sequence[str]) -> tuple[object, ...]:
    """The row of LINKS."""
    names = hosts[one.a] if hosts[one.a] == hosts[one.b] else f"{hosts[one.a]}, {hosts[one.b]}"
    figures = one.latency_us, one.rate_gb_s, one.clock_ms
    return f"  {one.a}, {one.b}", names, one.transport, *figures
