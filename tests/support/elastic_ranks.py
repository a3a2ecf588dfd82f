"""Ranks of an elastic group as processes, which tests kill, and processes that join them."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np

import pycomm
from benchmarks.support.ports import free_port
from pycomm import Group, errors
from pycomm._bootstrap import grow, shrink
from pycomm._bootstrap.elastic_store import SurvivingStore

LIMIT_S = 60.0  # of the whole run, by default
SECRET = "a1b2c3d4" * 8
CALL_S = 30.0  # limit of calls


class ElasticRun:
    """Starts `size` ranks that form an elastic group, and processes that join it.

    Leaving its context kills those that still run.
    """

    def __init__(
        self,
        file: str,
        size: int,
        *,
        form_s: float = shrink.FORM_S,
        heartbeat_s: float = 10.0,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.file, self._size, self._port = file, size, free_port()
        self._form_s, self._heartbeat_s = form_s, heartbeat_s
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, str] = {}
        self.processes: dict[str, Any] = {}
        self._end = time.monotonic() + limit_s
        self.results: dict[str, Any] = {}

    def __enter__(self) -> "ElasticRun":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def start_ranks(self, body: Callable[..., Any], *args: Any) -> None:
        """Starts body(init, *args) on all ranks of the first group, where init() forms it."""
        for rank in range(self._size):
            given = {"rank": rank, "size": self._size, "master": f"127.0.0.1:{self._port}"}
            given |= {"elastic": self.file, "heartbeat_s": self._heartbeat_s}
            self._start(f"rank {rank}", given, body, args)

    def start_joiner(self, name: str, body: Callable[..., Any], *args: Any, **given: Any) -> None:
        """Starts body(join, *args) in a process, where join() joins the group."""
        self._start(name, {"file": self.file, **given}, body, args)

    def _start(self, name: str, given: Any, body: Any, args: Any) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_main, args=(theirs, given, self._form_s, body, args), daemon=True
        )
        process.start()
        theirs.close()
        self._running[ours], self.processes[name] = name, process

    def wait_for(self, *names: str) -> dict[str, Any]:
        """The results of these processes, or of all; None of one that was killed.

        Raises:
            AssertionError: one raised, or the time is over.
        """
        wanted = set(names or self.processes)
        while wanted - self.results.keys():
            ready = wait(list(self._running), max(0.0, self._end - time.monotonic()))
            assert ready, f"no answer of {sorted(wanted - self.results.keys())}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                name, failed, value = self._running.pop(pipe), False, None
                try:
                    failed, value = pipe.recv()
                except EOFError:  # it was killed
                    self.processes[name].join()
                assert not failed, f"{name}: {value}"
                self.results[name] = value
        return {name: self.results[name] for name in wanted}


def _main(pipe: Connection, given: Any, form_s: float, body: Any, args: Any) -> None:
    shrink.FORM_S = grow.FORM_S = form_s
    try:
        answer = (False, body(lambda **more: _init({**given, **more}), *args))
    except BaseException:  # sent to the test
        answer = (True, traceback.format_exc())
    pipe.send(answer)


def _init(given: Any) -> Group:
    given = {"secret": SECRET, "timeout_s": CALL_S, **given}
    return pycomm.join(**given) if "file" in given else pycomm.init(**given)


def die(*_: Any, **__: Any) -> Any:
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def until_broken(group: Group) -> errors.Error:
    """Calls until the group is broken."""
    x = np.ones(1 << 16, np.float32)
    while True:
        try:
            pycomm.all_reduce(x, "max", group=group)
        except (errors.PeerLost, errors.GroupBroken) as error:
            return error


def check_works(group: Group) -> tuple[int, int, list[int], list[int]]:
    """All ranks take part in calls; returns rank, size, joined and ranks."""
    assert pycomm.default_group.default() is group
    assert pycomm.all_reduce(np.ones(50_000), group=group)[-1] == group.size
    mine = np.array([group.rank])
    assert pycomm.all_gather(mine, group=group).ravel().tolist() == list(range(group.size))
    pycomm.barrier(group=group)
    return group.rank, group.size, group.joined, group.ranks


def die_at(method: str, text: str, after: bool = False) -> None:
    """Lets this process die at its next call of this method of the group's store whose key contains
    `text`: before the call, or after it.
    """
    call = SurvivingStore._call

    def call_and_die(store: SurvivingStore, limit_s: float, verb: str, key: str, *rest: Any) -> Any:
        found = verb == method and text in key
        if found and not after:
            die()
        answer = call(store, limit_s, verb, key, *rest)
        if found:
            die()
        return answer

    SurvivingStore._call = call_and_die  # type: ignore[method-assign]  # of this process


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls until the condition holds; fails after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)  # polling interval
