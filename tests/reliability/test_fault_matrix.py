"""The guarantees of docs/errors.md, by the programs that measure them (benchmarks/reliability): the
fault matrix among threads and some of its cells with processes (`make faults` runs all), an epoch
of the soak with each fault, and Ctrl-C in every wait.
"""

from typing import Any

import pytest
from bench_runs import first_epoch
from sample import of_the_day

from benchmarks.reliability import cancellation, fault_rank, faults, soak
from benchmarks.reliability.fault_rank import DISAGREEMENTS, SLOW, VERBS, Call, Job
from benchmarks.reliability.faults import LARGE, MOMENTS, PROCESSES, TINY, TRANSPORTS, broken, run

SEED = 20  # of the soak


@pytest.mark.parametrize("transport", of_the_day(TRANSPORTS, 2))
@pytest.mark.parametrize("action", [action for action in MOMENTS if action not in PROCESSES])
def test_promises_hold_among_threads(action: str, transport: str) -> None:
    cells = list(faults.matrix([action], [transport]))
    assert cells
    assert [(cell, wrong) for cell in cells if (wrong := broken(cell, run(cell)))] == []


@pytest.mark.parametrize(
    ("action", "moment", "verb", "count", "transport"),
    [
        ("kill", "idle", "all_to_all", TINY, "shm"),
        ("kill", "middle", "all_reduce", LARGE, "tcp"),
        ("kill", "meanwhile", "all_reduce", LARGE, "shm"),
        ("kill", "meanwhile", "gather", LARGE, "tcp"),
        ("kill", "forming", "all_reduce", TINY, "tcp"),
        ("kill", "closing", "all_reduce", TINY, "shm"),
        ("stop", "start", "reduce_scatter", TINY, "tcp"),
        ("stop", "meanwhile", "all_gather", LARGE, "shm"),
        ("exit", "idle", "broadcast", LARGE, "tcp"),
        ("exception", "idle", "scatter", TINY, "shm"),
    ],
)
def test_promises_hold_among_processes(
    action: str, moment: str, verb: str, count: int, transport: str
) -> None:
    job = Job(action, moment, Call(verb, count), transport, processes=True)
    assert job in list(faults.matrix())
    assert broken(job, run(job)) == []


def test_failure_to_form_is_reported_to_the_last_connected_peer() -> None:
    """In one of five runs a rank was complete while its last message to another was in transit."""
    job = Job("disconnect", "forming", Call("all_reduce", TINY), "shm", processes=False)
    assert [wrong for _ in range(40) if (wrong := broken(job, run(job)))] == []


@pytest.mark.timeout(600)
def test_epoch_with_each_fault_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    # The promise is 1,000 ms; this is for a machine with the load of tests.
    monkeypatch.setattr(faults, "AT_ONCE_MS", 20_000.0)
    tally, verbs = soak.Tally(), set()
    right = fault_rank.Call.make

    def make(self: fault_rank.Call, *arrays: Any) -> None:
        verbs.add(self.verb)
        right(self, *arrays)

    monkeypatch.setattr(fault_rank.Call, "make", make)
    epochs = {action: first_epoch(SEED, action) for action in soak.ACTIONS}
    soak.soak(tally, SEED, epochs.values())
    assert tally.complaints == []
    assert set(tally.faults) == {"nothing", *MOMENTS}
    assert verbs == set(VERBS)
    timed = {*MOMENTS} - {*SLOW, *DISAGREEMENTS}
    assert {fault for fault, ms in tally.worst_ms.items() if ms > 0} == timed


@pytest.mark.parametrize("wait", cancellation.WAITS)
def test_ctrl_c_ends_every_wait(wait: str) -> None:
    """native/patience_test.cpp tests the waits for a busy peer. The promised limit is 200 ms, on a
    machine with less load than that of the tests."""
    assert cancellation.took_ms(wait) < 1000.0
