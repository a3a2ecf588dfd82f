"""DGC between hosts: ranks of a host sum their gradients, and hosts exchange packets.

Ranks are threads on simulated hosts. Network namespaces: test_hosts.py.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core_groups import leave
from dgc_training import compressed, memory_of, same_memory, sgd, state_of_rank
from small_models import batch, equal, parameters, perceptron, step_on
from test_dgc_compact import same, trained_perceptron
from torch import Tensor, nn

import pycomm
from pycomm.compress import cost_model, exchange_policy, hierarchical
from pycomm.compress import residual as residuals
from pycomm.compress.cost_model import Coding, Link, Topology, predicted
from pycomm.compress.dgc import compressor_of
from pycomm.compress.hierarchical import HostGroups
from pycomm.compress.schedule import Load, received_bytes
from pycomm.errors import Error, GroupBroken, PeerLost
from pycomm.testing import run_ranks

COUNT = 3000
PAIRS = [0, 0, 1, 1]
EVEN, UNEVEN = [0, 1, 0, 2, 1, 2], [0, 1, 0, 0, 2]  # three hosts, so that sharding pays


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the host of each rank of the first group; subgroups follow."""

    def tell(hosts: Sequence[int]) -> None:
        def hosts_of(group: pycomm.Group) -> list[int]:
            known = [hosts[rank] for rank in group.ranks]
            order = list(dict.fromkeys(known))
            return [order.index(host) for host in known]

        for module in (hierarchical, exchange_policy, cost_model, residuals):
            monkeypatch.setattr(module, "hosts_of", hosts_of)

    return tell


def gradient(rank: int, step: int) -> Tensor:
    """Of one rank: [1, COUNT], with long tails."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1, COUNT, generator=drawn).exp() - 1.5


def trained(
    group: pycomm.Group, options: dict[str, Any], given: Sequence[Sequence[int]], stop: int = -1
) -> list[Tensor]:
    """Weights after 6 steps, u, v and residuals. given[rank] lists the ranks whose mean gradient a
    rank uses. At `stop` the state is loaded into a new model."""
    form = {"sparsity": [0.9], "min_count": 1, **options}
    momenta = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}

    def made() -> tuple[nn.Module, nn.Module, torch.optim.SGD, pycomm.DGC]:
        layer = nn.Linear(COUNT, 1, bias=False)
        nn.init.constant_(layer.weight, 0.5)
        optimizer = sgd(layer, **momenta)
        dgc = pycomm.DGC(optimizer, **form)
        return layer, pycomm.DataParallel(layer, compression=dgc), optimizer, dgc

    layer, model, optimizer, dgc = made()
    for step in range(6):
        if step == stop:
            saved = [x.state_dict() for x in (layer, optimizer, dgc)]
            layer, model, optimizer, dgc = made()
            for one, content in zip((layer, optimizer, dgc), saved, strict=True):
                one.load_state_dict(content)
        optimizer.zero_grad()
        mine = [gradient(rank, step) for rank in given[group.rank]]
        model(sum(mine) / len(mine)).sum().backward()
        optimizer.step()
    return [*parameters(layer), *(x for tensors in memory_of(dgc).values() for x in tensors)]


ALONE = [[rank] for rank in range(8)]
FORMS: list[dict[str, Any]] = [
    {"value_dtype": "float32", "clip_norm": 20.0},
    {"value_dtype": "3bit", "masking": False},
    {"value_dtype": "2bit", "select": "model", "clip": "global", "clip_norm": 20.0},
]


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("hosts", [PAIRS, EVEN])
def test_host_equals_a_rank_with_its_mean_gradient(
    on: Any, hosts: list[int], options: dict[str, Any]
) -> None:
    """Bit for bit, for all of its ranks; two hosts send everything to each other, three use
    sharding."""
    on(hosts)
    found = run_ranks(len(hosts), trained, {**options, "exchange": "hierarchical"}, ALONE)
    count = max(hosts) + 1
    ranks = [[r for r, host in enumerate(hosts) if host == one] for one in range(count)]
    exchange = "gather" if count == 2 else "sharded"
    flat = {**options, "exchange": exchange, "codec": "compact"}
    for (rank, host), wanted in itertools.product(
        enumerate(hosts), [run_ranks(count, trained, flat, ranks)]
    ):
        assert equal(found[rank], wanted[host])


@pytest.mark.parametrize("hosts", [PAIRS, UNEVEN])
def test_buckets_fusion_and_a_resume_change_no_bit(on: Any, hosts: list[int]) -> None:
    """P5, P7, P8."""
    on(hosts)

    options = {"exchange": "hierarchical", "value_dtype": "2bit"}
    size, count = len(hosts), len(parameters(perceptron()))
    results = run_ranks(size, trained_perceptron, options)
    assert all(equal(one[:count], results[0][:count]) for one in results)
    for a, b in itertools.combinations(range(size), 2):
        assert equal(results[a][count:], results[b][count:]) == (hosts[a] == hosts[b])
    assert same(
        results, run_ranks(size, trained_perceptron, options, {"bucket_mb": 1e-5, "lanes": 2})
    )
    assert same(results, run_ranks(size, trained_perceptron, options, None, 3))
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # torch's SGD then uses fma
        assert same(results, run_ranks(size, trained_perceptron, {**options, "fused": True}))


def residual(dgc: pycomm.DGC, group: pycomm.Group) -> Tensor:
    """The residual of this rank, its own and as an owner, as if each rank of a host had its own."""
    (v,) = state_of_rank(dgc)["v"].values()
    return v.double()


def trained_alone(
    group: pycomm.Group, options: dict[str, Any], steps: int
) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Momentum 0, rate 1: weights, the mean over ranks of all gradients and of residuals, and the
    exchange of each step."""
    layer = nn.Linear(COUNT, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = sgd(layer, momentum=0.0, lr=1.0)
    dgc = pycomm.DGC(optimizer, **{"sparsity": [0.9], "min_count": 1, **options})
    model = pycomm.DataParallel(layer, compression=dgc)
    total, took = torch.zeros(COUNT, dtype=torch.float64), []
    for step in range(steps):
        mine = gradient(group.rank, step)
        total += mine[0]
        optimizer.zero_grad()
        model(mine).sum().backward()
        optimizer.step()
        took.append(dgc.stats()["exchange"])
    mean = [pycomm.all_reduce(x, "avg") for x in (total, residual(dgc, group))]
    return layer.weight.detach()[0].double(), mean[0], mean[1], took


def check_conserved(results: Sequence[tuple[Tensor, Tensor, Tensor, list[str]]]) -> None:
    weight, total, missing, _ = results[0]
    assert all(torch.equal(weight, other) for other, *_ in results)
    assert float((missing - weight - total).abs().max()) <= 1e-5 * float(total.abs().max())
    for part in (weight, missing):  # some was sent, some is in the residual
        assert float(part.abs().sum() / total.abs().sum()) > 0.05


@pytest.mark.parametrize("value_dtype", ["float32", "2bit"])
@pytest.mark.parametrize("hosts", [PAIRS, EVEN, UNEVEN])
def test_nothing_is_lost(on: Any, hosts: list[int], value_dtype: str) -> None:
    """P3, also if hosts have different numbers of ranks: gradients count by rank."""
    on(hosts)
    options = {"exchange": "hierarchical", "value_dtype": value_dtype}
    check_conserved(run_ranks(len(hosts), trained_alone, options, 10))


@pytest.mark.parametrize("select", ["parameter", "model"])
@pytest.mark.parametrize("hosts", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    "order",
    [["sharded", "gather"], ["sharded", "hierarchical", "sharded"], ["hierarchical", "gather"]],
)
def test_nothing_is_lost_where_the_exchange_changes(
    on: Any, monkeypatch: pytest.MonkeyPatch, hosts: list[int], select: str, order: list[str]
) -> None:
    """Residuals of ranks and owners move to hosts, and back."""
    on(hosts)

    def counted(*_: Any) -> dict[str, float]:
        return {
            name: 1.0 - (name == order[level[0]]) for name in ("gather", "sharded", "hierarchical")
        }

    level = [0]
    real = exchange_policy.Chooser._choose

    def choosing(self: Any, number: int, *given: Any) -> str:
        level[0] = number
        return real(self, number, *given)

    monkeypatch.setattr(exchange_policy.Chooser, "_choose", choosing)
    monkeypatch.setattr(exchange_policy, "received_bytes", counted)
    ramp = {"sparsity": [0.9, 0.95, 0.97][: len(order)], "rampup_step": 3 * len(order)}
    options = {"value_dtype": "2bit", "select": select, **ramp}
    results = run_ranks(len(hosts), trained_alone, options, 3 * len(order) + 2)
    check_conserved(results)
    assert list(dict.fromkeys(results[0][3])) == list(dict.fromkeys(order))


@pytest.mark.parametrize(("hosts", "after"), [(UNEVEN, PAIRS), (EVEN, EVEN[::-1]), (EVEN, [0, 1])])
@pytest.mark.parametrize("select", ["parameter", "model"])
def test_residual_is_the_same_on_other_hosts(
    on: Any, hosts: list[int], after: list[int], select: str
) -> None:
    """Or with another number of ranks: the mean over ranks of u and v, with owner residuals."""
    settings = {"exchange": "hierarchical", "value_dtype": "2bit", "select": select}

    def means(dgc: pycomm.DGC) -> list[Tensor]:
        own = state_of_rank(dgc)
        return [
            pycomm.all_reduce(x.double(), "avg") for key in ("u", "v") for x in own[key].values()
        ]

    def first(group: pycomm.Group) -> tuple[Any, list[Tensor]]:
        model, optimizer, dgc = compressed(perceptron(), **settings)
        for step in range(3):
            step_on(model, batch(group.rank, step), optimizer)
        return dgc.gather_state(), means(dgc)

    on(hosts)
    saved, wanted = run_ranks(len(hosts), first)[0]

    def second(group: pycomm.Group) -> list[Tensor]:
        model, optimizer, dgc = compressed(perceptron(), **settings)
        dgc.load_state_dict(saved)
        found = means(dgc)
        step_on(model, batch(group.rank, 3), optimizer)
        return found

    on(after)
    for found in run_ranks(len(after), second):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_failed_exchange_sends_nothing(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of a host fails between hosts: all ranks raise, and only their gradient was
    added to the state; the next step works."""
    on(PAIRS)
    real, failing = HostGroups.all_gather_v, threading.Event()

    def sometimes(hosts: HostGroups, *given: Any) -> Any:
        if failing.is_set() and threading.current_thread().name == "rank 2":
            raise ArithmeticError
        return real(hosts, *given)

    monkeypatch.setattr(HostGroups, "all_gather_v", sometimes)
    options = {"exchange": "hierarchical", "value_dtype": "2bit"}

    def program(group: pycomm.Group) -> tuple[list[Tensor], float]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, **options)
        for step in range(5):
            if step == 3:
                pycomm.barrier()
                failing.set()
                weights, before = parameters(module), dgc.state_dict()
                with pytest.raises((ArithmeticError, Error)):
                    step_on(model, batch(group.rank, step), optimizer)
                pycomm.barrier()
                failing.clear()
                assert equal(weights, parameters(module))
                after = dgc.state_dict()
                for name, v in after["v"].items():
                    torch.testing.assert_close(v, before["v"][name] + after["u"][name])
                assert not same_memory(
                    {"u": list(before["u"].values())}, {"u": list(after["u"].values())}
                )
                pycomm.barrier()
                continue
            step_on(model, batch(group.rank, step), optimizer)
        return parameters(module), dgc.stats()["step"]

    results = run_ranks(4, program, timeout_s=30)
    assert all(count == 4 and equal(found, results[0][0]) for found, count in results)


@pytest.mark.parametrize("lost", [[1], [2, 3]], ids=["one rank", "one host"])
def test_survivors_continue(on: Any, monkeypatch: pytest.MonkeyPatch, lost: list[int]) -> None:
    """The lost rank leaves before a step. Each rank of a host has the host's residual: nothing is
    lost while one of them lives. The loss of a host is like that of a rank. Rank 3 learns of rank 1
    before it adds its gradient, unlike rank 2; both continue from the same state."""
    hosts = [0, 0, 1, 1, 2]
    on(hosts)
    real, gone, raised = HostGroups.agree, threading.Event(), threading.Event()

    def agree(self: HostGroups, here: bool) -> bool:
        result = real(self, here)
        if threading.current_thread().name == "rank 3" and gone.is_set() and not raised.is_set():
            raised.set()
            raise PeerLost("heard early")
        return result

    monkeypatch.setattr(HostGroups, "agree", agree)

    def program(group: pycomm.Group) -> Any:
        layer = nn.Linear(COUNT, 1, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = sgd(layer, momentum=0.0, lr=1.0)
        dgc = pycomm.DGC(
            optimizer, sparsity=[0.9], min_count=1, exchange="hierarchical", value_dtype="2bit"
        )
        model = pycomm.DataParallel(layer, compression=dgc)
        step, losses = 0, None
        me = group.rank
        while step < 8:
            if step == 4 and me in lost:
                return leave(group, gone)
            if step == 4:
                gone.wait()
            try:
                optimizer.zero_grad()
                model(gradient(me, step)).sum().backward()
                optimizer.step()
                step += 1
            except (PeerLost, GroupBroken):  # another rank was lost
                left = model.shrink(optimizer, timeout_s=30)
                step, losses = left.step, (left.lost, left.lost_residual_norm)
                assert len(compressor_of(dgc).state.by_host) == 5 - len(lost)
                v = dgc.state_dict()["v"]["weight"].clone()
                losses = (*losses, v)
        return layer.weight.detach(), losses

    found = run_ranks(5, program, timeout_s=60)
    left = [one for one in found if one is not None]
    assert len(left) == 5 - len(lost)
    for weight, losses in left:
        assert torch.equal(weight, left[0][0])
        assert losses[0] == lost
        assert (losses[1] > 0) == (lost == [2, 3])
    alive = [rank for rank in range(5) if rank not in lost]
    for a, b in itertools.combinations(range(len(alive)), 2):
        alike = torch.equal(left[a][1][2], left[b][1][2])
        assert alike == (hosts[alive[a]] == hosts[alive[b]])


def test_auto_and_auto_time_consider_hosts(on: Any) -> None:
    """A link carries the data of all ranks behind it: the hierarchical exchange sends it once."""
    load = Load([10**5], [10**7], 4, "2bit")
    for size, hosts in ((8, 2), (64, 8), (1024, 128)):
        counted = received_bytes(load, size, hosts)
        assert min(counted, key=lambda name: counted[name]) == "hierarchical"
        assert counted["hierarchical"] < 1.01 * min(received_bytes(load, hosts).values())
        ranks = size // hosts
        assert counted["sharded"] > 0.9 * ranks * received_bytes(load, hosts)["sharded"] / 2
    assert "hierarchical" not in received_bytes(Load([10**5], [10**7], 4, None), 8, 2)
    assert "hierarchical" not in received_bytes(load, 8, 8)
    coding = Coding(select=1e-9, scan=1e-10, encode=4e-9, decode=4e-9, add=2e-9)
    slow = predicted(load, 64, Link(1e-3, 1e-7), coding, Topology(8, Link(1e-5, 1e-10)))
    assert min(slow, key=lambda name: slow[name]) == "hierarchical"
    stuck = predicted(load, 64, Link(1e-5, 1e-9), coding, Topology(8, Link(1e-5, 1e-6)))
    assert min(stuck, key=lambda name: stuck[name]) != "hierarchical"
    on(PAIRS)

    def program(group: pycomm.Group, exchange: str) -> tuple[str, set[str]]:
        model, optimizer, dgc = compressed(perceptron(), exchange=exchange, value_dtype="2bit")
        for step in range(2):
            step_on(model, batch(group.rank, step), optimizer)
        stats = dgc.stats()
        return stats["exchange"], set(stats["exchange_costs"])

    names = {"gather", "dense_masked", "sharded", "hierarchical"}
    assert run_ranks(4, program, "auto") == [("hierarchical", names)] * 4
    tuned = run_ranks(4, program, "auto_time")
    assert tuned == [tuned[0]] * 4
    assert tuned[0][1] == {*names, "dense"}
