"""Runs one function on N new processes of this machine and receives their messages.

For the demo and the benchmarks, which start their own ranks; training jobs use pycomm.launch. This
process hosts the rendezvous store, on a port that the system assigns.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it
from torch.multiprocessing.spawn import ProcessContext, start_processes

from pycomm.bench.support import netns


@dataclass(frozen=True)
class Rank:
    """What a rank receives: its rank, the rendezvous store and a channel to the parent."""

    rank: int
    size: int
    store: TCPStore
    send: Callable[[object], None]
    """Sends a picklable value to `on_message` of the parent."""


def run(
    body: Callable[..., None],
    args: tuple[Any, ...],
    size: int,
    on_message: Callable[[int, Any], None],
    hosts: Sequence[str] = (),
) -> None:
    """Runs `body(Rank, *args)` on `size` processes. No process outlives the call or the parent.

    Args:
        body: a function of an importable module.
        args: further arguments, picklable.
        size: number of processes.
        on_message: called as on_message(rank, value) in this process for each message of a rank.
        hosts: the host of each rank, from netns.behind(); empty: this machine.

    Raises:
        torch.multiprocessing.ProcessException: a rank failed; contains its traceback.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [mp.get_context("spawn").Pipe(duplex=False) for _ in range(size)]
    senders = [sender for _, sender in pipes]
    context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]  # torch's own
        _enter,
        (size, store.port, senders, hosts, body, args),
        size,
        join=False,
        start_method="spawn",
    )
    for sender in senders:
        sender.close()
    try:
        _listen(context, {receiver: rank for rank, (receiver, _) in enumerate(pipes)}, on_message)
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _listen(
    context: ProcessContext,
    receivers: dict[Connection, int],
    on_message: Callable[[int, Any], None],
) -> None:
    finished = False
    while receivers or not finished:
        for ready in wait([*receivers, *context.sentinels]):
            if not isinstance(ready, Connection):
                finished = context.join(timeout=0)
                continue
            try:
                value = ready.recv()
            except EOFError:  # the process ended; torch reports the reason
                del receivers[ready]
            else:
                on_message(receivers[ready], value)


def _enter(
    rank: int,
    size: int,
    port: int,
    senders: list[Connection],
    hosts: Sequence[str],
    body: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    # torch sends SIGINT if the parent dies. Python's handler would not run while a rank waits in
    # C++, so use the default action.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Without it gloo needs a host name that resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if hosts else "lo")
    for other, sender in enumerate(senders):
        if other != rank:
            sender.close()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = TCPStore("127.0.0.1", port, is_master=False)
    if hosts:  # the connection to the store stays open
        netns.enter(hosts[rank])
    body(Rank(rank, size, store, senders[rank].send), *args)
    if dist.is_initialized():
        dist.destroy_process_group()
