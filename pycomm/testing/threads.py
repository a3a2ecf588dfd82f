"""Ranks as threads of this process, and how a rank of either kind joins its group."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from pycomm import _core, config
from pycomm.default_group import as_thread_default
from pycomm.group import Group


def join(store: _core.Store, rank: int, options: dict[str, Any]) -> Group:
    """Connects this rank to the group."""
    key = options.get("secret", "")
    named = {"name": "world", "address": "", "route_hint": "", "reproducible": False, "log": False}
    options = dict(options)
    hosts = options.pop("hosts", ())
    faults = [fault.for_core() for fault in options.get("faults", ()) if fault.rank == rank]
    given = {**named, **config.flight_recorder_files(), "secret": key, **options, "faults": faults}
    if hosts:
        given["host"] = hosts[rank]
    core = _core.connect(store, rank=rank, **given)
    return Group(core, store, options["timeout_s"])


class ThreadRanks:
    """Ranks as threads that meet in an in-memory store."""

    def __init__(
        self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.results: list[Any] = [None] * n
        self.failures: list[int] = []  # ranks, in the order in which they failed
        key = {"secret": secrets.token_hex(32)} if options["encrypt"] else {}
        self._fn, self._args, self._options = fn, args, {**options, **key}
        self._store = _core.LocalStore()
        self._groups: list[Group] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns when every rank has ended."""
        threads = [
            threading.Thread(target=self._one, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(len(self.results))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C
            self._abort(f"the test was stopped: {type(error).__name__}")
            raise

    def _one(self, rank: int) -> None:
        try:
            group = join(self._store, rank, self._options)
            with self._lock:
                self._groups.append(group)
            with as_thread_default(group):
                self.results[rank] = self._fn(group, *self._args)
            group.close()
        except BaseException as error:  # of any kind: raised in the caller
            with self._lock:
                self.failures.append(rank)
            self.results[rank] = error
            self._abort(f"rank {rank} failed: {type(error).__name__}: {error}")

    def _abort(self, reason: str) -> None:
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.abort(reason)
