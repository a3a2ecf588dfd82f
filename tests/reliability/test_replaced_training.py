"""DataParallel.replace() and LocalSGD.replace(): a new process gets the state of the others, which
keep theirs.

Ranks are processes that are killed. Where the result is not compressed, it is bitwise that of a run
without failures.
"""

import contextlib
import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dgc_training import state_of_rank
from elastic_ranks import ElasticRun, die
from small_models import COUNT, Plane, slope_of
from update_training import residuals

import pycomm
from pycomm import elastic, errors
from pycomm.elastic import state as elastic_state

LAST, DEATH = 8, 6  # steps
LR = 0.125
TOPK = pycomm.TopK(density=0.1, group=4, value_dtype="bfloat16")
COMPRESSIONS = {
    "topk": TOPK,
    "topk, sharded": dataclasses.replace(TOPK, exchange="sharded"),
    "quantize": pycomm.Quantize(),
}


def digest(tensors: Any) -> str:
    whole = torch.cat([x.detach().reshape(-1).float() for x in tensors])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


class Run:
    """A training that loses `victim` in step DEATH.

    The victim dies "before" its step, with its "first" gradient, so that a bucket was sent, or
    "after" its backward pass.
    """

    def __init__(self, init: Any, victim: int, moment: str) -> None:
        torch.set_num_threads(1)
        self.group = init()
        self.new = self.group.rank in self.group.joined
        self.dies = self.group.rank == victim and not self.new
        self.moment = moment

    def armed(self, step: int, moment: str) -> bool:
        return self.dies and step == DEATH and moment == self.moment

    def data(self, step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(100 * step + self.group.rank)
        return torch.randn(8, 20, generator=made)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 2))


def train_dense(init: Any, victim: int, moment: str) -> Any:
    """AdamW and a scheduler; buckets of one parameter each."""
    run = Run(init, victim, moment)
    model = net()
    if run.new:  # everything comes from the others
        for p in model.parameters():
            torch.nn.init.constant_(p, 7.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
    parallel = pycomm.DataParallel(model, bucket_mb=0.001)
    step, lost, waiting = 0, [], run.new
    while step < LAST:
        try:
            if waiting:
                with pytest.raises(errors.InvalidArgument, match=r"call replace\(\) first"):
                    parallel(run.data(step))
                result = parallel.replace(optimizer, scheduler)
                step, lost, waiting = result.step, result.lost, False
            if run.armed(step, "before"):
                die()
            if run.armed(step, "first"):
                model[0].bias.register_post_accumulate_grad_hook(die)
            optimizer.zero_grad()
            parallel(run.data(step)).square().mean().backward()
            if run.armed(step, "after"):
                die()
            optimizer.step()
            scheduler.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
            result = parallel.replace(optimizer, scheduler)
            step, lost = result.step, result.lost
    moments = [x for one in optimizer.state.values() for x in (one["exp_avg"], one["exp_avg_sq"])]
    return lost, (digest(model.parameters()), digest(moments), scheduler.state_dict())


def with_loss(file: Path, size: int, victim: int, body: Any, *args: Any) -> dict[str, Any]:
    """The results of the survivors and the new process."""
    with ElasticRun(str(file / "group"), size) as run:
        run.start_ranks(body, victim, *args)
        run.start_joiner("new", body, -1, *args)
        results = run.wait_for()
    assert results.pop(f"rank {victim}") is None
    return results


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of train_dense without a failure."""
    with ElasticRun(str(tmp_path_factory.mktemp("undisturbed") / "group"), 3) as run:
        run.start_ranks(train_dense, -1, "before")
        (_, first), *others = run.wait_for().values()
    assert all(found == first for _, found in others)
    return first


@pytest.mark.parametrize(("victim", "moment"), [(0, "before"), (1, "first"), (2, "after")])
def test_a_run_ends_as_if_no_rank_was_lost(
    tmp_path: Path, victim: int, moment: str, undisturbed: Any
) -> None:
    results = with_loss(tmp_path, 3, victim, train_dense, moment)
    assert all(found == undisturbed for _, found in results.values())
    assert all(lost == [victim] for lost, _ in results.values())


MICROBATCHES, GROWS = 6, 9  # of each step; the step in which the new process is taken in


def dropout_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Dropout(), torch.nn.Linear(64, 2))


def loss_of(model: Any, step: int, index: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * step + index)
    loss: torch.Tensor = model(torch.randn(8, 20, generator=data)).square().mean()
    return loss


def train_microbatches(init: Any, victim: int, joins: str) -> Any:
    """The others continue at once without the victim, and take in the new process in step GROWS."""
    while victim < 0 and not Path(joins).exists():
        time.sleep(0.01)  # polling interval
    run = Run(init, victim, "first")
    model = dropout_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = pycomm.DataParallel(model, bucket_mb=0.001)
    batches = elastic.Microbatches(MICROBATCHES, seed=3)
    step, waiting, taken = 0, run.new, {}
    while step < LAST + 4:
        try:
            if step == GROWS and not run.new:
                Path(joins).touch()
                pycomm.default_group.default().grow()
                waiting = True
            if waiting:
                step, waiting = parallel.replace(optimizer, wait_s=0).step, False
            if run.armed(step, "first"):
                model[0].bias.register_post_accumulate_grad_hook(die)
            optimizer.zero_grad()
            taken[step] = []
            for one in batches.of_step(step):
                taken[step].append(one.index)
                with contextlib.nullcontext() if one.last else parallel.no_sync():
                    (loss_of(parallel, step, one.index) * one.weight).backward()
            optimizer.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
            waiting = True
    return taken, torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def test_each_microbatch_is_taken_in_once(tmp_path: Path) -> None:
    """Whichever ranks there are, the parameters are those of one process with all microbatches,
    except for rounding."""
    results = with_loss(tmp_path, 3, 1, train_microbatches, str(tmp_path / "joins"))
    model = dropout_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(LAST + 4):
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            elastic.manual_seed(3, step, index)
            (loss_of(model, step, index) / MICROBATCHES).backward()
        optimizer.step()
    want = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    ends = [end for _, end in results.values()]
    assert all(end.tobytes() == ends[0].tobytes() for end in ends)
    np.testing.assert_allclose(ends[0], want, rtol=1e-4, atol=1e-6)
    for step in range(DEATH, LAST + 4):
        taken = [index for found, _ in results.values() for index in found.get(step, [])]
        assert sorted(taken) == list(range(MICROBATCHES)), step
    sizes = {step: len(indices) for step, indices in results["rank 0"][0].items()}
    assert [sizes[step] for step in (DEATH - 1, DEATH, GROWS)] == [2, 3, 2]


def compression_of(name: str, optimizer: torch.optim.SGD, model: torch.nn.Module) -> Any:
    if name == "quantize":
        return pycomm.QuantizedGradients(model.named_parameters(), pycomm.Quantize())
    settings = {} if name == "gather" else {"codec": "compact", "value_dtype": "bfloat16"}
    return pycomm.DGC(
        optimizer, sparsity=[0.9], min_count=1, masking=False, exchange=name, **settings
    )


def residual_by(compression: Any) -> torch.Tensor:
    """The residual of this rank, its own and as an owner."""
    saved = compression.state_dict()
    if isinstance(compression, pycomm.DGC):
        found: torch.Tensor = state_of_rank(compression)["v"]["w"]
        return found
    found = saved["residual"].get("w")
    return torch.zeros(0) if found is None else found.clone()


def train_compressed(init: Any, victim: int, name: str) -> Any:
    run = Run(init, victim, "before")
    me, ranks = run.group.rank, run.group.size
    model = Plane(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    compression = compression_of(name, optimizer, model)
    parallel = pycomm.DataParallel(model, compression=compression, bucket_mb=0.001)
    step, passes, norm, waiting = 0, 0, 0.0, run.new
    kept = replaced = torch.zeros(0)
    gathered = None
    while step < LAST:
        try:
            if waiting:
                result = parallel.replace(optimizer)
                step, norm, waiting = result.step, result.lost_residual_norm, False
                replaced = residual_by(compression)
                gathered = compression.gather_state()
            if run.armed(step, "before"):
                die()
            optimizer.zero_grad()
            passes += 1
            parallel(slope_of(me, ranks)).backward()
            optimizer.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
            kept, waiting = residual_by(compression), True
            if name == "quantize":
                passes -= 1  # the gradient of the failed step is dropped
    return {
        "kept": kept.numpy(), "replaced": replaced.numpy(), "norm": norm, "passes": passes,
        "step": step, "w": model.w.detach().numpy(), "residual": residual_by(compression).numpy(),
        "gathered": gathered is not None, "steps": compression.stats()["step"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gather", "sharded", "quantize"])
def test_residuals_of_survivors_are_kept_and_that_of_a_new_rank_is_zero(
    tmp_path: Path, name: str
) -> None:
    """The sent values of each survivor, computed from the parameters, and what the residuals of all
    ranks keep of it sum to all its gradients, each with the weight 1 / ranks."""
    victim, ranks = 1, 3
    results = with_loss(tmp_path, ranks, victim, train_compressed, name)
    new, survivors = results["new"], [results["rank 0"], results["rank 2"]]
    assert not new["replaced"].any()
    assert new["replaced"].size == new["residual"].size == ranks * COUNT
    assert new["kept"].size == 0
    squares = []
    for rank, one in zip((0, 2), survivors, strict=True):
        assert one["steps"] == one["step"] == new["steps"] == LAST
        assert one["w"].tobytes() == new["w"].tobytes()
        if name != "quantize":  # its owner residuals move into the residual
            assert one["kept"].tobytes() == one["replaced"].tobytes()
        squares.append(np.square(one["replaced"], dtype=np.float64).sum())
        if name == "gather":  # the lost residual had no values of other ranks
            sent = -one["w"][rank] * ranks / LR
            left = one["residual"].reshape(ranks, COUNT)[rank]
            want = one["passes"] * slope_of(rank, ranks)[rank].numpy()
            np.testing.assert_allclose(sent + left, want, rtol=1e-5, atol=1e-4)
    norm = np.mean(squares) ** 0.5
    assert all(one["norm"] == pytest.approx(norm, rel=1e-6) for one in results.values())
    assert survivors[0]["gathered"]


def train_local(init: Any, victim: int, name: str) -> Any:
    """Averages every 3 steps. The victim dies two steps after an average, so that survivors have
    steps that the new process lacks."""
    run = Run(init, victim, "before")
    model = net()
    if run.new:
        for p in model.parameters():
            torch.nn.init.constant_(p, 7.0)
    outer = compression = None
    if name == "outer":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    elif name != "dense":
        compression = COMPRESSIONS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    local = pycomm.LocalSGD(
        model, optimizer, k_steps=3, begin_step=1, outer=outer, compression=compression
    )
    waiting, at_join, kept, moments = run.new, None, {}, None
    while local.step_count < LAST:
        try:
            if waiting:
                before = contents(local, optimizer)
                result = local.replace(scheduler)
                waiting, at_join = False, (result.lost, result.step, local.last_sync)
                after = contents(local, optimizer)
                kept = {key: before[key] == after[key] for key in after}
                moments = after["moments"]
                shared = digest(local._snapshot), digest(model.parameters())
                rest = float(sum(x.abs().sum() for x in local.state_dict().get("residual", ())))
            if run.armed(local.step_count, "before"):
                die()
            local.zero_grad()
            model(run.data(local.step_count)).square().mean().backward()
            local.step()
            scheduler.step()
        except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
            waiting = True
    local.average()
    end = digest(model.parameters()), scheduler.state_dict(), local.last_sync
    return at_join, kept, moments, shared, rest, end


def contents(local: pycomm.LocalSGD, optimizer: torch.optim.AdamW) -> dict[str, str]:
    """Digests of what differs by rank. The residual includes that as an owner."""
    moments = [one[key] for one in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    found = {
        "model": local._parameters,
        "moments": [torch.zeros(1), *moments],
        "residual": [torch.zeros(1), *(() if local._compressor is None else residuals(local))],
    }
    return {key: digest(tensors) for key, tensors in found.items()}


@pytest.mark.parametrize("name", ["dense", "outer", *COMPRESSIONS])
def test_local_sgd_gives_a_new_rank_the_last_average(tmp_path: Path, name: str) -> None:
    results = with_loss(tmp_path, 3, 1, train_local, name)
    new = results.pop("new")
    first = results["rank 0"]
    for at_join, kept, _, shared, _, end in results.values():
        assert at_join == new[0]
        assert all(kept.values()), kept
        assert shared[0] == new[3][0], "the snapshot"
        assert end == new[5]
    assert first[0][0] == [1]
    assert first[0][2] == 4
    assert new[3][0] == new[3][1], "its parameters are the snapshot"
    assert new[2] == first[2], "the optimizer's state of the most advanced rank"
    assert new[4] == 0


def lose_another(init: Any, victim: int, second: str) -> Any:
    """When rank 1 was lost, another process dies while it exchanges the state."""
    run = Run(init, victim, "before")
    if run.group.rank == 0 and second == "survivor":
        elastic_state._exchange = die
    if run.new and second == "new":
        elastic_state._exchange = die
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = pycomm.DataParallel(model)
    step, waiting = 0, run.new
    while step < LAST:
        try:
            if waiting:
                result = parallel.replace(optimizer)
                step, waiting = result.step, False
            if run.armed(step, "before"):
                die()
            optimizer.zero_grad()
            parallel(run.data(step)).square().mean().backward()
            optimizer.step()
            step += 1
        except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
            waiting = True
    return pycomm.size(), tuple(result.lost), digest(model.parameters())


@pytest.mark.parametrize("second", ["survivor", "new"])
def test_a_rank_dies_while_it_exchanges_the_state(tmp_path: Path, second: str) -> None:
    with ElasticRun(str(tmp_path / "group"), 3) as run:
        run.start_ranks(lose_another, 1, second)
        run.start_joiner("one", lose_another, -1, second)
        died = "rank 0" if second == "survivor" else "one"
        assert run.wait_for(died) == {died: None}
        run.start_joiner("two", lose_another, -1, "")
        results = run.wait_for()
    alive = {name: found for name, found in results.items() if found is not None}
    assert results.keys() - alive.keys() == {"rank 1", died}
    assert len(set(alive.values())) == 1
    lost = (0, 1) if second == "survivor" else (1,)
    assert alive["two"][:2] == (3, lost), "of both attempts"


def grow_and_compare(init: Any, victim: int, case: str) -> Any:
    """Rank 2 joins an intact group; its replace() gets the state, or names what is different."""
    run = Run(init, victim, "before")
    model = net()
    if case == "other model" and run.new:
        model = torch.nn.Sequential(torch.nn.Linear(20, 65))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "large":
        model = torch.nn.Linear(1024, 1024)
    parallel = pycomm.DataParallel(model)
    if not run.new:
        run.group.grow()
    if case == "other model":
        with pytest.raises(errors.Mismatch, match="name, shape, dtype or device"):
            parallel.replace(optimizer)
        return None
    before = pycomm.default_group.default().stats().bytes_sent
    result = parallel.replace(optimizer)
    sent = result.group.stats().bytes_sent - before
    assert result.group is pycomm.default_group.default()
    return result.lost, result.step, digest(model.parameters()), sent


@pytest.mark.parametrize("case", ["large", "other model"])
def test_a_wrapper_uses_the_group_that_grew(tmp_path: Path, case: str) -> None:
    with ElasticRun(str(tmp_path / "group"), 2) as run:
        run.start_ranks(grow_and_compare, -1, case)
        run.start_joiner("new", grow_and_compare, -1, case)
        results = run.wait_for()
    if case == "other model":
        return
    assert len({found[2] for found in results.values()}) == 1
    assert all(found[:2] == ([], 0) for found in results.values())
    half = (1024 * 1025 * 4) / 2
    sent = {name: found[3] for name, found in results.items()}
    for name, count in sent.items():
        assert count == pytest.approx(0 if name == "new" else half, abs=0.1 * half), sent
