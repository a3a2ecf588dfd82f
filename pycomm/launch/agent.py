"""torch's elastic agent with an exit barrier that does not wait for failed hosts.

An agent whose ranks succeeded waits for the other hosts' agents, as its ranks may serve theirs
until the end. torch's agent waits up to five minutes at this barrier even if another host has
failed. This agent always reaches the barrier and stops waiting for hosts that died. Ranks detect
failures on their own.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.utils import store as together
from torch.distributed.launcher import api

from pycomm.errors import InvalidArgument
from pycomm.launch import local_rendezvous
from pycomm.launch.hosts import LEFT_KEY, SILENT_S, START_LIMIT_S, Hosts, Place
from pycomm.launch.losses import Losses

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

FAILED_LIMIT_S = 10.0  # a failed host may serve the store in which others report their failures
STOPPED_LIMIT_S = 1.0  # after a signal the launcher must exit soon
LEAVE_LIMIT_S = 2.0  # for hosts that reached the barrier, or are lost
POLL_S = 0.2  # between polls of the barrier; torch's wait() would log each of them
SILENT_LAUNCHER = (
    "another host's launcher did not announce its port or its ranks: start the ranks of every host "
    "with pycomm launch"
)


class Agent(local_elastic_agent.LocalElasticAgent):
    """Starts and monitors the ranks of this host."""

    _entered = False
    _exit_barrier_timeout: float
    _hosts: Hosts | None = None
    _logs_specs: Any
    _places: list[Place]  # all hosts
    _losses: Losses | None = None  # if ranks are replaced
    _reserved: socket.socket | None = None  # the port of pycomm's store, on the first host
    _store: Any

    def run(self, role: str = "default") -> Any:
        """Runs until the ranks of this host have ended, and those of others or a time limit."""
        try:
            result = super().run(role)
        except SignalException:  # stopped: the others must not wait for this host
            self._enter_barrier(STOPPED_LIMIT_S)
            raise
        if result is not None and result.is_failed():
            self._enter_barrier(FAILED_LIMIT_S)
        return result

    def _rendezvous(self, worker_group: Any) -> None:
        """torch's rendezvous with the other hosts, also after a restart."""
        super()._rendezvous(worker_group)
        logs = self._logs_specs
        logs.places = self._places
        first = next(host for host, place in enumerate(self._places) if place.ranks)
        try:
            port = self._port(worker_group.group_rank or 0, first)
        except RuntimeError as error:  # of torch's store: no value in time
            raise RendezvousError(SILENT_LAUNCHER) from error
        logs.variables.update(local_rendezvous.variables(port))
        if first:  # torch's first host has spares alone; torch's own store stays there
            worker_group.master_addr = self._places[first].address
            if not worker_group.master_addr:
                raise InvalidArgument("--nproc 0 with --node-rank 0: give another host this number")
            logs.variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if logs.replacement is not None:
            assert self._hosts is not None
            self._losses = Losses(logs.replacement, self._hosts, self._places, logs.group_file)
            # No host joins later, and the host that serves torch's store may be lost.
            worker_group.spec.rdzv_handler.num_nodes_waiting = lambda: 0

    def _start_workers(self, worker_group: Any) -> Any:
        """Blocks SIGINT in the new processes: rank.py handles it, once its imports are done."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _assign_worker_ranks(self, store: Any, group_rank: int, count: int, spec: Any) -> Any:
        """torch's numbers, with those of spares after the ranks of all hosts."""
        workers = super()._assign_worker_ranks(store, group_rank, count, spec)
        self._hosts, logs = Hosts(store, group_rank, count), self._logs_specs
        ranks, options = len(workers) - logs.spares, str(logs.replacement or "")
        mine = Place(
            *(socket.gethostname(), spec.local_addr or "", ranks, logs.spares),
            *(logs.serves_rendezvous, options),
        )
        try:
            self._places = self._hosts.places(mine)
        except RuntimeError as error:  # of torch's store: no value in time
            raise RendezvousError(SILENT_LAUNCHER) from error
        if not any(place.spares for place in self._places):
            return workers
        size, before = sum(place.ranks for place in self._places), self._places[:group_rank]
        if not size:
            raise InvalidArgument("--nproc 0 on all hosts: there are no ranks")
        for local, worker in enumerate(workers):
            worker.global_rank = local + sum(place.ranks for place in before)
            if local >= ranks:
                worker.global_rank = size + local - ranks + sum(place.spares for place in before)
            worker.world_size = worker.role_world_size = size
            worker.role_rank = worker.global_rank
        return workers

    def _port(self, own: int, first: int) -> int:
        """The port at which rank 0 serves pycomm's store; the launcher of its host stores it."""
        if own == first:
            if self._reserved is None:
                self._reserved = local_rendezvous.reserve_port(len(self._places) > 1)
            self._store.set(local_rendezvous.PORT_KEY, str(self._reserved.getsockname()[1]))
        self._store.wait([local_rendezvous.PORT_KEY], timedelta(seconds=START_LIMIT_S))
        return int(self._store.get(local_rendezvous.PORT_KEY))

    def _monitor_workers(self, worker_group: Any) -> Any:
        """torch calls this several times a second while ranks run."""
        if self._hosts is not None:
            with contextlib.suppress(RuntimeError):  # the store ended: torch detects it, too
                self._hosts.send_heartbeat()
        result = super()._monitor_workers(worker_group)
        if self._losses is not None and not result.is_failed():
            self._losses.check()
        return result

    def _exit_barrier(self) -> None:
        """torch calls this when all ranks of this host have succeeded."""
        if self._hosts is not None and self._hosts.count > 1:
            print(
                "pycomm launch: the ranks of this host have ended; waiting for the other hosts, "
                f"at most {self._exit_barrier_timeout:.0f} s",
                flush=True,
            )
        self._enter_barrier(self._exit_barrier_timeout)

    def _enter_barrier(self, limit_s: float) -> None:
        """Enters the exit barrier; waits while the other hosts are alive."""
        if self._hosts is None or self._entered:  # before the rendezvous, or a second call
            return
        self._entered = self._in_exit_barrier = True
        end = time.monotonic() + limit_s
        with contextlib.suppress(RuntimeError):  # the store ended: nothing to wait for
            self._hosts.report_end()
            all_entered = together._barrier_nonblocking(
                self._store, self._hosts.count, server._TERMINAL_STATE_SYNC_ID
            )
            while time.monotonic() < end and not self._store.check([all_entered]):
                time.sleep(POLL_S)  # polls: a store sends no notifications
                if silent := self._hosts.find_silent():
                    print(
                        f"pycomm launch: no heartbeat from the launcher of host {silent[0]} of "
                        f"{self._hosts.count} (from 0) for {SILENT_S:.0f} s; stopped waiting",
                        flush=True,
                    )
                    break
            if self._hosts.count > 1 and self._store.check([all_entered]):
                self._leave(self._hosts)
        self._in_exit_barrier = False

    def _leave(self, hosts: Hosts) -> None:
        """The host that serves torch's store ends last: the others would print torch's stacks."""
        if not self._logs_specs.serves_rendezvous:
            handler: Any = self._worker_group.spec.rdzv_handler
            handler.shutdown()
            handler.shutdown = lambda: True  # torch calls it again
            hosts.total(LEFT_KEY, 1)
            return
        end = time.monotonic() + LEAVE_LIMIT_S
        while time.monotonic() < end and hosts.total(LEFT_KEY) < hosts.count - 1:
            time.sleep(POLL_S / 10)  # polls: a store sends no notifications


def launch(config: LaunchConfig, *command: str) -> None:
    """torch's elastic_launch with this agent, which it takes from a name of its module."""
    theirs: Any = api
    torchs, theirs.LocalElasticAgent = theirs.LocalElasticAgent, Agent
    try:
        api.elastic_launch(config, command[0])(*command[1:])
    finally:
        theirs.LocalElasticAgent = torchs
