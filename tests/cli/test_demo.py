"""The demo: three steps of each row in turn, and its stored results."""

import contextlib
import io
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pycomm import demo
from pycomm.bench.support import machine, model, netns, plots, summaries, text
from pycomm.demo import report, rows, traffic, training

STEPS = 3
MB = 2**20
NEEDS_HOSTS = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())


@dataclass(frozen=True)
class Run:
    """One short run of all rows: what it stored and printed."""

    stored: dict[str, Any]
    svg: str
    output: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("demo")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = demo.main(["--steps", str(STEPS), "--out", str(out)])
    assert status == 0, printed.getvalue()
    svg = (out / "demo.svg").read_text()
    return Run(summaries.read(out / "demo.json"), svg, printed.getvalue())


@pytest.fixture(params=list(rows.ROWS))
def row(request: pytest.FixtureRequest, run: Run) -> Any:
    """A stored row."""
    (found,) = (row for row in run.stored["rows"] if row["key"] == request.param)
    return found


def test_files_of_a_run(run: Run) -> None:
    assert run.svg.startswith("<?xml")
    for row in rows.ROWS.values():  # labels at the lines and at the bars, and no legend
        assert run.svg.count(f">{plots.LABELS.get(row.name, row.name)}</text>") == 3
    assert run.stored["machine"]["torch"] == torch.__version__
    assert run.stored["settings"]["steps"] == STEPS
    assert [row["key"] for row in run.stored["rows"]] == list(demo.METHODS) == list(rows.ROWS)


def test_rows_train_in_turn(run: Run) -> None:
    steps = re.findall(r"^(.+): step (\d+) of", run.output, re.MULTILINE)
    names = [row.name for row in rows.ROWS.values()]
    assert steps == [(name, str(step + 1)) for step in range(STEPS) for name in names]
    assert "Python as the model writes it" in run.output


def test_row_has_every_column(row: Any) -> None:
    assert len(row["losses"]) == len(row["seconds"]) == STEPS
    assert all(map(math.isfinite, [*row["losses"], row["final_loss"]]))
    assert row["losses"][0] < math.log(len(text.ALPHABET)) + 1
    assert row["seconds_per_step"] == pytest.approx(sum(row["seconds"]) / STEPS, rel=1e-3)
    assert row["seconds_per_step"] > 0
    assert row["replicas_equal"]


def test_bytes_sent_of_a_row(row: Any) -> None:
    assert row["counted_by"] == ("kernel" if row["key"] == "gloo" else "pycomm")
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


def check_equal(rows: list[dict[str, Any]]) -> None:
    """pycomm trains as gloo does."""
    gloo, ours = rows
    assert ours["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
    assert ours["final_loss"] == pytest.approx(gloo["final_loss"], rel=1e-5)
    assert ours["digest"] == gloo["digest"]  # two ranks: one sum, one order


def test_pycomm_and_gloo_train_equally(run: Run) -> None:
    check_equal(run.stored["rows"][:2])


@NEEDS_HOSTS
def test_hosts_train_at_the_rate_of_the_link(tmp_path: Path) -> None:
    args = ["--steps", str(STEPS), "--rows", "gloo,pycomm", "--out", str(tmp_path)]
    assert demo.main([*args, "--rate", "40mbit"]) == 0
    both = summaries.read(tmp_path / "demo.json")["rows"]
    check_equal(both)
    # With two ranks each sends as many bytes as the gradients have.
    gradients_mb = both[0]["parameters"] * 4 / MB
    on_the_line_s = gradients_mb * MB / (40e6 / 8)
    for row in both:
        assert row["seconds_per_step"] > 0.9 * on_the_line_s
        assert gradients_mb <= row["mb_per_rank_and_step"] <= 1.05 * gradients_mb


@pytest.mark.parametrize(
    ("load", "running", "text"),
    [(4.0, 1, ""), (4.1, 5, "other programs"), (4.1, 4, "that has ended")],
)
def test_a_busy_machine_is_reported(
    load: float, running: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "_running", lambda: running)
    assert text in machine.busy()
    assert bool(text) == bool(machine.busy())
    assert "\n" not in machine.busy()


@pytest.mark.parametrize(
    "args", [["--rows", "carrier pigeon"], ["--steps", "0"], ["--rate", "2 bytes"]]
)
def test_invalid_options_are_rejected(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(args)
    assert "pycomm demo: error" in capsys.readouterr().err


def outcome(digest: str, loss: float) -> training.Outcome:
    """An outcome of two steps that sent 3 MB."""
    return training.Outcome(
        "gloo", [loss, loss], [0.1, 0.3], [MB, 3 * MB], "kernel", digest, 1.5, "", 10
    )


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


def test_kernel_counts_the_bytes_of_a_row() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def connect() -> tuple[socket.socket, socket.socket]:
            out = stack.enter_context(socket.create_connection(listener.getsockname()))
            return out, stack.enter_context(listener.accept()[0])

        other, other_peer = connect()
        others = traffic.tcp_sockets()
        out, peer = connect()
        mine = traffic.tcp_sockets() - others
        assert mine == {out.fileno(), peer.fileno()}
        before = traffic.bytes_written(mine)
        for sender, receiver in ((out, peer), (other, other_peer)):
            sender.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(receiver.recv(left))
        assert traffic.bytes_written(mine) == before + 100_000
