"""Ranks of `benchmarks training` on hosts of their own: `python -m benchmarks.training_rank`.

A rank's orders come as JSON in its first argument; what it says goes to stdout, a line of JSON for
each model. run() is called by training.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

from benchmarks import netns
from pycomm.demo.processes import Rank

PORT = 29401
TIMEOUT = timedelta(seconds=300)


def run(rate: str, size: int, args: Sequence[Any], hear: Callable[[int, Any], None]) -> None:
    """As processes.run of training.work, with hosts; raises RuntimeError where a rank failed, whose
    words stand on this process's stderr."""
    from benchmarks.training import Said

    names = args[0]
    with netns.Network(size, ipv6=False) as net:
        net.shape(0, rate)
        orders = [json.dumps([rank, size, net.hosts[0].ipv4(), *args]) for rank in range(size)]
        ranks = [
            host.start(
                [sys.executable, "-m", "benchmarks.training_rank", order],
                {"GLOO_SOCKET_IFNAME": "eth0"},
                stderr=None,
            )
            for host, order in zip(net.hosts, orders, strict=True)
        ]
        for _ in names:
            for rank, process in enumerate(ranks):
                assert process.stdout is not None
                if not (line := process.stdout.readline()):
                    status = process.wait()
                    raise RuntimeError(f"rank {rank}: exit status {status}; its words are above")
                hear(rank, Said(**json.loads(line)))


def main() -> None:
    """Does what the argument says."""
    from benchmarks import training

    rank, size, master, *args = json.loads(sys.argv[1])
    store = TCPStore(master, PORT, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)

    def say(said: object) -> None:
        if isinstance(said, training.Said):  # and not that a round has ended
            print(json.dumps(asdict(said)), flush=True)

    training.work(Rank(rank, size, store, say), *args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
