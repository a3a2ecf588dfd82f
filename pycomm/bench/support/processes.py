"""Runs one function on N new processes of this machine and receives their messages.

For the demo and the benchmarks, which start their own ranks; training jobs use pycomm.launch. This
process hosts the rendezvous store, on a port that the system assigns.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm._process_pool import ProcessPool, RankFailed, send_answer
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
        RankFailed: the first failure of a rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPool(0.0, _lost, on_message) as pool:
        for rank in range(size):
            pool.start(_enter, (rank, size, store.port), hosts[rank] if hosts else "", body, args)
        pool.collect()
    for text in pool.failures.values():
        raise RankFailed(text)


def _lost(rank: int, process: Any) -> str:
    return f"rank {rank} (pid {process.pid}) ended with exit code {process.exitcode}"


def _enter(
    pipe: Connection,
    place: tuple[int, int, int],
    host: str,
    body: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    rank, size, port = place
    # Without it gloo needs a host name that resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if host else "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    answer: tuple[bool, str] = False, ""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        if host:  # the connection to the store stays open
            netns.enter(host)
        send = lambda value: send_answer(pipe, pickle.dumps((None, value)))  # noqa: E731 - as a line
        body(Rank(rank, size, store, send), *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:  # of any kind: raised in the parent, which ends the other ranks
        answer = True, f"rank {rank}:\n{traceback.format_exc()}"
    send_answer(pipe, pickle.dumps(answer))
