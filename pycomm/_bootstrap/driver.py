"""Carries out the actions of protocol.py, by methods named do_<action>."""

from __future__ import annotations

from typing import Any

from pycomm import _core
from pycomm._bootstrap import events, protocol
from pycomm._bootstrap.elastic_store import StoreMoved
from pycomm.errors import Error

PAUSE_S = 0.01  # between two polls of a store or file
LEAST_S = 0.3  # what a store gets to answer in, even at the end of the limit


class Driver:
    """One call.

    Attributes:
        first: action.
        made: the group that was formed last.
        error: that ended the last attempt.
        failure: that the call raises.
        retried: errors that end an attempt, not the call.
    """

    state: Any
    first: events.Action = events.Do.BEGIN
    made: _core.Group | None = None
    error: Error | None = None
    failure: BaseException | None = None
    retried: tuple[type[Error], ...] = ()

    def run(self) -> _core.Group:
        """The group that the call returns."""
        actions = [self.first]
        while True:
            event: events.Event = None
            try:
                for one in actions:
                    event = getattr(self, f"do_{events.name_of(one)}")(one)
            except self.retried as error:  # an event: the protocol decides
                self.error, event = error, events.NotFormed(str(error))
            except StoreMoved:  # the rest has to be done in the store of the next rank
                event = events.Moved()
            if event is None:
                break
            self.state, actions = protocol.step(self.state, event)
        if self.failure is not None:
            raise self.failure
        assert self.made is not None
        return self.made

    def do_done(self, _: events.Action) -> None:
        """Ends run()."""
