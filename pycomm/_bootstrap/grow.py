"""Adds processes to an intact elastic group, which stays as it is if that fails.

    join     each rank writes to the store that it is present
    choose   all are present, and enough processes ask to join: the first rank to see that decides
    form     ranks and joining processes form a new group
    outcome  "formed" once every rank has, else "failed"; the first write is final, in the store of
             the next rank: a rank writes there what the first store says, before it returns

A rank that loses the store before the choice ends that of ranks that already use the next one.

Keys in the store, under <name>/grow/<how often grow() was called before>/:

    shrink/...   as of shrink.py
    formed/0     number of ranks that formed the new group
    outcome      "formed" or "failed"
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from pycomm import _core
from pycomm._bootstrap.elastic_store import Elastic, StoreMoved, SurvivingStore
from pycomm._bootstrap.joining import Joiners, invite
from pycomm._bootstrap.shrink import (
    FORM_S,
    LEAST_S,
    PAUSE_S,
    SurvivorElection,
    has_ended,
    processes_of,
)
from pycomm.errors import Error, GroupBroken, PeerLost, Timeout


def grow(
    core: _core.Group, store: SurvivingStore, elastic: Elastic, count: int, timeout_s: float
) -> tuple[_core.Group, Elastic]:
    """The group of all ranks of `core` and `count` processes that join. Collective over them.

    Raises:
        Timeout: not all ranks called it, or not enough processes joined.
        PeerLost: a rank ended, or a process that was to join.
    """
    end = time.monotonic() + timeout_s
    elastic.grown += 1
    try:
        with processes_of(core) as processes:
            return _Growing(core, store, elastic, processes, end).run(count, timeout_s)
    except StoreMoved as error:
        with contextlib.suppress(PeerLost, Timeout):  # no other rank waits there
            election = f"{core.name}/grow/{elastic.grown}/shrink"
            store.claim(f"{election}/decided", b"none", LEAST_S)
        raise _failed(core, f"a rank ended, which served the store ({error})") from error


def _failed(core: _core.Group, why: str, kind: type[Error] = PeerLost) -> Error:
    return kind(f'grow: "{core.name}" stays as it is: {why}', op="grow", rank=core.rank)


class _Growing:
    """One call of grow()."""

    def __init__(
        self,
        core: _core.Group,
        store: SurvivingStore,
        elastic: Elastic,
        processes: Sequence[int | None],
        end: float,
    ) -> None:
        self._core, self._store, self._elastic = core, store, elastic
        self._processes, self._end = processes, end
        self._prefix = f"{core.name}/grow/{elastic.grown}"

    def run(self, count: int, timeout_s: float) -> tuple[_core.Group, Elastic]:
        """As grow()."""
        joined = self._choose(count, self._end - min(2 * FORM_S, timeout_s / 2))
        made: _core.Group | None = None
        why = "another rank did not form the new group"
        try:
            made, after = self._form(count, joined)
        except (PeerLost, Timeout) as error:  # the ranks agree about it below
            why = str(error)
        if self._all_formed(made is not None) and made is not None:
            return made, after
        if made is not None:
            made.abort(f"grow: {why}")
        raise _failed(self._core, why)

    def _choose(self, count: int, end: float) -> dict[int, int]:
        """The number of the request for each new rank, until `end`. Collective."""
        core = self._core
        slots, ranks = range(core.size, core.size + count), self._ranks(count)[core.size :]
        election = SurvivorElection(self._store, self._prefix, core.rank, core.size, end)
        election.joiners = Joiners(end, self._elastic.answered)
        election.free = dict(zip(slots, ranks, strict=True))
        try:
            decision = election.agree(self._processes, [])
        except GroupBroken:  # too few for shrink(), or a rank lost the store before
            self._check_alive(range(core.size))
            if time.monotonic() < end:
                raise _failed(core, "a rank ended, which served the store") from None
            raise _failed(core, "not all ranks called grow() in time", Timeout) from None
        missing = sorted(set(range(core.size)) - set(decision.survivors))
        self._check_alive(missing)
        if missing:
            raise _failed(core, f"these ranks did not call grow(): {missing}", Timeout)
        if len(decision.joined) < count:
            text = f"{len(decision.joined)} of {count} processes asked to join in time"
            raise _failed(core, text, Timeout)
        return decision.joined

    def _check_alive(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if has_ended(self._processes[rank]):
                raise _failed(self._core, f"rank {rank} died")

    def _form(self, count: int, joined: dict[int, int]) -> tuple[_core.Group, Elastic]:
        core, ranks = self._core, self._ranks(count)
        limit_s = max(0.1, min(FORM_S, self._end - time.monotonic()))
        name = f"{core.name}+{self._elastic.grown}"
        slots = list(range(core.size + count))
        after = invite(
            self._store, self._elastic, name, ranks, slots, joined, limit_s, self._outcome
        )
        return _core.regroup(core, self._store, name, core.rank, ranks, limit_s), after

    def _ranks(self, count: int) -> list[int]:
        """Group.ranks of the new group."""
        first = max(self._core.ranks) + 1
        return [*self._core.ranks, *range(first, first + count)]

    @property
    def _outcome(self) -> str:
        return f"{self._prefix}/outcome"

    def _all_formed(self, formed: bool) -> bool:
        """Whether every rank formed the new group. Collective."""
        left_s = max(LEAST_S, self._end - time.monotonic())
        try:
            text = self._first_outcome(formed, left_s)
        except StoreMoved:  # the next rank's store has the outcome if a rank knew it
            return self._store.claim(self._outcome, b"failed", left_s) == b"formed"
        return self._store.claim_in_next(self._outcome, text, left_s) == b"formed"

    def _first_outcome(self, formed: bool, left_s: float) -> bytes:
        """The outcome in the store in use."""
        store = self._store
        counter = f"{self._prefix}/formed/0"
        count = store.add(counter, int(formed), left_s)
        while formed and count < self._core.size:
            with contextlib.suppress(Timeout):  # no outcome yet
                return store.get(self._outcome, PAUSE_S)
            formed = time.monotonic() < self._end and not any(map(has_ended, self._processes))
            count = store.add(counter, 0, left_s)
        text = b"formed" if formed else b"failed"
        return store.claim(self._outcome, text, left_s)
