"""The host cost of calls with device arrays: the command device_calls.py, and runtime calls."""

from typing import Any

import device_calls
import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, on  # noqa: F401 - fixture

import pycomm
from pycomm.bench.support import summaries

pytestmark = pytest.mark.timeout(300)


def test_small_measurement(tmp_path, capsys):
    if device_calls.programs.nvcc() is None:
        pytest.skip("needs nvcc, for the headers of CUDA")
    path = tmp_path / "calls.json"
    assert device_calls.main(["--ranks", "3", "--rounds", "3", "--json", str(path)]) == 0
    costs = [device_calls.Cost(**row) for row in summaries.read(path)["costs"]]
    assert len(costs) == len(device_calls.CALLS)
    assert all(0 < one.low_us <= one.host_us <= one.high_us for one in costs)
    given = {(one.verb, one.algorithm): one for one in costs if one.bytes}
    ring, whole = given["all_reduce", "ring"], given["all_reduce", "nccl"]
    assert (ring.groups, ring.sends, ring.collectives) == (4, 4, 0)
    assert (whole.sends, whole.collectives) == (0, 1)
    assert "all_reduce, ring" in capsys.readouterr().out


def runtime_calls(group: pycomm.Group, device: Any, algorithm: str, agreement: str) -> int:
    group.cuda_agreement = agreement
    x = device.put(np.ones(10, np.float32))
    for _ in range(3):  # the first call connects the ranks
        before: int = device.runtime.calls_of_thread()
        pycomm.all_reduce(x, algorithm=algorithm)
        calls: int = device.runtime.calls_of_thread() - before
        device.get(x)
    return calls


# Rank 0 uses the current device of its thread. Rank 1 sets another one and resets it five times,
# unless it shares the device.
@on("emulated", "emulated, shared")  # CUDA does not count its calls
def test_a_call_makes_few_calls_of_the_runtime(machine):
    budgets = {"host_staged": [11, 11]} if machine.shared else {"nccl": [11, 21], "ring": [16, 26]}
    for algorithm, budget in budgets.items():
        calls = machine.run(2, runtime_calls, algorithm, "before")
        assert all(np.array(calls) <= budget), (algorithm, calls)


# The launch of the kernel that waits for the agreement is one more call.
@on("emulated")
def test_a_call_that_agrees_after_makes_one_call_more(machine):
    for algorithm, budget in {"nccl": [12, 22], "ring": [17, 27]}.items():
        calls = machine.run(2, runtime_calls, algorithm, "after")
        assert all(np.array(calls) <= budget), (algorithm, calls)
