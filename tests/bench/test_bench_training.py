"""The benchmarks of training: arithmetic, and a small run of each."""

import argparse
import gzip
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import stored
from paths import ROOT

from benchmarks.training import convergence, shared_data, steps, training, workloads
from benchmarks.training.convergence import Run
from benchmarks.training.models import TASKS
from benchmarks.training.received_bytes import Sets
from benchmarks.training.soap import SOAP
from benchmarks.training.workloads import WORKLOADS
from pycomm.bench.kernels import residuals
from pycomm.bench.support import netns, sizes, summaries
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.testing import run_ranks
from tools import tables

NEEDS_HOSTS = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
BACKENDS = ["gloo", "pycomm", "wrapper", "dgc", "fused", "fake", "alone"]


def test_training_results_are_those_of_the_slowest_rank() -> None:
    first = {"gloo": [[0.2]], "pycomm": [[0.1]], "fake": [[0.08]], "alone": [[0.075]]}
    second = {"gloo": [[0.3]], "pycomm": [[0.05]], "fake": [[0.09]]}
    times = [training.RankTimes("mlp", 30, first), training.RankTimes("mlp", 30, second)]
    gloo, ours, fake, alone = training.rows("1gbit", times)
    assert (gloo.ratio, fake.of_fake_percent, alone.efficiency_percent) == (1, 100, 100)
    assert (ours.step_ms, ours.samples_per_second) == (pytest.approx(100), pytest.approx(600))
    assert alone.samples_per_second == pytest.approx(400)
    assert ours.ratio == pytest.approx(3)
    assert ours.of_fake_percent == pytest.approx(90)
    assert ours.efficiency_percent == pytest.approx(75)


def test_training_runs(tmp_path: Path) -> None:
    content = stored(tmp_path, "training --models mlp --rounds 1 --steps 1", plot=True)
    assert [row["backend"] for row in content["rows"]] == BACKENDS
    assert all(row["step_ms"] > 0 for row in content["rows"])


@NEEDS_HOSTS
def test_tiny_training_run_between_hosts_obeys_the_link_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "training --models mlp --rounds 1 --steps 1 --rates 400mbit,800mbit"
    content = stored(tmp_path, words)
    lines = capsys.readouterr().out.split("# s/step")[1].splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["mlp", "400mbit"], ["mlp", "800mbit"]]
    assert content["settings"]["rates"] == "400mbit,800mbit"
    assert [row["rate"] for row in content["rows"]] == 7 * ["400mbit"] + 7 * ["800mbit"]
    took_ms = {row["backend"]: row["step_ms"] for row in content["rows"][:7]}
    assert list(took_ms) == BACKENDS
    gradients = sum(p.nbytes for p in TASKS["mlp"].model().parameters())
    link_ms = 1e3 * gradients / (400e6 / 8)  # with two ranks each sends that much
    assert min(took_ms[dense] for dense in ("gloo", "pycomm", "wrapper")) > 0.9 * link_ms


# ---- steps over links ----------------------------------------------------------------------------

STEPS = "links --training --steps 1 --compute-s 0.05"


@NEEDS_HOSTS
def test_steps_between_hosts_run_and_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "compute,overlap,dgc,adamw,quantize,topk,topk_50_every_5,quantized_updates"
    ways = names.split(",")
    words = f"{STEPS} --ways {names} --width 128 --rates 10gbit"
    before = stored(tmp_path, words)["rows"]
    assert [row["way"] for row in before] == ways
    assert all(row["step_s"] > 0 for row in before)
    compute, overlap, dgc = before[:3]
    assert compute["expected_s"] is overlap["expected_s"] is None
    assert dgc["expected_s"] > compute["step_s"]
    monkeypatch.delattr(steps, "measure")
    assert stored(tmp_path, words)["rows"] == before
    out = capsys.readouterr().out
    assert "1.467x" in out
    assert f"{dgc['expected_s']:.3f}" in out


@pytest.mark.parametrize(("way", "counted"), [("adamw", 7), ("topk_50_every_5", 10), ("local", 8)])
def test_rounds_are_measured_whole(way: str, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 7 steps, after those that are not counted."""
    taken = []

    class Counted:
        def step(self) -> None:
            taken.append(way)

    monkeypatch.setitem(steps.WAYS, way, lambda model: (model, Counted()))
    run_ranks(1, lambda group: steps.seconds_of(way, (1, 4), 7))
    assert len(taken) == steps.FIRST + counted


# ---- bytes and memory ----------------------------------------------------------------------------


def test_bytes_that_ranks_receive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks beyond the 16 windows are copies, and the bytes of all are counted."""
    count = sum(p.numel() for p in CharGPT(Shape(width=64, layers=2)).parameters())
    u, v, g = np.random.default_rng(0).standard_normal((3, 16, count), np.float32)
    random = residuals.Residuals(u, v, g[None], np.zeros((1, 16, 1), np.int32))
    residuals.store(random, tmp_path / "r.npz")
    words = f"wire {tmp_path / 'r.npz'} --elements 400000 --ranks 4,32 --processes 2"
    content = stored(tmp_path, f"{words} --counted 1000000")
    few, many = content["ranks"]
    assert [few["size"], many["size"]] == [4, 32]
    assert many["gather"] > 7 * few["gather"]
    assert many["sharded"] < many["sharded4"] < many["gather"]
    assert 1 <= many["busiest"] < 1.5  # drawn uniformly
    k = len(Sets(random, 0.999, 400_000).of(0)[0])
    assert many["fewer"] == pytest.approx(31 * 8 * k / many["sharded"])
    assert all(level["of_ring"] <= 1 / 8 for level in content["ramp"])
    for one in content["counted"]:
        assert one["received"] == pytest.approx(one["expected"], rel=0.1)
    assert "busiest" in capsys.readouterr().out


def test_one_copy_needs_less_memory_than_caches(tmp_path: Path) -> None:
    rows = stored(tmp_path, "shared_data --count 200 --epochs 6")["rows"]
    assert [row["way"] for row in rows] == list(shared_data.WAYS)
    assert all(len(row["seconds"]) == 7 for row in rows)
    mib = {row["way"]: row["mib"] for row in rows}
    data = 200 * shared_data.BYTES / 2**20  # of which each cache has nearly all after six epochs
    assert mib["shared"] < mib["cache"] - data / 2


# ---- convergence ---------------------------------------------------------------------------------


def train(folder: Path, methods: str, more: str = "") -> list[Any]:
    words = f"convergence --ranks 2 --steps 4 --workloads text --seeds 1 --methods '{methods}'"
    found: list[Any] = stored(folder, f"{words} {more}")["rows"]
    return found


PAGES = (ROOT / "README.md", ROOT / "benchmarks/RESULTS.md", *ROOT.glob("docs/internals/*.md"))
COMMAND = re.compile(r"python -m benchmarks (convergence .*?)[`\n]")


def test_documented_commands_have_known_methods() -> None:
    found = [words for page in PAGES for words in COMMAND.findall(page.read_text())]
    given = argparse.ArgumentParser()
    for name, known in (("methods", convergence.METHODS), ("workloads", WORKLOADS)):
        given.add_argument(f"--{name}", type=sizes.names(known))
    chosen = [given.parse_known_args(shlex.split(words))[0].methods for words in found]
    assert sum(methods is not None for methods in chosen) > 4


def test_only_the_first_seed_stores_losses(tmp_path: Path) -> None:
    """Other seeds are not drawn."""
    first, second = train(tmp_path, "adamw topk 50", "--seeds 2")
    assert [len(first["losses"]), len(second["losses"])] == [4, 0]
    assert [len(first["mb"]), len(second["mb"])] == [4, 4]


def test_convergence_runs_and_is_resumed(tmp_path: Path) -> None:
    """Also after a version without rates, for which the table then has no column."""
    added = ("samples_per_s", "link_mbit")
    (first,) = train(tmp_path, "dense")
    head, _, line, *_ = tables.convergence({"rows": [first]}, {})
    assert "per second" in head
    assert f" {tables.number(first['samples_per_s'])} |" in line
    older = {name: value for name, value in first.items() if name not in added}
    assert "per second" not in tables.convergence({"rows": [older]}, {})[0]
    summaries.write(tmp_path / "out.json", {"rows": [older]})
    dense, dgc, top, local, adaptive = train(
        tmp_path, "dense,dgc,top-k without feedback,local 2,local adaptive"
    )
    assert dense == {**older, **dict.fromkeys(added)}  # not trained a second time
    for row in (dgc, top, local, adaptive):
        assert row["replicas_equal"]
        assert 0 < row["score"] < 6
        # Of 8 texts per rank and step.
        assert row["samples_per_s"] == pytest.approx(2 * 4 * 8 / row["seconds"], rel=1e-6)
    assert dense["sent_mb"] == dense["dense_mb"]
    assert dgc["sent_mb"] < dense["sent_mb"] / 2
    assert local["sent_mb"] == dense["sent_mb"] * 2 / 4  # after steps 1 and 3
    *_, limited = train(tmp_path, "dense", "--link-mbit 10")
    assert (limited["link_mbit"], limited["score"]) == (10, dense["score"])  # another case
    assert limited["seconds"] > 8 * limited["sent_mb"] * 2**20 / 10e6 / 2  # half: bursts are free


@pytest.mark.parametrize(
    ("method", "words", "ratio"),
    [
        ("adamw", "", 1),
        ("soap", "", 1),
        ("adamw topk 200", "", 200),
        ("adamw quantize 3 8", "--ranks 4", 64 / 11),  # of both phases of the all-reduce
        ("adamw quantized updates 1 1", "--ranks 4", 32),
        ("muon topk 50", "", 50),
    ],
)
def test_bytes_and_replicas(method: str, words: str, ratio: float, tmp_path: Path) -> None:
    (row,) = train(tmp_path, method, words)
    assert row["dense_mb"] / row["sent_mb"] == pytest.approx(ratio, rel=0.15)
    assert row["replicas_equal"]
    assert 0 < row["score"] < 6


@pytest.mark.parametrize(
    ("method", "costs", "message", "fits"),
    [
        ("adamw topk 200", [0.02, 0.05, 0.03], r"<=0.035 in ", True),
        ("adamw topk 200", [0.02, 0.05, 0.04], r"<=0.035 worse ", False),
        ("adamw topk 200", [0.02, 0.06], r"<=0.035 \d", True),  # of three seeds
        ("soap topk 500", [0.11, 0.12, 0.14], r"<=0.115 worse ", False),
    ],
)
def test_costs_of_compression_have_limits(
    method: str, costs: list[float], message: str, fits: bool
) -> None:
    """Against the same optimizer without compression."""
    dense = [1.70] * len(costs)
    scores = {"adamw": dense, "soap": [x - 0.1 for x in dense]}
    reference = method.split(maxsplit=1)[0]
    scores[method] = [x + cost for x, cost in zip(scores[reference], costs, strict=True)]
    lines, good = convergence.summary(runs(scores))
    assert good == fits
    assert re.search(message, " ".join(lines[-1].split()))


def test_muon_steps_the_matrices_of_blocks() -> None:
    model = WORKLOADS["text"].model(0)
    others, muon = convergence.optimizers_of(
        model, WORKLOADS["text"], convergence.METHODS["muon topk 50"]
    )
    assert len(muon.param_groups[0]["params"]) == 2 * 4  # two blocks
    assert len(others.param_groups[0]["params"]) + 8 == len(list(model.parameters()))


def test_memory_counts_the_state_of_the_optimizer_and_the_residuals(tmp_path: Path) -> None:
    """4 bytes of parameters and 4 of gradients; 8 of AdamW's moments, 4 of a residual."""
    words = "memory --ranks 2 --layers 8 --methods 'dense,adamw,adamw topk 200'"
    rows = stored(tmp_path, words)["rows"]
    sgd, adamw, topk = (row["after_step"] for row in rows)
    assert 11.5 < sgd < adamw - 3.5 < topk - 7
    assert all(row["in_step"] >= row["after_step"] for row in rows)


def test_soap_is_adam_in_eigenbases() -> None:
    """One step of a diagonal gradient is Adam's; a rotated gradient gives the rotated step."""
    steps = []
    random = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=random, dtype=torch.float64))[0]
    grad = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    for given in (grad, turn @ grad):
        parameter = torch.nn.Parameter(torch.zeros_like(grad))
        parameter.grad = given.clone()
        SOAP([parameter], lr=0.5).step()
        steps.append(parameter.detach())
    torch.testing.assert_close(steps[0], grad.sign() * -0.5, atol=1e-5, rtol=0)
    torch.testing.assert_close(steps[1], turn @ steps[0], atol=1e-5, rtol=0)


def test_threads_train_as_processes_do() -> None:
    """20 steps of DGC, bit for bit."""
    results = []
    for where in ({"transport": "local"}, {"transport": "", "processes": True}):
        models = [WORKLOADS["text"].model(0) for _ in range(2)]
        given = (("text", "dgc"), 0, 20, models)
        per_rank = run_ranks(2, convergence.rank_runs, *given, timeout_s=200, **where)
        results += [parameters for _, _, parameters in per_rank]
    assert all(torch.equal(result, results[0]) for result in results)


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in Fashion-MNIST's format; the brightness of an image encodes its label."""
    labels = torch.arange(200, dtype=torch.uint8) % 10
    pixels = (labels * 25)[:, None].expand(200, 784).contiguous()
    for name, header, content in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
        packed = gzip.compress(bytes(header) + content.numpy().tobytes())
        for part in ("train", "t10k"):
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(packed)
    monkeypatch.setattr(workloads, "IMAGES", tmp_path)
    monkeypatch.setattr(workloads, "_images", workloads._images.__wrapped__)
    images = WORKLOADS["images"]
    x, y = images.batch(8, torch.Generator().manual_seed(0))
    assert x.shape == (8, 1, 28, 28)
    assert torch.equal(x[:, 0, 5, 7], (y * 25 / 255 - 0.286) / 0.353)
    run = convergence.train(images, convergence.METHODS["dgc"], 0, 2, 100)
    assert images.score(images.model(0)) <= 20 < run.score <= 100
    assert run.replicas_equal


def test_time_to_quality_takes_the_shortest_run_that_reaches_the_loss(tmp_path: Path) -> None:
    """By the mean of the seeds that both have; the time is steps times seconds of a step, of SOAP
    those of AdamW with the same exchange. Methods without runs have no row."""
    dense = runs({"adamw": [1.5, 1.6], "adamw quantize 3 8": [1.54, 1.55], "soap": [1.4]})
    longer = [replace(run, steps=1250) for run in runs({"adamw topk 200": [1.52, 1.59]})]
    (enough,) = [replace(run, steps=1500) for run in runs({"adamw topk 200": [1.48]})]
    longest = [replace(enough, steps=1750), enough]
    files = []
    for name, found in (("a", dense), ("b", longer), ("c", longest)):
        files.append(tmp_path / f"{name}.json")
        summaries.write(files[-1], {"rows": [asdict(run) for run in found]})
    step_s = {"adamw": 4.0, "quantize": 2.0, "topk": 0.5}
    of_link = [{"rate": "1gbit", "way": way, "step_s": s} for way, s in step_s.items()]
    links = tmp_path / "links.json"
    summaries.write(links, {"settings": {"hosts": 2, "elements": 10}, "rows": of_link})
    words = f"quality --links {links} --convergence"
    rows = stored(tmp_path, f"{words} {' '.join(map(str, files))}")["rows"]
    assert [(row["method"], row["steps"], row["seconds"], row["ratio"]) for row in rows] == [
        ("adamw", 1000, 4000.0, 1.0),
        ("adamw quantize 3 8", 1000, 2000.0, 2.0),
        ("adamw topk 200", 1500, 750.0, pytest.approx(4000 / 750)),
        ("soap", 1000, 4000.0, 1.0),
    ]
    assert rows[2]["reference_loss"] == 1.5  # of the only seed of its runs
    stored(tmp_path, f"{words} {files[0]} {files[1]}", status=1)  # no topk run is good enough


def runs(scores: dict[str, list[float]]) -> list[Run]:
    """Complete runs of the text, with 6 of 100 MB, 1 in the second half."""
    rest: dict[str, Any] = {"ranks": 8, "steps": WORKLOADS["text"].steps, "seconds": 1.0}
    rest |= {"dense_mb": 100.0, "sent_mb": 6.0, "mb": [4.0, 5.0, 5.5, 6.0]}
    rest |= {"replicas_equal": True, "losses": [4.0, 2.0, 2.0, 2.0]}
    return [
        Run(workload="text", method=method, seed=seed, score=score, **rest)
        for method, of_seeds in scores.items()
        for seed, score in enumerate(of_seeds)
    ]


GOOD = {"dense": [1.71, 1.72], "dgc": [1.88, 1.89], "dgc without masking": [1.91, 1.92]}


@pytest.mark.parametrize(
    ("changed", "message", "fits"),
    [
        ({}, " in 16.7x 50.0x equal", True),
        ({"dense": [1.8, 1.81]}, " better ", True),
        ({"dgc": [2.0, 2.01]}, " worse ", False),
        ({"dense": [1.6, 1.61]}, " worse ", False),
        ({"dgc": [1.6, 1.61]}, "'dgc' ranked before 'dense'", False),
        ({"dgc": [1.91, 1.92], "dgc without masking": [1.85, 1.86]}, " before 'dgc'", False),
    ],
)
def test_scores_are_checked_against_bands_and_order(
    changed: dict[str, list[float]], message: str, fits: bool
) -> None:
    lines, good = convergence.summary(runs(GOOD | changed))
    assert good == fits
    assert message in " ".join("\n".join(lines).split())


def test_runs_of_the_larger_model_have_no_bands() -> None:
    found = runs({"adamw": 3 * [1.3], "adamw topk 200": 3 * [1.4]})
    larger = [replace(run, workload="larger text", steps=3000) for run in found]
    lines, good = convergence.summary(larger)
    assert good
    assert " 0.100 " in lines[2]


def test_unequal_replicas_and_accuracies_and_short_runs() -> None:
    lines, good = convergence.summary([replace(runs(GOOD)[0], replicas_equal=False)])
    assert not good
    assert "DIFFER" in lines[1]
    short = [replace(run, steps=4, score=9.0) for run in runs(GOOD)]
    assert convergence.summary(short)[1]  # bands are of complete runs
    (dense,) = [replace(run, workload="images", steps=2000) for run in runs({"dense": [88.0]})]
    lines, _ = convergence.summary([dense, replace(dense, method="dgc", score=87.3)])
    assert " 0.700 " in lines[2]
