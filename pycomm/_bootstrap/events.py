"""Events and actions of the protocol of membership, protocol.py.

Ranks are those of the group that votes, unless the text says otherwise.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pycomm.errors import Error

Ranks: TypeAlias = frozenset[int]
NO_RANKS: Ranks = frozenset()

# The survivors, then the ranks and requests of the processes that join: Decision.text().
DECISION = re.compile(
    rb"([0-9]{1,9}(?: [0-9]{1,9})*)(?:\+([0-9]{1,9}=[0-9]{1,9}(?: [0-9]{1,9}=[0-9]{1,9})*))?"
)


@dataclass(frozen=True)
class Decision:
    """The surviving ranks, and the number of the request of the process that joins, by rank. No
    survivors: they are too few to continue.
    """

    survivors: Ranks = NO_RANKS
    joined: Mapping[int, int] = field(default_factory=dict, hash=False)

    def text(self) -> bytes:
        """For the store: "none", "0 2 3", or "0 2 3+1=7", where request 7 gets rank 1."""
        joined = " ".join(f"{rank}={n}" for rank, n in sorted(self.joined.items()))
        ranks = " ".join(map(str, sorted(self.survivors))) or "none"
        return (ranks + (f"+{joined}" if joined else "")).encode()

    @staticmethod
    def of(text: bytes, size: int) -> Decision | None:
        """The decision in these bytes about a group of `size` ranks; None if they contain none."""
        if text == b"none":
            return Decision()
        match = DECISION.fullmatch(text)
        ranks = [int(word) for word in match[1].split()] if match else []
        pairs = [one.split(b"=") for one in (match[2] or b"").split()] if match else []
        joined = {int(rank): int(n) for rank, n in pairs}
        valid = ranks and ranks == sorted({rank for rank in ranks if rank < size})
        if not valid or len(joined) < len(pairs) or joined.keys() & set(ranks):
            return None
        return Decision(frozenset(ranks), joined)


# Events.


@dataclass(frozen=True)
class Began:
    """An election begins; the processes of these ranks ended."""

    ended: Ranks = NO_RANKS


@dataclass(frozen=True)
class Moved:
    """The process that served the store ended, and its keys with it."""


@dataclass(frozen=True)
class Seen:
    """What is known now.

    Attributes:
        came: the ranks that voted.
        dead, lost: reports in the store: certain ones, and others.
        ended: ranks whose processes ended, as this rank sees itself.
        grace: those reported as lost had their time to vote.
        late: the call's limit passed.
        decision: in the store.
        successors: the ranks that continued in a group without this one; None: there is none.
    """

    came: Ranks = NO_RANKS
    dead: Ranks = NO_RANKS
    lost: Ranks = NO_RANKS
    ended: Ranks = NO_RANKS
    grace: bool = False
    late: bool = False
    decision: Decision | None = None
    successors: Ranks | None = None


@dataclass(frozen=True)
class Asked:
    """The requests of processes that join.

    Attributes:
        requests: by number, in order of arrival: the rank that the process asks for, as in
            Group.ranks, or -1; and whether it takes no other. They live and have no answer.
        processes: how many are in the run, or can still be started.
        over: do without those that are missing.
    """

    requests: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    processes: float = 0
    over: bool = True


@dataclass(frozen=True)
class Decided:
    """The final decision. `ended`, `late`: as of Seen."""

    decision: Decision
    ended: Ranks = NO_RANKS
    late: bool = False


@dataclass(frozen=True)
class Compared:
    """The pairs of survivors that could not connect in the last forming. `ended`: as of Seen."""

    pairs: frozenset[tuple[int, int]] = frozenset()
    ended: Ranks = NO_RANKS


@dataclass(frozen=True)
class Formed:
    """This rank formed the new group. `successors`: as of Seen, of the ranks that voted: they lost
    this one while it was slow."""

    successors: Ranks | None = None


@dataclass(frozen=True)
class NotFormed:
    """It did not. `why`: the text; `unreachable`: a peer that it could not connect to, as it is
    numbered in the new group; `late`: the call's limit passed."""

    why: str = ""
    unreachable: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Counted:
    """How many ranks formed the larger group. `waits`: no process ended, and there is time."""

    count: int
    waits: bool


@dataclass(frozen=True)
class Outcome:
    """What the store says: whether all ranks formed the larger group; None: no outcome yet.
    `final`: it is in the store of the next rank too."""

    formed: bool | None
    final: bool = False


@dataclass(frozen=True)
class Found:
    """What the files of the elastic group say, to a process that joins.

    Attributes:
        fresh: servers of which this process does not know that they all ended.
        ended: a rank ended with success.
        stale: nothing was fresh for some time.
        late: as of Seen.
    """

    fresh: bool
    ended: bool = False
    stale: bool = False
    late: bool = False


@dataclass(frozen=True)
class Answered:
    """What the group answered to the request.

    Attributes:
        form: the group that this process is to form; None: no answer yet.
        decides: the ranks decide afterwards whether they use it.
        outdated: the file does not have the server that has the request.
        late: as of Seen.
    """

    form: Form | None = None
    decides: bool = False
    outdated: bool = False
    late: bool = False


Event: TypeAlias = Any  # one of the above


class Do(enum.Enum):
    """Actions without values."""

    BEGIN = enum.auto()  # find which processes ended; yields Began
    VOTE = enum.auto()  # write that this rank is present
    WATCH = enum.auto()  # wait for a change; yields Seen
    ASK = enum.auto()  # read which processes want to join; yields Asked
    AWAIT_OUTCOME = enum.auto()  # wait for a change; yields Outcome
    # Write that the ranks cannot continue, for those that use the next store already.
    CLAIM_NONE = enum.auto()
    FIND = enum.auto()  # read the files of the elastic group; yields Found
    REQUEST = enum.auto()  # write to the store that this process asks to join
    AWAIT_ANSWER = enum.auto()  # wait for an answer, or a short time; yields Answered
    END = enum.auto()  # this process ends: the ranks need it no more
    DONE = enum.auto()  # the call returns the group that was formed last


@dataclass(frozen=True)
class Repeat:
    """Claim an earlier decision again: the store of another rank does not have it."""

    name: str
    decision: Decision


@dataclass(frozen=True)
class PostUnreachable:
    """Write that this rank could not connect to a peer in the last forming."""

    peer: int


@dataclass(frozen=True)
class Report:
    """Write that ranks are `kind`: "dead" or "lost"."""

    kind: str
    ranks: Ranks


@dataclass(frozen=True)
class Claim:
    """Write the decision, unless there is one. Yields Decided."""

    decision: Decision


@dataclass(frozen=True)
class Compare:
    """Read which survivors could not connect in the last forming. Yields Compared."""

    survivors: Ranks


@dataclass(frozen=True)
class AwaitReaders:
    """Wait a short time for so many ranks to read why shrink() failed: the process that serves the
    store must not end before."""

    count: int


@dataclass(frozen=True)
class Follow:
    """The next group has these ranks of the last one, and new processes: by rank, the number of the
    request."""

    slots: tuple[int, ...]
    joined: Mapping[int, int] = field(hash=False)


@dataclass(frozen=True)
class Form:
    """Form the next group, with the processes that join. Yields Formed or NotFormed.

    Attributes:
        name, ranks: of the group; `ranks` is Group.ranks.
        rank: this one's.
        attempt: from 0; the limit doubles with each.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    attempt: int = 0


@dataclass(frozen=True)
class Count:
    """Add this rank to those that formed the larger group, if `formed`. Yields Counted."""

    formed: bool


@dataclass(frozen=True)
class Settle:
    """Write the outcome, unless there is one. Yields Outcome, with this `final`."""

    formed: bool
    final: bool = False


@dataclass(frozen=True)
class SettleNext:
    """The same in the store of the next rank. Yields a final Outcome."""

    formed: bool


@dataclass(frozen=True)
class Fail:
    """The call raises this error; with `pair`, these two ranks cannot connect. No `kind`: the error
    that ended the last attempt."""

    kind: type[Error] | None = None
    text: str = ""
    pair: tuple[int, int] | None = None


Action: TypeAlias = Any  # one of the above


def name_of(action: Action) -> str:
    """ "await_outcome", or "form"."""
    name: str = action.name if isinstance(action, Do) else type(action).__name__
    return name.lower()
