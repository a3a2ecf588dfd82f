"""Torch's agent of a host, which waits for the other hosts' only as long as there is a reason to.

An agent whose ranks have all ended well waits for those of the other hosts, as some may serve them
until the end. Torch's come there only if all went well, and wait for five minutes: for one whose
ranks failed, too, and for one that is dead. Ours comes in any case, and sees who has died. Not the
ranks' end: they hear of failures by themselves. Called by command.py.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.utils import store as together
from torch.distributed.launcher import api

from pycomm.launch import meeting
from pycomm.launch.hosts import SILENT_S, Hosts

if TYPE_CHECKING:
    import socket

    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["launch"]

FAILED_LIMIT_S = 10.0  # a host that failed may hold the store in which others tell why they did
STOPPED_LIMIT_S = 1.0  # who stops a launcher wants its end
PORT_LIMIT_S = 30.0  # for the first host's launcher to leave it, which it does at once
LOOK_S = 0.2  # between looks whether the others have come; torch's wait() writes a line at each


class Agent(local_elastic_agent.LocalElasticAgent):
    """Starts and watches the ranks of this host."""

    _came = False
    _exit_barrier_timeout: float
    _hosts: Hosts | None = None
    _logs_specs: Any
    _reserved: socket.socket | None = None  # the port of pycomm's store, on the first host
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

    def _rendezvous(self, worker_group: Any) -> None:
        """Where torch meets the other hosts, after a restart again."""
        super()._rendezvous(worker_group)
        self._hosts = Hosts(
            self._store, worker_group.group_rank or 0, worker_group.group_world_size or 1
        )
        self._logs_specs.variables.update(meeting.variables(self._port(worker_group.group_rank)))

    def _port(self, own: int) -> int:
        """Where rank 0 is to serve pycomm's store: the first host's launcher says it.

        Raises:
            RendezvousError: it does not.
        """
        if own == 0:
            if self._reserved is None:
                assert self._hosts is not None
                self._reserved = meeting.reserve_port(self._hosts.count > 1)
            self._store.set(meeting.PORT_KEY, str(self._reserved.getsockname()[1]))
        try:
            self._store.wait([meeting.PORT_KEY], timedelta(seconds=PORT_LIMIT_S))
            return int(self._store.get(meeting.PORT_KEY))
        except RuntimeError as error:
            raise RendezvousError(
                "the first host's launcher did not say at which port rank 0 serves pycomm's store: "
                "every host must start its ranks by pycomm launch"
            ) from error

    def _monitor_workers(self, worker_group: Any) -> Any:
        """Where torch comes several times a second while ranks run."""
        if self._hosts is not None:
            with contextlib.suppress(RuntimeError):  # the store has gone: torch notices, too
                self._hosts.here()
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Where torch comes when all ranks of this host have ended well."""
        if self._hosts is not None and self._hosts.count > 1:
            print(
                "pycomm launch: the ranks of this host have ended; waits for those of the others, "
                f"{self._exit_barrier_timeout:.0f} s at most",
                flush=True,
            )
        self._come(self._exit_barrier_timeout)

    def _come(self, limit_s: float) -> None:
        """Nobody has to wait for this host any more; stays while others are on their way."""
        if self._hosts is None or self._came:  # the hosts have not met
            return
        self._came = self._in_exit_barrier = True
        end = time.monotonic() + limit_s
        with contextlib.suppress(RuntimeError):  # the store has gone: there is nothing to wait for
            self._hosts.ended()
            all_came = together._barrier_nonblocking(
                self._store, self._hosts.count, server._TERMINAL_STATE_SYNC_ID
            )
            while time.monotonic() < end and not self._store.check([all_came]):
                time.sleep(LOOK_S)  # a store tells nobody of what comes
                if (host := self._hosts.silent()) is not None:
                    print(
                        f"pycomm launch: the launcher of host {host} of {self._hosts.count} (from "
                        f"0) has not been heard of for {SILENT_S:.0f} s; waits no longer",
                        flush=True,
                    )
                    break
        self._in_exit_barrier = False


def launch(config: LaunchConfig, *command: str) -> None:
    """As torch's elastic_launch, which takes no agent but the one that its module names."""
    theirs: Any = api
    torchs, theirs.LocalElasticAgent = theirs.LocalElasticAgent, Agent
    try:
        api.elastic_launch(config, command[0])(*command[1:])
    finally:
        theirs.LocalElasticAgent = torchs
