"""The protocol of membership: scripts that can be read without the code, and orders of events.

Each file in membership/ is a script: what happens to ranks, and what their calls return. The same
code explores every order of events of small groups, and random ones of larger ones. It checks in
each state that a group has at most one successor, of a majority of its ranks; and at the limit that
each rank has that group or an error, and none waits.
"""

from pathlib import Path

import pytest
from membership_orders import Budget, at_random, explore, explore_joining, joining
from membership_scripts import run_script
from membership_world import World

SCRIPTS = sorted((Path(__file__).parent / "membership").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    run_script(path.read_text())


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 40


def shrinking(size: int, lost: list[int], stopped: list[int], *, elastic: bool = False) -> World:
    """All ranks that can call shrink()."""
    world = World(size, elastic=elastic)
    for number in lost:
        world.dies(number)
    for number in stopped:
        world.stops(number)
    for number in set(range(size)) - {*lost, *stopped}:
        world.calls(number, "shrinks")
    return world


@pytest.mark.parametrize(
    ("size", "lost", "deaths", "elastic"),
    [
        *[(2, [], 1, False), (3, [1], 1, False), (3, [0], 1, True)],
        *[(4, [3], 0, False), (4, [1, 2], 1, True)],
    ],
)
def test_every_order_after_deaths(size: int, lost: list[int], deaths: int, elastic: bool) -> None:
    world = shrinking(size, lost, [], elastic=elastic)
    assert explore(world, Budget(deaths=deaths), 200_000) < 200_000


def test_every_order_after_the_first_rank_stopped() -> None:
    """It resumes at any time, and the others end at any time after they continued."""
    world = shrinking(3, [], [0], elastic=True)
    assert explore(world, Budget(ends=2), 200_000) < 200_000


@pytest.mark.parametrize(
    ("size", "lost", "deaths"), [(2, [], 0), (2, [1], 1), (3, [0], 0), (3, [1], 0)]
)
def test_every_order_of_a_process_that_joins(size: int, lost: list[int], deaths: int) -> None:
    explore_joining(size, lost, deaths)


@pytest.mark.parametrize("pairs", [[(1, 2)], [(0, 1), (0, 2), (0, 3)], [(0, 2), (1, 3)]])
def test_random_orders_of_ranks_that_cannot_connect(pairs: list[tuple[int, int]]) -> None:
    for seed in range(20):
        world = shrinking(4, [], [], elastic=bool(seed % 2))
        world.apart = set(map(frozenset, pairs))
        at_random(world, Budget(deaths=1), seed)


@pytest.mark.parametrize("size", [5, 6, 8])
def test_random_orders_of_larger_groups(size: int) -> None:
    for seed in range(10):
        for stopped in ([], [0]):
            world = shrinking(size, [size - 1], stopped, elastic=True)
            at_random(world, Budget(deaths=2, ends=size), seed)
        at_random(joining(size, [seed % size], 2), Budget(deaths=2), seed)
