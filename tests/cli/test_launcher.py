"""@pycomm.launcher: functions that run as several processes."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import finished
from paths import ROOT

import pycomm
from pycomm.bench.support.netns import Network, missing
from pycomm.errors import Error, InvalidArgument
from pycomm.launch.function import RankFailed

pytestmark = pytest.mark.usefixtures("torch_first_store")
WHY_NOT = missing()


@pycomm.launcher(nproc=2, device="cpu")
def sums(x: np.ndarray, *, factor: int) -> Any:
    """The product's sum over ranks, and the process's own rank and size."""
    total = pycomm.all_reduce(x * factor * (pycomm.rank() + 1))
    places = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYCOMM_SIZE")]
    pycomm.user_set(f"of {pycomm.rank()}", pycomm.rank())
    other = pycomm.user_get(f"of {1 - pycomm.rank()}")
    return total, pycomm.rank(), pycomm.local_size(), places, other


@pycomm.launcher(nproc=2, device="cpu")
def goes_wrong(how: str) -> None:
    if pycomm.rank() == 1:
        if how == "early":
            return
        if how == "die":
            os._exit(9)
        raise LookupError("rank one has lost its way")
    if how == "alone":
        threading.Event().wait()  # no rank answers: it does not learn of rank 1
    pycomm.barrier()


@pycomm.launcher(n_gpus=2, world_size=2, master_ip="127.0.0.1", port=0, device="cpu")  # MegEngine's
def with_torch() -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("pycomm")
    x = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(x)
    same = pycomm.init().size == dist.get_world_size()
    dist.destroy_process_group()
    return x.tolist(), same


def test_results_are_returned_by_rank() -> None:
    before = dict(os.environ)
    results = sums(np.arange(3.0), factor=2)
    for rank, (total, own, local_size, places, other) in enumerate(results):
        assert total.tolist() == [0.0, 6.0, 12.0]
        assert (own, local_size, other) == (rank, 2, 1 - rank)
        assert places == [str(rank), "2", str(rank), "2"]
    assert dict(os.environ) == before
    assert sums.__name__ == "sums"
    assert "product's sum" in (sums.__doc__ or "")


def test_torch_group_uses_the_same_engine() -> None:
    assert with_torch() == [([1.0, 1.0], True)] * 2


@pycomm.launcher(nproc=2, device="cpu")
def with_transports() -> Any:
    """The transport between each pair of ranks; also creates a group of torch."""
    import torch.distributed as dist

    ours = pycomm.init().peer_info()[1 - pycomm.rank()].transport
    dist.init_process_group("pycomm")
    dist.barrier(dist.new_group([0, 1]))  # has an engine of its own
    dist.destroy_process_group()
    return ours


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_environment_sets_the_transport(
    transport: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    monkeypatch.setenv("PYCOMM_LOG", "info")
    assert with_transports() == [transport] * 2
    assert capfd.readouterr().err.count(f"1 peers by {transport}") == 2


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", LookupError, "rank one has lost its way"),
        ("alone", LookupError, "rank one has lost its way"),
        ("die", Error, r"rank 1 on host .* ended with exit status 9"),
        ("early", pycomm.errors.PeerLost, "rank 1"),  # it left while rank 0 waited
    ],
)
def test_a_failing_rank_is_named(
    how: str, kind: type[Exception], text: str, monkeypatch: Any
) -> None:
    if how == "alone":
        monkeypatch.setattr("pycomm.launch.function.GRACE_S", 0.5)
    with pytest.raises(kind, match=text) as raised:
        goes_wrong(how)
    cause = raised.value.__cause__
    assert isinstance(cause, RankFailed)
    assert "on host" in str(cause)
    if how == "raise":
        assert "in goes_wrong" in str(cause)  # the traceback


def plain() -> None:
    """Not wrapped."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc": 0}, "nproc: got 0, expected an integer from 1"),
        ({"nproc": 2, "size": 1}, "do not fit"),
        ({"nproc": 1, "size": 2, "rank_start": 2, "master_port": 1}, "do not fit"),
        ({"nproc": 1, "size": 2}, "pass the same master_port"),
        ({"nproc": 1, "device": "tpu"}, "invalid device: got 'tpu'"),
    ],
)
def test_invalid_process_counts(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        pycomm.launcher(**options)(plain)()


def test_a_function_that_cannot_be_imported() -> None:
    with pytest.raises(InvalidArgument, match=r"top level of a file.*run_ranks\(2, function\)"):
        pycomm.launcher(nproc=1)(lambda: None)()


SCRIPT = """
import sys, pycomm

@pycomm.launcher(nproc=1, size=2, rank_start=int(sys.argv[1]), master_addr="10.99.0.1",
                 master_port=29511, device="cpu")
def main():
    return pycomm.all_gather_object(pycomm.rank()), pycomm.host_count()

if __name__ == "__main__":
    print(main())
"""


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_hosts(tmp_path: Path) -> None:
    """The same script on each, the second host's first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with Network(2, ipv6=False) as net:
        started = [
            net.hosts[rank].start([sys.executable, str(script), str(rank)], env) for rank in (1, 0)
        ]
        for process in started:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err
            assert out == "[([0, 1], 2)]\n"


def test_ranks_that_share_a_gpu_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from pycomm.launch import function

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert function._counts(function.Options(nproc=2)) == (2, 2, 2)
    assert capsys.readouterr().err == ""
    assert function._counts(function.Options(nproc=4)) == (4, 4, 2)
    assert "pycomm.launcher: 4 ranks on 2 GPUs: NCCL refuses two" in capsys.readouterr().err


@pycomm.launcher(device="cpu")
def own_size() -> int:
    return pycomm.size()


def test_one_process_by_default_names_nproc(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for processors, size in ((2, 1), (4, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
        assert own_size() == [size] * size
        assert ("nproc=N sets another number" in capfd.readouterr().err) == (size == 1)


def test_script_without_a_main_guard_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pycomm\n@pycomm.launcher(nproc=1, device='cpu')\ndef f(): pass\nf()\n"
    )
    done = finished([sys.executable, str(script)], timeout=150)
    assert done.returncode == 1
    assert "__name__ == '__main__'" in done.stderr
