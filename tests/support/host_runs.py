"""Runs of one program of host_ranks.py on every rank, in network namespaces."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.support.netns import Network

RANKS = Path(__file__).with_name("host_ranks.py")
PORT = 29511
LIMIT_S = 100  # for all ranks of a test to end


class Run:
    """One program on every rank; `places` has the host number of each rank."""

    def __init__(
        self, net: Network, places: Sequence[int], program: str, env: dict[str, str] | None = None
    ) -> None:
        self._net, self._places, self._program = net, places, program
        self._env = {
            "PYCOMM_SIZE": str(len(places)),
            "WORLD_SIZE": str(len(places)),
            "PYCOMM_SECRET": secrets.token_hex(32),
            "MASTER_ADDR": net.hosts[places[0]].ipv4(),
            "MASTER_PORT": str(PORT),
            **(env or {}),
        }
        self.ranks: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts one rank; `variables` override those of all ranks."""
        place = self._places[rank]
        local = [r for r, other in enumerate(self._places) if other == place]
        variables = {
            "PYCOMM_RANK": str(rank),
            "RANK": str(rank),
            "PYCOMM_LOCAL_RANK": str(local.index(rank)),
            "PYCOMM_LOCAL_SIZE": str(len(local)),
            **self._env,
            **(env or {}),
        }
        command = [sys.executable, str(RANKS), self._program]
        self.ranks[rank] = process = self._net.hosts[place].start(
            command, variables, stdin=subprocess.PIPE
        )
        return process

    def start_all(self) -> Run:
        """Starts the ranks that do not run yet."""
        for rank in range(len(self._places)):
            if rank not in self.ranks:
                self.start(rank)
        return self

    def results(self) -> list[dict[str, Any]]:
        """The result that each rank prints at its end, by rank."""
        results = []
        for rank in sorted(self.ranks):
            out, err = self.ranks[rank].communicate(timeout=LIMIT_S)
            assert self.ranks[rank].returncode == 0, f"rank {rank}: {out}{err}"
            results.append(json.loads(out.splitlines()[-1]))
        return results
