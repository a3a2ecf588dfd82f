"""Torch's agent of a host, which also comes to the end when its own ranks have failed.

An agent whose ranks have all ended well waits for those of the other hosts, as some may serve them
until the end, and torch's come there only if all went well: one host's failure holds the others for
five minutes. Not the ranks' end: they hear of failures by themselves. Called by command.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["launch"]

FAILED_LIMIT_S = 10.0  # a host that failed may hold the store in which others tell why they did
STOPPED_LIMIT_S = 1.0  # who stops a launcher wants its end


class Agent(local_elastic_agent.LocalElasticAgent):
    """Starts and watches the ranks of this host."""

    _came = False
    _exit_barrier_timeout: float
    _store: Any

    def run(self, role: str = "default") -> Any:
        """Until the ranks of this host have ended, and those of others or a limit has passed."""
        try:
            result = super().run(role)
        except SignalException:  # stopped: the others must not wait for this host
            self._come(STOPPED_LIMIT_S)
            raise
        if result is not None and result.is_failed():
            self._come(FAILED_LIMIT_S)
        return result

    def _come(self, limit_s: float) -> None:
        """Nobody has to wait for this host any more; stays while others are on their way."""
        if self._store is not None and not self._came:  # the hosts have met
            self._exit_barrier_timeout = limit_s
            super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch's own

    def _exit_barrier(self) -> None:
        """Where torch comes when all ranks of this host have ended well."""
        self._came = True
        if (self._worker_group.group_world_size or 1) > 1:
            print(
                "pycomm launch: the ranks of this host have ended; waits for those of the others, "
                f"{self._exit_barrier_timeout:.0f} s at most",
                flush=True,
            )
        super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch's own


def launch(config: LaunchConfig, *command: str) -> None:
    """As torch's elastic_launch, which takes no agent but the one that its module names."""
    theirs: Any = api
    torchs, theirs.LocalElasticAgent = theirs.LocalElasticAgent, Agent
    try:
        api.elastic_launch(config, command[0])(*command[1:])
    finally:
        theirs.LocalElasticAgent = torchs
