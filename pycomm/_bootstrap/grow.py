"""Carries out grow(): adds processes to an intact elastic group, which stays as it is on failure.

protocol.py decides. Keys in the store, under <name>/grow/<how often grow() was called before>/:

    shrink/...   as of shrink.py
    formed/0     number of ranks that formed the new group
    outcome      "formed" or "failed"
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from pycomm import _core
from pycomm._bootstrap import events, protocol
from pycomm._bootstrap.driver import LEAST_S, PAUSE_S
from pycomm._bootstrap.elastic_store import Elastic, SurvivingStore
from pycomm._bootstrap.joining import Joiners
from pycomm._bootstrap.shrink import FORM_S, VoteDriver, has_ended, processes_of
from pycomm.errors import PeerLost, Timeout

OUTCOMES = b"failed", b"formed"


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
    with processes_of(core) as processes:
        driver = _GrowDriver(core, store, processes, elastic, count, end, timeout_s)
        made = driver.run()
    assert driver.elastic is not None
    return made, driver.elastic


class _GrowDriver(VoteDriver):
    state: protocol.Growing

    def __init__(
        self,
        core: _core.Group,
        store: SurvivingStore,
        processes: Sequence[int | None],
        elastic: Elastic,
        count: int,
        end: float,
        timeout_s: float,
    ) -> None:
        choose_end = end - min(2 * FORM_S, timeout_s / 2)
        joiners = Joiners(choose_end, elastic.answered)
        super().__init__(core, store, processes, choose_end, elastic, joiners)
        self._form_end = end
        self._prefix = f"{core.name}/grow/{elastic.grown}"
        self.outcome = f"{self._prefix}/outcome"
        first = max(core.ranks) + 1
        ranks = (*core.ranks, *range(first, first + count))
        name = f"{core.name}+{elastic.grown}"
        self.state = protocol.Growing(core.rank, core.size, name, ranks)

    @property
    def ballot_name(self) -> str:
        return self._prefix

    @property
    def members(self) -> Sequence[int]:
        return range(self.core.size)

    def do_form(self, action: events.Form) -> events.Formed | events.NotFormed:
        self.end = self._form_end  # that of the vote was before
        return super().do_form(action)

    def do_count(self, action: events.Count) -> events.Counted:
        count = self.store.add(f"{self._prefix}/formed/0", int(action.formed), self.left_s)
        ended = any(map(has_ended, self._processes))
        return events.Counted(count, time.monotonic() < self.end and not ended)

    def do_await_outcome(self, _: events.Action) -> events.Outcome:
        try:
            return events.Outcome(self.store.get(self.outcome, PAUSE_S) == b"formed")
        except Timeout:  # no outcome yet
            return events.Outcome(None)

    def do_settle(self, action: events.Settle) -> events.Outcome:
        text = self.store.claim(self.outcome, OUTCOMES[action.formed], self.left_s)
        return events.Outcome(text == b"formed", action.final)

    def do_settlenext(self, action: events.SettleNext) -> events.Outcome:
        text = self.store.claim_in_next(self.outcome, OUTCOMES[action.formed], self.left_s)
        return events.Outcome(text == b"formed", final=True)

    def do_claim_none(self, _: events.Action) -> None:
        with contextlib.suppress(PeerLost, Timeout):  # no other rank waits there
            self.store.claim(f"{self._prefix}/shrink/decided", b"none", LEAST_S)

    def do_fail(self, action: events.Fail) -> None:
        if self.made is not None:
            self.made.abort(f"grow: {action.text}")
        assert action.kind is not None
        text = f'grow: "{self.core.name}" stays as it is: {action.text}'
        self.failure = action.kind(text, op="grow", rank=self.core.rank)
