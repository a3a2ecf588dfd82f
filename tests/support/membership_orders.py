"""Orders of events in a world of membership_world.py: all, or random ones."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from membership_world import Rank, World, age

from pycomm._bootstrap.events import name_of

LOCAL = ("begin", "follow", "ask", "done")  # no other rank sees them: their order does not matter


@dataclass(frozen=True)
class Budget:
    """What may still happen at any time: deaths, and clean ends of ranks that continued."""

    deaths: int = 0
    ends: int = 0
    time: bool = True


Move = tuple[World, Budget]


def moves(world: World, budget: Budget) -> Iterator[Move]:
    """The worlds after one event."""
    for rank in world.ranks:
        if world.can_continue(rank):
            after = world.copy()
            own = after.changed(rank.number)
            after.step(own)
            while after.can_continue(own) and name_of(own.todo[0]) in LOCAL:
                after.step(own)
            yield after, budget
        if not rank.alive:
            continue
        if budget.deaths and not rank.stopped:
            yield _after(world, "dies", rank), dataclasses.replace(budget, deaths=budget.deaths - 1)
        continued = rank.answer.startswith("ranks")
        if budget.ends and continued and not rank.todo:
            yield _after(world, "dies", rank), dataclasses.replace(budget, ends=budget.ends - 1)
        if rank.stopped and rank.group and rank.answer == "":
            after = _after(world, "resumes", rank)
            after.calls(rank.number, "shrinks")
            yield after, budget
        if continued and not rank.todo and not rank.stopped and _is_broken(world, rank):
            after = world.copy()
            after.calls(rank.number, "shrinks")
            yield after, budget
    if budget.time and not world.late:
        after = world.copy()
        after.grace, after.late = True, world.grace
        yield after, budget


def _after(world: World, what: str, rank: Rank) -> World:
    after = world.copy()
    getattr(after, what)(rank.number)
    return after


def _is_broken(world: World, rank: Rank) -> bool:
    """Whether a rank of its group is lost, so that it calls shrink() again."""
    assert rank.group is not None
    name, processes = rank.group
    return any((name, p) in world.left or not world.ranks[p].alive for p in processes)


def explore(world: World, budget: Budget, most: int) -> int:
    """Checks each world that any order of events leads to; returns their number, at most `most`."""
    todo = [(world, budget, hash((world.key(), budget)))]
    seen = {todo[0][2]}
    while todo and len(seen) < most:
        now, left, own = todo.pop()
        check(now)
        following = {hash((w.key(), b)): (w, b) for w, b in moves(now, left)}
        following.pop(own, None)
        todo += [(w, b, key) for key, (w, b) in following.items() if key not in seen]
        seen.update(following)
        if now.late and not any(_progress(now, w) for w, _ in following.values()):
            check_end(now)
    return len(seen)


def _progress(before: World, after: World) -> bool:
    """Whether a rank did an action: none died or ended."""
    return all(a.alive == b.alive for a, b in zip(before.ranks, after.ranks, strict=True))


def at_random(world: World, budget: Budget, seed: int) -> World:
    """The end of one random order of events."""
    choose = random.Random(seed)
    while True:
        key = world.key()
        following = [(w, b) for w, b in moves(world, budget) if w.key() != key]
        if not following:
            check_end(world)
            return world
        world, budget = choose.choice(following)
        check(world)


def joining(size: int, lost: list[int], processes: int) -> World:
    """Processes join a group, which replaces its lost ranks, or grows if there are none."""
    world = World(size, elastic=True)
    for number in lost:
        world.dies(number)
    for _ in range(processes):
        world.joins(-1, only=False)
    for number in set(range(size)) - set(lost):
        world.calls(number, "replaces" if lost else "grows", processes)
    return world


def explore_joining(size: int, lost: list[int], deaths: int) -> None:
    """Checks every order of events while a process joins."""
    assert explore(joining(size, lost, 1), Budget(deaths=deaths), 200_000) < 200_000


def check(world: World) -> None:
    """The invariants of each world: a group has one successor, of a majority of its ranks."""
    groups = sorted(world.returned, key=lambda group: age(group[0]))
    assert len(dict(groups)) == len(groups), f"two groups have one name: {groups}"
    earlier = before = tuple(range(world.size))
    for name, after in groups:
        here = [p for p in after if p in before]
        joined = set(after) - set(here)
        assert all(p >= world.size for p in joined), f"{after} continued as {name} beside {before}"
        # A process that joined has a vote once it votes.
        alive = [p for p in before if p in after or (p in earlier and world.ranks[p].alive)]
        majority = 2 * len(here) + (here[:1] == alive[:1]) > len(alive)
        assert majority or not alive, f"{here} continued, of {alive}"
        earlier, before = before, after
    for rank in world.ranks:
        if rank.answer.startswith("GroupBroken rank"):  # these continued
            assert rank.number not in world.file, rank.answer


def check_end(world: World) -> None:
    """At the limit each rank that lives has its group or an error, and all have one group."""
    groups = set()
    for rank in world.ranks:
        if rank.alive and not rank.stopped and rank.state is not None:
            assert rank.answer, f"rank {rank.number} waits: {rank.todo}"
            if rank.answer.startswith("ranks") and not _is_broken(world, rank):
                groups.add(rank.group)
    assert len(groups) <= 1, groups
