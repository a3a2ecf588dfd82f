"""The agreement of replace() and grow() in a simulated world: every moment of death, under many
orders of events (elastic_world.py).

For each scenario a process dies at each of its events in turn. Each of these runs is made with
schedules that run one process as long as it can, each process first; with one that changes after
each event; and with random ones. Without a death, every single change of the first is tried.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from elastic_world import LIMIT_S, Process, Schedule, World, simulate
from membership_orders import explore_joining
from sample import of_the_day

from pycomm import errors

RANDOM = 3  # schedules for each death
WAIT_S = 20.0


def by_priority(order: tuple[int, ...]) -> Schedule:
    """The first process that can continue; it stops only when it waits."""
    return lambda ready: min(ready, key=order.index)


def in_turn() -> Schedule:
    last = [0]

    def choose(ready: list[int]) -> int:
        last[0] = next((number for number in ready if number > last[0]), ready[0])
        return last[0]

    return choose


def at_random(seed: int) -> Schedule:
    return random.Random(seed).choice


def schedules(count: int) -> Iterator[Callable[[], Schedule]]:
    for first in range(count):
        order = tuple((first + n) % count for n in range(count))
        yield lambda order=order: by_priority(order)
    yield in_turn
    for seed in range(RANDOM):
        yield lambda seed=seed: at_random(seed)


def until_complete(world: World, group: Any, elastic: Any) -> Any:
    """Replaces lost ranks until a barrier of all succeeds; returns the processes by rank, and
    Group.ranks and Group.joined."""
    while True:
        try:
            group.barrier()
            return group.numbers, group.ranks, elastic.joined
        except errors.PeerLost:  # a rank died: that is tried
            group, elastic = world.replace(group, elastic, WAIT_S)


def replacing(world: World, size: int, joiners: int) -> None:
    """Ranks that replace those that died, and processes that join."""

    def rank(number: int) -> Any:
        return until_complete(world, world.group(number, size), world.elastic(number, size))

    start(world, rank, size, joiners)


def growing(world: World, size: int, joiners: int) -> None:
    """Ranks that grow by one; they replace a rank that died."""

    def rank(number: int) -> Any:
        group: Any = world.group(number, size)
        elastic, outcome = world.elastic(number, size), "formed"
        try:
            group, elastic = world.grow(group, elastic, 1)
        except (errors.PeerLost, errors.Timeout):  # a process died: that is tried
            outcome = "failed"
        return outcome, *until_complete(world, group, elastic)

    start(world, rank, size, joiners)


def start(world: World, rank: Callable[[int], Any], size: int, joiners: int) -> None:
    for number in range(size):
        world.start(lambda number=number: rank(number))
    for _ in range(joiners):
        world.start(lambda: ("joined", *until_complete(world, *world.join(3 * WAIT_S))))
    world.file = [world.server(number) for number in range(size)]


def run(
    scenario: Callable[[World, int, int], None],
    size: int,
    joiners: int,
    schedule: Schedule,
    deaths: dict[int, int],
) -> World:
    world = World(schedule, deaths)
    scenario(world, size, joiners)
    simulate(world)
    return world


def check(world: World, size: int) -> list[Process]:
    """All ranks that live are in one group; returns them. Processes that joined are in it, or were
    not needed."""
    ranks = [process for process in world.processes[:size] if process.alive]
    joiners = [process for process in world.processes[size:] if process.alive]
    for process in ranks:
        assert not isinstance(process.result, Exception), process.result
    members = [one for one in ranks + joiners if not isinstance(one.result, Exception)]
    groups = {tuple(map(tuple, process.result[-3:])) for process in members}
    assert len(groups) == 1, groups
    ((by_rank, numbers, _),) = groups
    assert {process.number for process in members} <= set(by_rank), "each has a rank"
    assert len(set(by_rank)) == len(set(numbers)) == len(by_rank)
    for number in set(by_rank) - {process.number for process in members}:
        assert not world.processes[number].alive, "it died after the last barrier"
    decided: dict[str, set[bytes]] = {}
    for name, number, text in world.decisions:
        if world.processes[number].alive:
            decided.setdefault(name, set()).add(text)
    assert all(len(texts) == 1 for texts in decided.values()), decided
    return ranks


def deaths_of(
    scenario: Callable[[World, int, int], None], size: int, joiners: int, lost: dict[int, int]
) -> Iterator[World]:
    """The worlds in which one process dies at each of its events."""
    count = size + joiners
    for victim, make in itertools.product(set(range(count)) - lost.keys(), schedules(count)):
        for event in itertools.count(1):
            world = run(scenario, size, joiners, make(), {**lost, victim: event})
            yield world
            if world.processes[victim].alive:
                break


def changed(base: Schedule, at: int, to: int, seen: list[int]) -> Schedule:
    """`base`, but for the choice number `at`; adds the number of alternatives to `seen`."""

    def choose(ready: list[int]) -> int:
        seen.append(len(ready))
        return ready[to % len(ready)] if len(seen) == at + 1 else base(ready)

    return choose


@pytest.mark.parametrize("first", [0, 2])
def test_a_second_process_dies_in_replace(first: int) -> None:
    """One of 3 ranks is dead; another one dies, or one of 2 processes that join."""
    worlds = deaths_of(replacing, 3, 2, {first: 0})
    assert sum(len(check(world, 3)[0].result[-3]) == 3 for world in worlds) > 100


@pytest.mark.parametrize(("size", "joiners"), [(2, 2), (3, 1)])
def test_a_process_dies_in_grow(size: int, joiners: int) -> None:
    """A rank, or a process that joins. All ranks that live see the same outcome."""
    formed = failed = 0
    for world in deaths_of(growing, size, joiners, {}):
        ranks = check(world, size)
        if len(ranks) < size:
            assert all(rank.ended_at < LIMIT_S / 2 for rank in ranks), "none waits for a dead one"
        outcomes = {process.result[0] for process in ranks}
        assert len(outcomes) == 1
        formed += outcomes == {"formed"}
        failed += outcomes == {"failed"}
    assert formed > 100
    assert failed > 100


@pytest.mark.parametrize(
    ("scenario", "lost"), [(replacing, {0: 0}), (replacing, {1: 0}), (growing, {})]
)
def test_every_single_change_of_the_order(scenario: Any, lost: dict[int, int]) -> None:
    for first in range(4):
        order = tuple((first + n) % 4 for n in range(4))
        seen: list[int] = []
        check(run(scenario, 3, 1, changed(by_priority(order), -1, 0, seen), lost), 3)
        for at, count in enumerate(list(seen)):
            for to in range(count) if count > 1 else ():
                world = run(scenario, 3, 1, changed(by_priority(order), at, to, []), lost)
                for process in check(world, 3):
                    assert process.result[-2] == ([0, 1, 2] if lost else [0, 1, 2, 3])


@pytest.mark.parametrize(("size", "lost"), of_the_day([(2, []), (3, [0]), (3, [1])], 3))
def test_every_order_of_a_process_that_joins_when_another_dies(size: int, lost: list[int]) -> None:
    """In the world of membership_world.py, with the protocol alone."""
    explore_joining(size, lost, 1)
