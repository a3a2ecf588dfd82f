"""Interprets tests/unit/membership/*.txt in a world of membership_world.py."""

from __future__ import annotations

import re
from typing import Any

from membership_world import World

ACTIONS = {"votes": "vote", "looks": "watch", "decides": "claim", "forms": "form"}
ACTIONS |= {"counts": "count", "settles": "settle", "settles again": "settlenext"}

WHO = r"(?P<who>[0-9, and]+)"
LINES: dict[str, str] = {
    r"(\d) ranks(?P<elastic>, elastic)?(?P<hosts>, each on a host)?": "begin",
    rf"{WHO} dies?": "dies",
    rf"{WHO} ends?": "dies",
    rf"{WHO} stops?": "stops",
    rf"{WHO} resumes?": "resumes",
    rf"{WHO} dies? before it (?P<moment>.+)": "trap",
    rf"{WHO} loses? (?P<peer>\d)": "loses",
    rf"{WHO} cannot connect": "apart",
    rf"{WHO} (?P<call>shrink|replace)s?": "calls",
    rf"{WHO} grows? by (?P<count>\d)": "calls",
    rf"{WHO} joins(?: for rank (?P<rank>\d))?(?P<only> only)?": "joins",
    r"half a second passes": "grace",
    r"two seconds pass": "stale",
    r"the training ends": "ended",
    r"no group wrote its file": "nothing",
    r"the limit passes": "late",
    rf"-> {WHO}: (?P<answer>.+)": "expect",
}


def numbers(text: str) -> list[int]:
    """The ranks in "0, 1 and 2"."""
    return [int(word) for word in re.findall(r"\d+", text)]


def run_script(text: str) -> None:
    """Does what the lines say. Raises AssertionError if a rank answers otherwise."""
    world = World(0)
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        patterns = [(re.fullmatch(pattern, line), what) for pattern, what in LINES.items()]
        match, what = [(m, what) for m, what in patterns if m][-1]
        assert match is not None
        given = match.groupdict()
        who = numbers(given.get("who") or "")
        if what == "begin":
            world = World(int(match[1]), elastic=bool(given["elastic"]), hosts=bool(given["hosts"]))
        elif what == "expect":
            for number in who:
                rank = world.ranks[number]
                found = rank.answer or ("waits" if rank.todo else "nothing")
                assert found == given["answer"], f"{line}: got {found}"
        elif what == "joins":
            world.joins(int(given["rank"] or -1), bool(given["only"]))
        elif what in ("grace", "stale", "late", "ended"):
            setattr(world, what, True)
        elif what == "nothing":
            world.file = ()
        elif what == "apart":
            world.apart.add(frozenset(who))
        for number in who:
            _do(world, what, number, given)
        world.run()


def _do(world: World, what: str, number: int, given: dict[str, Any]) -> None:
    if what in ("dies", "stops", "resumes"):
        getattr(world, what)(number)
    elif what == "trap":
        world.changed(number).dies = ACTIONS[given["moment"]]
    elif what == "loses":
        world.changed(number).lost.add(int(given["peer"]))
    elif what == "calls":
        call = given.get("call")
        world.calls(number, f"{call}s" if call else "grows", int(given.get("count") or 0))
