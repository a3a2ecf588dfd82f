"""The error classes, invalid environment variables, and the errors that users see."""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from finished import finished_together
from on_ranks import on_ranks

import pycomm
from benchmarks.support.ports import free_port
from pycomm import Group, _core, config, errors
from pycomm._bootstrap import rendezvous
from pycomm._bootstrap.rendezvous import TorchStore
from pycomm.testing import run_ranks
from pycomm.testing.threads import join

BUILT_IN = {
    "InvalidArgument": ValueError,
    "Unsupported": NotImplementedError,
    "Mismatch": ValueError,
    "Timeout": TimeoutError,
    "PeerLost": ConnectionError,
    "GroupBroken": RuntimeError,
    "InternalError": RuntimeError,
}


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_each_error_derives_from_error_and_a_built_in(name: str, built_in: type) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.Error)
    assert issubclass(kind, built_in)
    assert sorted([*BUILT_IN, "Error"]) == errors.__all__


@pytest.mark.parametrize("name", [*BUILT_IN, "Error"])
def test_fields_default_to_none_and_survive_pickling(name: str) -> None:
    kind = getattr(errors, name)
    bare = kind("what")
    assert str(bare) == "what"
    assert all(getattr(bare, field) is None for field in errors.FIELDS)
    full = kind(
        "what", op="recv", sequence=3, rank=1, peer=2, unreachable=4, elapsed_s=0.5, bytes=8
    )
    again = pickle.loads(pickle.dumps(full))
    assert type(again) is kind
    assert str(again) == "what"
    assert [getattr(again, field) for field in errors.FIELDS] == ["recv", 3, 1, 2, 4, 0.5, 8]
    with pytest.raises(TypeError, match="colour"):
        kind("what", colour="red")


BAD_ENVIRONMENTS = [
    ({"PYCOMM_RANK": "two", "PYCOMM_SIZE": "4"}, "PYCOMM_RANK"),
    ({"PYCOMM_RANK": "-1", "PYCOMM_SIZE": "4"}, "PYCOMM_RANK"),
    ({"PYCOMM_RANK": "4", "PYCOMM_SIZE": "4"}, "PYCOMM_RANK"),
    ({"PYCOMM_RANK": "0"}, "PYCOMM_SIZE"),
    ({"PYCOMM_SIZE": "2"}, "PYCOMM_RANK"),
    ({"PYCOMM_RANK": "0", "PYCOMM_SIZE": "0"}, "PYCOMM_SIZE"),
    ({"PYCOMM_RANK": "0", "PYCOMM_SIZE": "1", "PYCOMM_LOCAL_RANK": "x"}, "PYCOMM_LOCAL_RANK"),
    ({"PYCOMM_SECRET": "short"}, "PYCOMM_SECRET"),
    ({"PYCOMM_LOG": "loud"}, "PYCOMM_LOG"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "123456"}, "MASTER_PORT"),
    ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM"),
]


@pytest.mark.parametrize(("values", "name"), BAD_ENVIRONMENTS)
def test_invalid_variable_is_named(values: dict[str, str], name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=name):
        config.environment(values)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((0, None, None), "rank=0, size=None: expected both"),
        ((None, 2, "h:1"), "rank=None, size=2: expected both"),
        ((None, None, "h:1"), "rank=None, size=None: expected both"),
        ((2, 2, "h:1"), "rank=2, size=2"),
        ((-1, 2, "h:1"), "rank=-1, size=2"),
        ((0, 2, None), "invalid master: got None"),
        *(((0, 2, text), "invalid master") for text in ("h", "h:", ":1", "h:0", "h:70000", "h:a")),
    ],
)
def test_an_invalid_place_is_rejected(place: tuple[Any, ...], text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=text):
        config.Place.of(*place)


def test_a_place_may_be_alone_or_have_an_ipv6_address() -> None:
    assert config.Place.of(None, None, None) is None
    assert config.Place.of(0, 1, None) == config.Place(0, 1)
    assert config.Place.of(1, 2, "[fd00::1]:29500") == config.Place(1, 2, "fd00::1", 29500)


GIVEN = """
import sys
import numpy as np, pycomm
group = pycomm.init(rank=int(sys.argv[1]), size=2, master=sys.argv[2], timeout_s=150)
print(group.rank, group.size, pycomm.local_rank(), pycomm.all_reduce(np.ones(2)).tolist(), end=" ")
print(group.peer_info()[-1].transport, "torch" in sys.modules)
"""


@pytest.mark.parametrize("secret", ["", "0123456789abcdef"])
def test_processes_rendezvous_by_arguments(secret: str) -> None:
    """The variables of a launcher are ignored: with a secret, torch's store is not used."""
    master = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "3", "PYCOMM_SECRET": secret}
    env |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-c", GIVEN]
    ranks = finished_together(([*command, str(rank), master], env) for rank in range(2))
    outputs = [rank.stdout.strip() for rank in ranks]
    torch = not secret
    assert outputs == [f"0 2 0 [2.0, 2.0] shm {torch}", f"1 2 1 [2.0, 2.0] self {torch}"]


GOOD_ENVIRONMENTS = [
    ({}, ("", 0, 1, None, "", 0)),
    (
        {"PYCOMM_RANK": "1", "PYCOMM_SIZE": "2", "PYCOMM_LOCAL_RANK": "1", "RANK": "5"},
        ("pycomm", 1, 2, 1, "", 0),
    ),
    (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "29500"},
        ("torchrun", 3, 4, 1, "h", 29500),
    ),
    (
        {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}
        | {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.2:6170"},
        ("paddle", 1, 2, None, "10.0.0.1", 6170),
    ),
    (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        ("openmpi", 0, 2, 0, "", 0),
    ),
    (
        {"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}
        | {"SLURM_STEP_NODELIST": "node[07-09,11],x1", "SLURM_JOB_ID": "10"},
        ("slurm", 7, 8, 3, "node07", 20070),
    ),
    (  # an interactive step
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
        | {"SLURM_JOB_ID": "10", "SLURM_STEP_ID": "4294967290"},
        ("slurm", 1, 2, 1, "", 27360),
    ),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ("", 0, 1, None, "", 0)),
    (  # MPICH's mpiexec in a job of Slurm's, which starts one task on each host
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        ("mpich", 3, 4, 1, "", 0),
    ),
    (  # srun --mpi=pmi2
        {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        | {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "a,b", "SLURM_JOB_ID": "10"},
        ("slurm", 1, 2, 1, "a", 20070),
    ),
]


@pytest.mark.parametrize(("values", "wanted"), GOOD_ENVIRONMENTS)
def test_variables_of_each_launcher_are_read(
    values: dict[str, str], wanted: tuple[Any, ...]
) -> None:
    c = config.environment(values)
    got = (c.launcher, c.rank, c.size, c.local_rank, c.master_host, c.master_port)
    assert got == wanted


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"},
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        ),
        *({"MV2_COMM_WORLD_SIZE": "2"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PET_NNODES": "2"}),
        {"PMIX_RANK": "1"},
    ],
)
def test_init_names_a_launcher_that_is_not_read(
    values: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    shown = "=".join([*values.items()][-1])
    with pytest.raises(errors.InvalidArgument, match=f"several processes \\({shown}\\)"):
        pycomm.init(timeout_s=2.0)
    pycomm.init(rank=0, size=1)  # the program knows
    pycomm.shutdown()


def test_runs_of_slurm_with_one_port_have_separate_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 7 of job 100 and step 0 of job 101 derive one port."""
    shared = pytest.importorskip("torch.distributed").HashStore()
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    ports, stores = [], []
    for job, number in (("100", "7"), ("101", "0"), ("100", "7")):
        for name, value in {**step, "SLURM_JOB_ID": job, "SLURM_STEP_ID": number}.items():
            monkeypatch.setenv(name, value)
        found = config.environment()
        ports.append(found.master_port)
        stores.append(rendezvous._prefixed(shared, found))
    assert len(set(ports)) == 1
    stores[0].set("key", b"1")
    assert stores[2].get("key", 0.0) == b"1"
    with pytest.raises(errors.Timeout):
        stores[1].get("key", 0.0)


def test_the_transport_is_taken_from_the_environment() -> None:
    assert config.environment({"PYCOMM_TRANSPORT": "tcp"}).transport == "tcp"
    assert config.environment({}).transport == ""
    with pytest.raises(errors.InvalidArgument, match="invalid PYCOMM_TRANSPORT: got 'rdma'"):
        config.environment({"PYCOMM_TRANSPORT": "rdma"})


def test_address_is_taken_from_the_gloo_variable() -> None:
    values = {"GLOO_SOCKET_IFNAME": "eth1,10.1.0.0/16"}
    assert config.environment(values).address == "eth1,10.1.0.0/16"


def disagree(group: Group, mine: dict[str, Any]) -> tuple[str, float, errors.Error]:
    x = np.arange(8, dtype=np.float32)
    wrong = np.full(mine.get("count", 8), 7.0, mine.get("dtype", "float32"))
    before = wrong.copy()
    with pytest.raises(errors.Mismatch) as caught:
        mine["call"](wrong, group)
    assert np.array_equal(wrong, before)
    return str(caught.value), float(pycomm.all_reduce(x, group=group).sum()), caught.value


def reduce_as(op: str) -> Callable[[Any, Group], Any]:
    return lambda x, group: pycomm.all_reduce(x, op, group=group)


DISAGREEMENTS = {
    "count": ({"call": reduce_as("sum"), "count": 8}, {"call": reduce_as("sum"), "count": 9}),
    "dtype": (
        {"call": reduce_as("sum"), "dtype": "float32"},
        {"call": reduce_as("sum"), "dtype": "int32"},
    ),
    "op": ({"call": reduce_as("sum")}, {"call": reduce_as("max")}),
    "verb": (
        {"call": reduce_as("sum")},
        {"call": lambda x, group: pycomm.all_gather(x, group=group)},
    ),
}


@on_ranks("n", timeout_s=20)
@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_mismatch_changes_nothing_and_the_group_continues(group: Group, case: str, n: int) -> None:
    usual, odd = DISAGREEMENTS[case]
    text, total, error = disagree(group, odd if group.rank == n - 1 else usual)
    assert total == 28.0 * n
    assert "rank" in text, text
    assert error.rank == group.rank
    assert error.op


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda x, given: pycomm.all_reduce(x, **given),
    "broadcast": lambda x, given: pycomm.broadcast(x, 0, **given),
    "barrier": lambda x, given: pycomm.barrier(**given),
    "send": lambda x, given: pycomm.send(x, 0, **given),
    "recv": lambda x, given: pycomm.recv(x, 0, **given),
    "recv, asynchronous": lambda x, given: pycomm.recv(x, 0, async_op=True, **given).wait(),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_times_out_and_names_the_missing_rank(call: str) -> None:
    over, verb = threading.Event(), call.partition(",")[0]

    def fn(group: Group) -> Any:
        if group.rank == 0:
            return over.wait(20)
        x = np.ones(1 << 22)  # more than a connection holds
        start = time.monotonic()
        with pytest.raises(errors.Timeout) as caught:
            CALLS[call](x, {"group": group, "timeout_s": 0.3})
        over.set()
        return time.monotonic() - start, caught.value

    _, (elapsed_s, error) = run_ranks(2, fn)
    assert 0.25 < elapsed_s < 1.3
    assert (error.op, error.peer) == (verb, 0)
    assert "rank 0" in str(error)
    assert str(error).startswith(f"{verb}: Timed out after 0.3")


def store_of_torch() -> Any:
    """A store that is implemented in Python."""
    from torch.distributed import HashStore

    return TorchStore(HashStore())


@pytest.mark.parametrize("store", [_core.LocalStore, store_of_torch])
def test_a_group_that_does_not_form_names_the_missing_rank(store: Callable[[], Any]) -> None:
    options = {"size": 2, "timeout_s": 0.3, "transport": "tcp", "secret": "s" * 16}
    with pytest.raises(errors.Timeout, match="of 2 ranks these did not join: 1"):
        join(store(), 0, options)


def test_second_thread_is_rejected_while_a_call_runs() -> None:
    refused = threading.Event()

    def call(group: Group) -> Any:
        """One of two threads: the second one is rejected, and releases the first."""
        try:
            return pycomm.all_reduce(np.ones(4), group=group).tolist()
        except errors.InvalidArgument as error:
            refused.set()
            return str(error)

    def fn(group: Group) -> Any:
        if group.rank == 1:
            assert refused.wait(10)
            return pycomm.all_reduce(np.ones(4), group=group).tolist()
        with ThreadPoolExecutor(2) as pool:
            return sorted(pool.map(call, [group] * 2), key=lambda x: isinstance(x, list))

    (text, first), second = run_ranks(2, fn, timeout_s=20)
    assert "split" in text
    assert first == second == [2.0] * 4


@on_ranks(2)
def test_closed_group_raises_and_closing_twice_is_allowed(group: Group) -> None:
    group.close()
    group.close()
    with pytest.raises(errors.GroupBroken, match="clos"):
        pycomm.all_reduce(np.ones(4), group=group)


def test_the_first_failure_of_a_rank_is_raised_and_no_rank_hangs() -> None:
    def fn(group: Group) -> Any:
        if group.rank == 1:
            raise KeyError("mine")
        pycomm.barrier(group=group)

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        run_ranks(3, fn)
    assert time.monotonic() - start < 5
    if sys.version_info >= (3, 11):
        assert "rank 1 of 3" in caught.value.__notes__[0]
