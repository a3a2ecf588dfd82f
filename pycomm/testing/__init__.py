"""Runs ranks on one machine for tests, as threads of this process or as processes.

    def sums(group, n):
        return pycomm.all_reduce(np.full(n, group.rank), group=group)

    results = run_ranks(4, sums, 1000)

The group is also the default group of the rank's thread. A FaultPlan injects a fault on one rank,
and `status` shows the state of every peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycomm import config
from pycomm._arguments import (
    elements,
    flag,
    function,
    instance,
    integer,
    list_of,
    one_of,
    plain_text,
    positive,
    refuse,
    seconds,
)
from pycomm.errors import InvalidArgument
from pycomm.group import Group
from pycomm.testing.faults import FaultPlan
from pycomm.testing.processes import ProcessRanks
from pycomm.testing.threads import ThreadRanks

__all__ = ["FaultPlan", "run_ranks", "status"]

MOST_RANKS = 4096
EXIT_TIMEOUT_S = 5.0  # for the other ranks to exit after the first failure


def run_ranks(  # noqa: PLR0913 - all but the first two have defaults
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "local",
    processes: bool = False,
    timeout_s: float = 60.0,
    heartbeat_s: float = 10.0,
    reproducible: bool = False,
    encrypt: bool = False,
    thread_multiple: bool = False,
    faults: Sequence[FaultPlan] = (),
    link_bytes_per_s: float | None = None,
    host_names: Sequence[str] = (),
    exit_timeout_s: float | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Runs `fn(group, *args)` as each of `n` ranks of a new group; returns the results by rank.

    Args:
        n: number of ranks, 1 to 4096.
        fn: the function of each rank; with `processes` it must be importable and its results
            picklable.
        args: further arguments of `fn`.
        transport: "local" (threads only), "shm", "tcp", or "" for the best.
        processes: each rank is a new process instead of a thread.
        timeout_s: the group's time limit in seconds, for its forming and each call.
        heartbeat_s, reproducible, encrypt, thread_multiple: as of `pycomm.init`.
        faults: faults to inject; "kill" and "stop" need `processes`.
        link_bytes_per_s: bandwidth of each rank's simulated link, in bytes per second and
            direction; None: unlimited. A token bucket in front of the transport; frame headers
            count.
        host_names: by rank: the name of its simulated host, up to 12 letters and digits. Ranks of
            different hosts use TCP, which `transport` must allow: "" or "tcp"; with `encrypt` it is
            encrypted. Empty: all ranks are on this host.
        exit_timeout_s: time in seconds for other processes to exit after the first failure; None:
            5.
        return_exceptions: return failures in the list as exceptions; PeerLost for a process that
            died.

    Raises:
        InvalidArgument: an option is invalid, or the options do not fit together.
        Exception: the first failure of any rank, with a note that names the rank; if that error
            names a peer that failed too, the peer's. The other ranks' groups are aborted.
    """
    n, host_names = integer("n", n, 1, MOST_RANKS), elements("host_names", host_names, "names")
    function("fn", fn)
    one_of("transport", transport, ("", *config.TRANSPORTS))
    processes, encrypt = flag("processes", processes), flag("encrypt", encrypt)
    return_exceptions = flag("return_exceptions", return_exceptions)
    list_of(plain_text)("host_names", host_names)
    if exit_timeout_s is not None:
        exit_timeout_s = seconds("exit_timeout_s", exit_timeout_s, zero=True)
    if link_bytes_per_s is not None:
        link_bytes_per_s = positive("link_bytes_per_s", link_bytes_per_s, "None")
    faults = elements("faults", faults, "a list of FaultPlan")
    list_of(_fault)("faults", faults)
    options = {
        "size": n,
        "timeout_s": seconds("timeout_s", timeout_s),
        "heartbeat_s": seconds("heartbeat_s", heartbeat_s, zero=True),
        "reproducible": flag("reproducible", reproducible),
        "encrypt": encrypt,
        "thread_multiple": flag("thread_multiple", thread_multiple),
        "transport": transport,
        "faults": faults,
        "link_bytes_per_s": link_bytes_per_s or 0.0,
        "hosts": host_names,
    }
    if host_names and len(host_names) != n:
        raise InvalidArgument(
            f"invalid host_names: got {len(host_names)} names, expected one for each of {n} ranks"
        )
    if len(set(host_names)) > 1 and transport not in ("", "tcp"):
        raise InvalidArgument(
            f"transport={transport!r} does not reach other hosts, simulated or not"
        )
    for fault in faults:
        if not 0 <= fault.rank < n:
            raise InvalidArgument(f"invalid fault: got rank {fault.rank}, expected 0 to {n - 1}")
        if fault.action in ("kill", "stop") and not processes:
            raise InvalidArgument(
                f"the fault {fault.action!r} would end the test: pass processes=True"
            )
    ranks: ProcessRanks | ThreadRanks
    if processes:
        limit_s = EXIT_TIMEOUT_S if exit_timeout_s is None else exit_timeout_s
        ranks = ProcessRanks(n, fn, args, options, limit_s)
    else:
        ranks = ThreadRanks(n, fn, args, options)
    ranks.run()
    if not return_exceptions and ranks.failures:
        first = _first_cause(ranks.failures, ranks.results)
        error: BaseException = ranks.results[first]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised by rank {first} of {n} in run_ranks")
        raise error
    return ranks.results


def _fault(name: str, value: Any) -> None:
    instance(name, value, FaultPlan, "a FaultPlan")


def _first_cause(failures: list[int], results: list[Any]) -> int:
    """The rank whose failure caused the others; `failures` are ranks in the order of their
    failures.

    A failing rank closes its connections before it reports: a peer that misses it may report first.
    """
    first = failures[0]
    named: int | None = getattr(results[first], "peer", None)
    if named is not None and named in failures and getattr(results[named], "peer", None) is None:
        return named
    return first


def status(group: Group) -> dict[str, Any]:
    """What this rank knows of the group, without communication. May be called from any thread.

    Args:
        group: a group that is not closed.

    Returns:
        "rank"; "current_call": this rank's last call as text, "" before the first; "peers": for
        each other rank a dict of "rank", "host", "pid", "transport", "connected", "left_reason"
        (why it left, or ""), "last_seen_s" (seconds since its last frame), "current_call" (of its
        last frame, or ""), "bytes_written" and "bytes_received". Up to a fifth of `heartbeat_s`
        old.

    Raises:
        GroupBroken: the group was closed or belongs to the parent process.
        InvalidArgument: `group` is another object.
    """
    if not isinstance(group, Group):
        refuse("group", group, "a pycomm.Group")
    known = group.core.status()
    peers = [
        {
            "rank": rank,
            "host": member.host,
            "pid": member.pid,
            "transport": member.transport,
            **known["peers"][rank],
        }
        for rank, member in enumerate(group.peer_info())
        if rank != group.rank
    ]
    return {"rank": group.rank, "current_call": known["current_call"], "peers": peers}
