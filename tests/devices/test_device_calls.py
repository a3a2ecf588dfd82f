"""The command that measures the host time of calls with device arrays: device_calls.py."""

import device_calls
import pytest

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
