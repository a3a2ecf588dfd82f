"""Training that loses a rank and continues: equal replicas, and the residuals of survivors are
kept.

Most ranks are threads, and the lost rank leaves: test_shrink.py and test_elastic.py kill. The
model is a plane whose gradient is this rank's own data and nothing else. The sent values can thus
be computed from the parameters, and the residuals from DGC's state.
"""

import dataclasses
import hashlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from dgc_training import state_of_rank
from small_models import COUNT, Plane, slope_of
from update_training import residuals

import pycomm
from pycomm import Group, errors, testing
from pycomm._quantize import QuantizedExchange
from pycomm._training import coalesced
from pycomm.compress import topk_updates, update_unit
from pycomm.compress.packet_exchange import AllGatherExchange
from pycomm.compress.sharded import ShardedExchange, Sharding
from pycomm.compress.step import Step
from pycomm.testing import FaultPlan, run_ranks

LR = 0.5
LAST = 8  # step
LOST = 2  # rank


def digest(model: torch.nn.Module) -> str:
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


class Late:
    """A function that rank 1 calls in the armed step: it does its work, and then raises, as if
    another rank that already left had been reported lost too late."""

    def __init__(self, whole: Any) -> None:
        self.armed, self.gone, self._whole = False, threading.Event(), whole

    def method(self) -> Any:
        def call(*given: Any) -> Any:
            return self(*given)

        return call

    def __call__(self, *given: Any) -> Any:
        result = self._whole(*given)
        if self.armed and threading.current_thread().name == "rank 1":
            self.armed = False
            self.gone.wait()
            raise errors.PeerLost("heard too late")
        return result

    def leave(self, group: Group) -> None:
        group.close()
        self.gone.set()


def late_in(exchange: str, monkeypatch: pytest.MonkeyPatch) -> Late:
    """The last function of a step with this exchange before the commit."""
    where: Any = {"compact": AllGatherExchange, "sharded": ShardedExchange}.get(exchange, Step)
    name = "_wait" if where is Step else "exchange"
    late = Late(getattr(where, name))
    monkeypatch.setattr(where, name, late.method())
    return late


def train_plane(group: Group, exchange: str, late: Late | None) -> Any:
    """DGC without momentum, so that v is the residual. Rank 2 leaves before step 4; or after it,
    while rank 1 regards that step as failed. Returns the values to check."""
    me, ranks = group.rank, group.size
    model = Plane(ranks)
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    settings: dict[str, Any] = {"exchange": exchange}
    if exchange == "compact":
        settings = {"exchange": "gather", "codec": "compact", "value_dtype": "bfloat16"}
    if exchange == "sharded":
        settings["value_dtype"] = "bfloat16"
    dgc = pycomm.DGC(opt, sparsity=[0.9], min_count=1, masking=False, **settings)
    parallel = pycomm.DataParallel(model, compression=dgc)
    slope = slope_of(me, ranks)
    taken_in = step = 0
    before: dict[str, Any] = {}
    while step < LAST:
        dies = me == LOST and step == 4
        if dies and late is None:
            return None
        if late is not None and me == 1 and step == 4 and not before:
            late.armed = True
        try:
            opt.zero_grad()
            taken_in += 1
            parallel(slope).backward()
            if dies:
                return late.leave(group)
            opt.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # another rank was lost
            left = parallel.shrink(opt)
            step = left.step
            before = {
                "step": step, "lost": left.lost, "lost_residual_norm": left.lost_residual_norm,
                "taken_in": taken_in, "w": model.w.detach().clone(), "residual": residual_by(dgc),
                "digest": digest(model),
            }  # fmt: skip
    assert pycomm.size() == 2
    return {
        "before": before, "digest": digest(model), "taken_in": taken_in, "w": model.w.detach(),
        "residual": residual_by(dgc), "steps": dgc.stats()["step"],
    }  # fmt: skip


def residual_by(dgc: pycomm.DGC) -> torch.Tensor:
    """The residual of this rank, its own and as an owner."""
    (v,) = state_of_rank(dgc)["v"].values()
    return v.view(3, COUNT)


def kept_elements(exchange: str) -> torch.Tensor:
    """The elements of the plane without an owner, or with a surviving one: values sent to other
    owners were in the residual of the lost rank."""
    known = torch.ones(3 * COUNT, dtype=torch.bool)
    if exchange == "sharded":
        shares = Sharding([3 * COUNT], 3)
        lost = shares.whole(LOST, torch.arange(sum(shares.places)))
        known[lost[lost < len(known)].long()] = False
    return known.view(3, COUNT)


@pytest.mark.parametrize("in_doubt", [False, True], ids=["before a step", "late error"])
@pytest.mark.parametrize("exchange", ["gather", "dense_masked", "compact", "sharded"])
def test_dgc_continues_and_the_residual_of_survivors_is_kept(
    exchange: str, in_doubt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = late_in(exchange, monkeypatch) if in_doubt else None
    results = run_ranks(3, train_plane, exchange, late)
    first, second = results[:2]
    done = 5 if in_doubt else 4
    assert first["digest"] == second["digest"]
    assert first["before"]["digest"] == second["before"]["digest"]
    for result in (first, second):
        assert result["steps"] == LAST
        assert result["before"]["step"] == done
        assert result["before"]["lost"] == [LOST]
    # For each survivor: sent values, computed from the parameters, and the residual sum to all its
    # gradients; divided by three ranks until the failure, and by two since.
    was, now = first["before"]["w"], first["w"]
    for rank, result in enumerate((first, second)):
        residual = [r["before"]["residual"][rank] for r in (first, second)]
        sent = -was[rank] * 3 / LR
        known = kept_elements(exchange)[rank]
        want = result["before"]["taken_in"] * slope_of(rank, 3)[rank]
        torch.testing.assert_close((sent + sum(residual))[known], want[known], rtol=1e-5, atol=1e-4)
        since = -(now - was)[rank] * 2 / LR
        residual_since = sum(r["residual"][rank] for r in (first, second)) - sum(residual)
        passes = result["taken_in"] - result["before"]["taken_in"]
        want = passes * slope_of(rank, 3)[rank]
        torch.testing.assert_close(since + residual_since, want, rtol=1e-5, atol=1e-4)
    mean = np.mean([float(r["before"]["residual"].square().sum()) for r in (first, second)])
    assert first["before"]["lost_residual_norm"] == pytest.approx(mean**0.5, rel=1e-4)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )


def train_dense(group: Group) -> Any:
    """Rank 1 is killed in the middle of a step's sum; momentum and a scheduler continue."""
    torch.set_num_threads(1)
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3)
    parallel = pycomm.DataParallel(model, bucket_mb=0.005, lanes=2)
    torch.manual_seed(1 + group.rank)
    step, lost = 0, []
    while step < LAST:
        try:
            opt.zero_grad()
            parallel(torch.randn(8, 20)).square().mean().backward()
            opt.step()
            scheduler.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # another rank was lost
            left = parallel.shrink(opt, scheduler)
            step, lost = left.step, left.lost
    velocity = torch.cat([opt.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()])
    return digest(model), lost, scheduler.last_epoch, velocity.tolist(), pycomm.size()


def test_dense_training_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        testing, "EXIT_TIMEOUT_S", 90.0
    )  # survivors have the whole time of the test
    fault = FaultPlan(1, "kill", at="all_reduce", after_bytes=30_000)
    results = run_ranks(
        3, train_dense, transport="tcp", processes=True, faults=[fault], return_exceptions=True
    )
    assert isinstance(results[1], errors.PeerLost)
    assert results[0] == results[2], results
    assert results[0][1:3] == ([1], LAST)


def train_local(group: Group, rule: str, outer: bool, late: Late) -> Any:
    """Rank 0 leaves at step 5; rank 1 regards the average of step 4 as failed, rank 2 has it."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    around = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9) if outer else None
    local = pycomm.LocalSGD(
        model, opt, k_steps=2, begin_step=2, rule=rule, buffers=False, outer=around
    )
    data = torch.Generator().manual_seed(1 + group.rank)
    loss: Any = None
    while local.step_count < 14:
        if group.rank == 0 and local.step_count == 5:
            return late.leave(group)
        if group.rank == 1 and local.step_count == 3:
            late.armed = True
        try:
            local.zero_grad()
            model(torch.randn(8, 20, generator=data)).square().mean().backward()
            local.step()
        except (errors.PeerLost, errors.GroupBroken):  # another rank was lost
            left = local.shrink()
            whole = torch.cat([s.reshape(-1) for s in local._snapshot])
            sha = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
            loss = left.lost, left.step, local.last_sync, sha
    local.average()
    return digest(model), loss, local.step_count


@pytest.mark.parametrize("outer", [False, True], ids=["mean", "outer momentum"])
@pytest.mark.parametrize("rule", ["paddle", "torch"])
def test_local_sgd_continues(rule: str, outer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(coalesced.average)
    monkeypatch.setattr(coalesced, "average", late)
    _, first, second = run_ranks(3, train_local, rule, outer, late)
    assert first == second
    assert first[1][0] == [0]
    assert first[1][2] == (4 if rule == "paddle" else 5)  # the average that rank 1 had missed


TOPK = pycomm.TopK(density=0.1, group=4, value_dtype="bfloat16", exchange="gather")
SHARDED = dataclasses.replace(TOPK, exchange="sharded", owner_k_factor=1)


def train_updates(group: Group, compression: Any, late: Late | None) -> Any:
    """SGD on the plane with compressed updates. Rank 2 leaves before step 4; or after it, while
    rank 1 regards that step as failed."""
    me, ranks = group.rank, group.size
    model = Plane(ranks)
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    local = pycomm.LocalSGD(model, opt, compression=compression)
    slope, steps, before = slope_of(me, ranks), 0, None
    while local.step_count < LAST:
        step = local.step_count
        if me == LOST and before is None and step == (5 if late else 4):
            rest = residuals(local)[0]
            if late:
                late.leave(group)
            else:
                group.close()
            return rest
        if late and me == 1 and step == 4:
            late.armed = True
        try:
            local.zero_grad()
            model(slope).backward()
            steps += 1
            local.step()
        except (errors.PeerLost, errors.GroupBroken):  # another rank was lost
            left = local.shrink()
            before = {
                "w": model.w.detach().clone(),
                "residual": residuals(local)[0],
                "steps": steps,
                "last_sync": local.last_sync,
                "lost": left.lost,
                "lost_residual_norm": left.lost_residual_norm,
            }
    local.average()
    after = {"w": model.w.detach(), "residual": residuals(local)[0], "steps": steps}
    return before, after


@pytest.mark.parametrize("in_doubt", [False, True], ids=["before a step", "late error"])
@pytest.mark.parametrize(
    "compression", [TOPK, SHARDED, pycomm.Quantize()], ids=["topk", "topk, sharded", "quantize"]
)
def test_updates_continue_and_the_residual_of_survivors_is_kept(
    compression: Any, in_doubt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent values, computed from the parameters, and the residuals of all ranks sum to all updates
    of a survivor; divided by three ranks until the failure, and by two since."""
    late = None
    monkeypatch.setattr(update_unit, "LEAST_PIECE", 4)  # each rank owns groups
    if in_doubt and isinstance(compression, pycomm.TopK):
        late = Late(topk_updates.all_gather)
        monkeypatch.setattr(topk_updates, "all_gather", late)
    elif in_doubt:
        late = Late(QuantizedExchange.finish)
        monkeypatch.setattr(QuantizedExchange, "finish", late.method())
    *results, dropped = run_ranks(3, train_updates, compression, late)
    rests = [sum((one[at]["residual"] for one in results), dropped) for at in (0, 1)]
    for rank, (before, after) in enumerate(results):
        assert before["last_sync"] == (5 if in_doubt else 4)
        assert before["lost"] == [LOST]
        assert torch.equal(before["w"], results[0][0]["w"])
        assert torch.equal(after["w"], results[0][1]["w"])
        own = slice(rank * COUNT, (rank + 1) * COUNT)
        update = LR * slope_of(rank, 3)[rank]
        sent = -3 * before["w"][rank]
        total = sent + rests[0][own]
        torch.testing.assert_close(total, before["steps"] * update, rtol=1e-5, atol=1e-4)
        sent -= 2 * (after["w"] - before["w"])[rank]
        total = sent + rests[1][own]
        torch.testing.assert_close(total, after["steps"] * update, rtol=1e-5, atol=1e-4)
    squares = [float(before["residual"].square().sum()) for before, _ in results]
    assert results[0][0]["lost_residual_norm"] == pytest.approx(np.mean(squares) ** 0.5, rel=1e-4)
