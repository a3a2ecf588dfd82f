"""Metrics, functions of rank 0 for all ranks, and tensors between ranks with gradients."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from properties import SETTINGS
from small_models import perceptron
from torch.nn import functional as F

import pycomm
from pycomm import Group
from pycomm.errors import Error, InvalidArgument, Mismatch, Unsupported
from pycomm.metrics import Accuracy, Mean, accuracy
from pycomm.testing import run_ranks


@settings(SETTINGS, max_examples=20)
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 10**6))
def test_the_value_is_that_of_one_process(counts: list[int], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    scores = torch.randn(sum(counts), 7, generator=made)
    labels = torch.randint(0, 7, (sum(counts),), generator=made)
    losses = torch.randint(0, 1000, (sum(counts),), generator=made)  # exact sums

    def measure(own_scores: Any, own_labels: Any, own_losses: Any) -> Any:
        shares, mean = Accuracy((1, 5)), Mean()
        for half in (slice(None, 2), slice(2, None)):  # two batches, of unequal size
            shares.update(own_scores[half], own_labels[half])
            if len(own_losses[half]):
                mean.update(own_losses[half].double().mean(), len(own_losses[half]))
        return shares, mean

    def program(group: Group) -> Any:
        shares, mean = measure(*(x.split(counts)[group.rank] for x in (scores, labels, losses)))
        return shares.compute(), mean.compute()

    if sum(counts) == 0:
        return
    hits = [(scores.topk(k).indices == labels[:, None]).any(1).sum().item() for k in (1, 5)]
    wanted = tuple(number / sum(counts) for number in hits)
    for shares, mean in run_ranks(3, program):
        assert shares == wanted
        assert mean == pytest.approx(losses.double().mean().item(), rel=1e-14)


def test_accuracy_of_a_batch_as_in_paddle() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.0, 0.4, 0.6], [0.9, 0.1, 0.0]])
    labels = torch.tensor([1, 2, 2, 1])
    for either in (labels, labels[:, None]):  # Paddle's labels have a second dimension
        found = [accuracy(scores, either, k) for k in (1, 2, 9)]
        assert [(x.dtype, x.item()) for x in found] == [(torch.float32, y) for y in (0.5, 1.0, 1.0)]
    shares = Accuracy((1, 2))
    shares.update(scores, labels[:, None])
    assert shares._sums._sums.tolist() == [2, 4, 4]
    assert math.isnan(accuracy(torch.ones(0, 3), torch.ones(0)))
    for wrong in (labels[:3], labels[None], labels[:, None, None], labels[0]):
        with pytest.raises(InvalidArgument, match=r"expected \[n, classes\] and \[n\] or \[n, 1\]"):
            accuracy(scores, wrong)
    with pytest.raises(InvalidArgument, match="from 1"):
        accuracy(scores, labels, 0)


@on_ranks(2)
def test_value_is_fetched_at_intervals(group: Group) -> None:
    mean = Mean(every=3)
    calls, values = [], []
    for step in range(6):
        mean.update(float(step + group.rank))
        values.append(mean.compute())
        calls.append(group.stats().calls)
    last = mean.compute(now=True)
    mean.reset()
    assert math.isnan(values[0])
    assert values[2:] == [1.5, 1.5, 1.5, 3.0]
    assert calls[1] == calls[0]  # nothing was sent
    assert calls[2] > calls[1]
    assert last == 3.0
    assert math.isnan(mean.compute(now=True))


def test_values_of_several_samples_and_wrong_shapes() -> None:
    def program(group: Group) -> Any:
        mean = Mean()
        mean.update(torch.tensor([1.0, 2.0]))
        mean.update(5, count=2)
        with pytest.raises(InvalidArgument, match=r"\[n, classes\]"):
            Accuracy().update(torch.ones(3, 2), torch.ones(2))
        few = Accuracy((1, 5))
        few.update(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
        shares = few.compute()
        few.reset()
        assert all(math.isnan(share) for share in few.compute())
        return mean.compute(), shares

    assert run_ranks(1, program) == [(13 / 4, (0.0, 1.0))]
    for wrong in (lambda: Accuracy(()), lambda: Accuracy((0,)), lambda: Mean(every=0)):
        with pytest.raises(InvalidArgument):
            wrong()


def test_print0(capsys: Any, monkeypatch: Any) -> None:
    run_ranks(3, lambda group: pycomm.print0("from", group.rank, end=";"))
    assert capsys.readouterr().out == "from 0;"
    pycomm.print0("alone")
    assert capsys.readouterr().out == "alone\n"
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():  # before init()
        monkeypatch.setenv(name, value)
    pycomm.print0("not here")
    assert capsys.readouterr().out == ""


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def program(group: Group) -> Any:
        state = {"net": {"w": torch.full((3,), 7.0)}, "acc": 0.5, "rank": group.rank}
        pycomm.save(state, path)
        assert path.exists()  # on every rank, once save returned
        back = pycomm.load(tmp_path / "absent.pt" if group.rank else path)  # rank 0 reads for all
        assert back["net"]["w"].tolist() == [7.0] * 3
        with pytest.raises(Error if group.rank else OSError, match="nowhere"):
            pycomm.save(state, tmp_path / "nowhere" / "state.pt")
        with pytest.raises(Error if group.rank else OSError, match="absent"):
            pycomm.load(tmp_path / "absent.pt")
        with pytest.raises((Error, AttributeError, TypeError), match=r"pickle|local"):
            pycomm.save({"f": lambda: None}, path)
        assert pycomm.load(path)["acc"] == 0.5  # the old file is intact
        pycomm.save(Path("code"), tmp_path / "code.pt")
        with pytest.raises(pickle.UnpicklingError):
            pycomm.load(tmp_path / "code.pt")
        assert pycomm.load(tmp_path / "code.pt", weights_only=False) == Path("code")
        return back["rank"]

    assert run_ranks(3, program) == [0, 0, 0]
    assert {entry.name for entry in tmp_path.iterdir()} == {"state.pt", "code.pt"}
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_values_that_differ_by_rank_are_not_saved(tmp_path: Path) -> None:
    def program(group: Group) -> Any:
        model = perceptron()
        dgc = pycomm.DGC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), min_count=1)
        ddp = pycomm.DataParallel(model, compression=dgc)
        ddp(torch.ones(2, 16)).sum().backward()
        with pytest.raises(Error, match="gather_state"):
            pycomm.save([{"dgc": dgc.state_dict()}], tmp_path / "own.pt")
        pycomm.save({"dgc": dgc.gather_state()}, tmp_path / "all.pt")
        return pycomm.load(tmp_path / "all.pt")["dgc"]["size"]

    assert run_ranks(2, program) == [2, 2]
    assert not (tmp_path / "own.pt").exists()


def test_a_model_on_two_ranks_trains_as_on_one() -> None:
    """Both optimizers step; the parameters are those of one process, bit by bit."""
    steps = 5
    data = [torch.randn(4, 16, generator=torch.Generator().manual_seed(s)) for s in range(steps)]

    def halves() -> Any:
        layers = list(perceptron())
        return torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:])

    def program(group: Group) -> Any:
        part = halves()[group.rank]
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for x in data:
            optimizer.zero_grad()
            if group.rank == 0:
                pycomm.remote_send(part(x), 1).backward()
            else:
                F.mse_loss(part(pycomm.remote_recv(0)), x[:, :3]).backward()
            optimizer.step()
        return [p.detach().clone() for p in part.parameters()]

    lower, upper = halves()
    whole = torch.nn.Sequential(lower, upper)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x in data:
        optimizer.zero_grad()
        F.mse_loss(whole(x), x[:, :3]).backward()
        optimizer.step()
    results = run_ranks(2, program)
    for ours, theirs in zip(results[0] + results[1], whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_shape_and_dtype_are_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).to(dtype)

    def program(group: Group) -> Any:
        if group.rank == 0:
            pycomm.remote_send(x, 1)
            return x
        return pycomm.remote_recv(0)

    ours, theirs = run_ranks(2, program)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    assert not theirs.requires_grad


@on_ranks(2)
def test_megengine_names_and_expectations(group: Group) -> None:
    x = torch.ones(2, 3)
    if group.rank == 0:
        for _ in range(3):
            pycomm.remote_send(x, dest_rank=1)
        return
    assert torch.equal(pycomm.remote_recv(src_rank=0, shape=[2, 3], dtype=torch.float32), x)
    with pytest.raises(Mismatch, match=r"rank 0 sent \(2, 3\) of .*, expected \(3, 2\) of"):
        pycomm.remote_recv(0, (3, 2))
    with pytest.raises(Mismatch, match=r"expected \(2, 3\) of torch.float64"):
        pycomm.remote_recv(0, dtype=torch.float64)


@on_ranks(1)
def test_unsupported_values_raise(group: Group) -> None:
    with pytest.raises(InvalidArgument, match="another rank"):
        pycomm.remote_send(torch.ones(1), 0)
    with pytest.raises(InvalidArgument, match="at most 8"):
        pycomm.remote_send(torch.ones([1] * 9), 1)


@on_ranks(2)
def test_receiver_is_unaffected_by_rejected_sends(group: Group) -> None:
    """A later tensor is received as if the rejected ones had not been sent."""
    wrong = [
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
    ]
    if group.rank == 0:
        for x in wrong:
            with pytest.raises(Unsupported):
                pycomm.remote_send(x, 1)
        pycomm.remote_send(torch.ones(3), 1)
    else:
        assert torch.equal(pycomm.remote_recv(0), torch.ones(3))
