"""The demo: three steps of each row, its stored results, and that its processes end."""

import math
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessException

from pycomm import demo
from pycomm.bench.support import model, netns, processes, summaries, text
from pycomm.demo import report, rows, traffic, training

STEPS = 3
MB = 2**20
WHY_NOT = netns.missing()
NEEDS_HOSTS = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module", params=list(rows.ROWS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The files that one short run of a row stored in its folder."""
    out = tmp_path_factory.mktemp(request.param)
    status = demo.main(["--steps", str(STEPS), "--rows", request.param, "--out", str(out)])
    assert status == 0
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    return summaries.read(out / "demo.json")


def test_row_has_every_column(stored: Any) -> None:
    assert stored["machine"]["torch"] == torch.__version__
    assert stored["settings"]["steps"] == STEPS
    (row,) = stored["rows"]
    assert len(row["losses"]) == len(row["seconds"]) == STEPS
    assert all(map(math.isfinite, [*row["losses"], row["final_loss"]]))
    assert row["losses"][0] < math.log(len(text.ALPHABET)) + 1
    assert row["seconds_per_step"] > 0
    assert row["replicas_equal"]


def test_bytes_sent_of_a_row(stored: Any) -> None:
    (row,) = stored["rows"]
    assert row["counted_by"] in ("pycomm", "kernel")
    assert row["mb"] == sorted(row["mb"])
    assert len(row["mb"]) == STEPS
    gradients_mb = row["parameters"] * 4 / MB  # 2 (n - 1) / n is 1 for two ranks
    if row["key"] == "dgc":  # the warm-up begins with a quarter of them, each with its index
        assert 0.5 * gradients_mb <= row["mb_per_rank_and_step"] <= 0.55 * gradients_mb
        return
    if row["key"] == "topk":
        assert 195 <= gradients_mb / row["mb_per_rank_and_step"] <= 220
        return
    # DDP sends its buckets once to the other ranks, which is visible in three steps.
    assert gradients_mb <= row["mb_per_rank_and_step"] <= 1.05 * gradients_mb


@pytest.mark.parametrize("rate_mbit", [0, pytest.param(40, marks=NEEDS_HOSTS)])
def test_pycomm_and_gloo_train_equally(rate_mbit: int, tmp_path: Path) -> None:
    args = ["--steps", str(STEPS), "--rows", "gloo,pycomm", "--out", str(tmp_path)]
    assert demo.main([*args, *(["--rate", f"{rate_mbit}mbit"] if rate_mbit else [])]) == 0
    gloo, ours = summaries.read(tmp_path / "demo.json")["rows"]
    if rate_mbit:  # with two ranks each sends as many bytes as the gradients have
        on_the_line_s = gloo["parameters"] * 4 / (rate_mbit * 1e6 / 8)
        assert min(gloo["seconds_per_step"], ours["seconds_per_step"]) > 0.9 * on_the_line_s
    assert ours["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
    assert ours["final_loss"] == pytest.approx(gloo["final_loss"], rel=1e-5)
    assert ours["digest"] == gloo["digest"]  # two ranks: one sum, one order


@pytest.mark.parametrize(
    "args", [["--rows", "carrier pigeon"], ["--steps", "0"], ["--rate", "2 bytes"]]
)
def test_invalid_options_are_rejected(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(args)
    assert "pycomm demo: error" in capsys.readouterr().err


def outcome(digest: str, loss: float) -> training.Outcome:
    """An outcome of two steps that sent 3 MB."""
    return training.Outcome([loss, loss], [0.1, 0.3], [MB, 3 * MB], "kernel", digest, 1.5, "", 10)


def test_different_replicas_are_reported() -> None:
    row = rows.ROWS["gloo"]
    same = report.result(row, [outcome("a", 2.0), outcome("a", 4.0)])
    assert same.replicas_equal
    assert same.losses == [3.0, 3.0]
    assert same.mb_per_rank_and_step == 1.5
    assert same.seconds_per_step == pytest.approx(0.2)
    assert not report.result(row, [outcome("a", 2.0), outcome("b", 4.0)]).replicas_equal


def test_text_round_trips_through_the_alphabet() -> None:
    assert text.decode(text.encode(b"def f(x):\n\treturn \xff")) == "def f(x):\n?return ?"
    learn_from, judge_by = text.load()
    assert len(learn_from) > 10 * len(judge_by) > 0
    x, y = text.batch(judge_by, 2, 5, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (2, 5)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_model_is_causal() -> None:
    net = model.CharGPT(model.Shape())
    tokens = torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, 8:] = 50
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])
    assert net.write(tokens[0], 5, torch.Generator().manual_seed(0)).shape == (17,)


def test_kernel_counters_match_socket_bytes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as out,
        listener.accept()[0] as peer,
    ):
        before = traffic.bytes_sent("gloo")
        out.sendall(bytes(100_000))
        left = 100_000
        while left:
            left -= len(peer.recv(left))
        after = traffic.bytes_sent("gloo")
    assert before is not None
    assert after is not None
    assert after[0] - before[0] == 100_000


def report_twice(rank: processes.Rank, word: str) -> None:
    """Reports two messages."""
    rank.send((word, rank.size))
    rank.send(os.getpid())


def fail(rank: processes.Rank) -> None:
    """Rank 1 fails while the others wait for it without a limit."""
    if rank.rank == 1:
        raise ValueError("no more paper")
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.size)


def linger(rank: processes.Rank) -> None:
    """Waits in C++ for a missing rank, on a store that the parent does not serve."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.send(os.getpid())
    store.wait(["never"])


def test_every_report_of_a_rank_is_received() -> None:
    received: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    processes.run(report_twice, ("hello",), 3, lambda rank, message: received[rank].append(message))
    assert [message[0] for message in received.values()] == [("hello", 3)] * 3
    assert len({message[1] for message in received.values()}) == 3


def test_rank_error_is_shown_and_ends_the_run() -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(ProcessException, match="no more paper"):
        processes.run(fail, (), 2, lambda rank, message: None)
    assert set(multiprocessing.active_children()) <= others


def test_listener_error_ends_the_run() -> None:
    others = set(multiprocessing.active_children())

    def fail_to_receive(rank: int, message: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run(linger, (), 2, fail_to_receive)
    assert set(multiprocessing.active_children()) <= others


def test_killed_parent_leaves_no_orphans() -> None:
    code = (
        "from pycomm.bench.support import processes; from test_demo import linger\n"
        "if __name__ == '__main__':\n"
        "    processes.run(linger, (), 2, lambda rank, message: print(message, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        ranks = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        parent.send_signal(signal.SIGKILL)
    try:
        for rank in ranks:
            assert select.select([rank], [], [], 5)[0] == [rank]
    finally:
        for rank in ranks:
            os.close(rank)
