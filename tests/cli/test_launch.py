"""`pycomm launch`: ranks and hosts, logs, failures, termination; one host, and two of netns.py."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import warm
from finished import finished, finished_together
from paths import ROOT, SUPPORT

from benchmarks.support.ports import free_port
from pycomm.bench.support.netns import Network, missing
from pycomm.launch import failure, worker_setup
from pycomm.launch.failure import Failure

PROGRAM = str(SUPPORT / "launched.py")
LAUNCH = [sys.executable, "-m", "pycomm", "launch"]
LIMIT_S = 150
SECRET = "0123456789abcdef" * 2
WHY_NOT = missing()
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM", "OMP", "PET_"))}
CLEAN["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def launch(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Any:
    """Runs a launch to its end: its returncode, stdout and stderr."""
    return warm.pycomm(["launch", *arguments], folder, {**CLEAN, **(env or {})}, LIMIT_S)


def report_of(log: Path) -> dict[str, Any]:
    line = next(line for line in log.read_text().splitlines() if line.startswith("{"))
    return json.loads(line)


def test_places_tables_and_logs(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(CLEAN, "PYCOMM_LOG", "info")
    done = launch(tmp_path, "--nproc", "2", PROGRAM, "place", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text = (tmp_path / "log" / f"rank{rank}.log").read_text()
        assert "on stderr\n" in text
        assert "arguments --epochs 3\n" in text
        assert text.count('pycomm: group "world": 2 ranks') == (rank == 0)  # rank 0 logs for all
        places = [rank, 2, rank, 2]
        found = report_of(tmp_path / "log" / f"rank{rank}.log")
        assert found["places"] == [places, [rank], places]
        assert found["sum"] == 1.0
    assert re.search(r"\| program +\| .*launched.py place --epochs 3 +\|", done.stdout)
    assert re.search(r"\| PYCOMM_SIZE +\| 2 +\|", done.stdout)
    assert re.search(rf"\| ranks 0 to 1 +\| {socket.gethostname()}, 127.0.0.1 +\|", done.stdout)
    shown = [line for line in done.stdout.splitlines() if "arguments" in line]
    assert len(shown) == 1  # the output of the first rank, unchanged
    assert shown[0].startswith("OMP")
    assert set(os.listdir(tmp_path)) == {"log"}


@pytest.mark.parametrize(("how", "status"), [("raise", 1), ("kill", 137), ("exit", 7)])
def test_the_first_failure_is_named_first(tmp_path: Path, how: str, status: int) -> None:
    done = launch(tmp_path, "--nproc=2", "--log-dir", "out", PROGRAM, "fail", how)
    assert done.returncode == status
    lines = done.stderr.splitlines()
    assert lines[0].startswith(
        f"pycomm launch: the first failure was rank 1 on host {os.uname()[1]}"
    )
    if how == "raise":
        assert lines[0].endswith("LookupError: rank one has lost its way")
        assert lines[1] == "Traceback (most recent call last):"
        assert PROGRAM in lines[2]  # the user's frame, not pycomm's
        assert "lost its way" in (tmp_path / "out" / "rank1.log").read_text()
    assert "pycomm launch: then rank 0" in done.stderr


CORES = sorted(os.sched_getaffinity(0))
MANY = max(2, len(CORES))  # ranks: each has an equal share, if there is one


@pytest.mark.parametrize(
    ("words", "count", "each"),
    [
        (["--cpus-per-rank", "1", "--quiet"], min(2, len(CORES)), 1),
        ([], MANY, len(CORES) // MANY),
        (["--cpus-per-rank", "0"], 2, 0),
        ([], 1, 0),
    ],
)
def test_processors_are_assigned(words: list[str], count: int, each: int, tmp_path: Path) -> None:
    done = launch(tmp_path, *words, "--nproc", str(count), "-t", "3", PROGRAM, "place")
    assert done.returncode == 0, done.stderr
    shown = f"processors per rank | {each}, bound" if each else "shared by all"
    assert (shown in done.stdout) == ("configuration" in done.stdout) != ("--quiet" in words)
    for rank in range(count):
        found = report_of(tmp_path / "log" / f"rank{rank}.log")["cores"]
        assert found == (CORES[rank * each : (rank + 1) * each] or CORES)
        assert f"[rank {rank}] OMP {each or ''}" in done.stdout  # -t 3 shows all ranks


def test_ranks_use_only_the_processors_of_the_launcher(tmp_path: Path) -> None:
    """As in a cpuset or under taskset."""
    before = os.sched_getaffinity(0)
    last = max(before)
    os.sched_setaffinity(0, {last})  # of this thread, whose child inherits it
    try:
        done = launch(tmp_path, "--nproc", "1", "--cpus-per-rank", "1", PROGRAM, "place")
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path / "log" / "rank0.log")["cores"] == [last]


def test_a_command_is_started(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc", "1", "--no-python", "sh", "-c", "echo rank $PYCOMM_RANK")
    assert "rank 0\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nnodes", "2"], "several hosts need a rendezvous"),
        (["--cpus-per-rank", "4000"], "this process may use"),
        (["--cpus-per-rank", "-1"], "at least 0"),
        (["--devices", "a,b"], "numbers with commas"),
        (["--devices", "0,1", "--nproc", "3"], "means --nproc 2"),
        (["--gpus=0,77"], "--devices 0,77: CUDA finds"),  # Paddle's name, and no such device
        *(([name, "-1"], name) for name in ("--replace", "--spares", "--min-ranks")),
        (["--spares", "1", "--nnodes", "2", "--rdzv-endpoint", "a:1"], "need PYCOMM_SECRET"),
        (["--replace", "1", "--nnodes", "1:2", "--rdzv-endpoint", "a:1"], "--replace"),
        (["--replace", "1", "--max-restarts", "1"], "--replace"),
        (["--nproc", "0"], "--nproc"),
        (["--nproc", "0", "--spares", "0"], "--nproc"),
        (["--replace-backend", "nccl"], "invalid --replace-backend: got 'nccl'"),
    ],
)
def test_invalid_options_are_rejected_before_ranks_start(
    arguments: list[str], text: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    from pycomm.launch import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert command.main([*arguments, PROGRAM]) == 2
    assert text in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_requested_devices_are_assigned(tmp_path: Path, monkeypatch: Any) -> None:
    """Without a GPU: the devices that ranks will see, their number, and their assignment."""
    import torch

    from pycomm.launch import command

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "environ", {**CLEAN, "CUDA_VISIBLE_DEVICES": "4,5,6"})
    options = command.parser().parse_args(["--devices", "6, 4", PROGRAM])
    config, line = command.prepared(options, str(tmp_path))
    assert config.nproc_per_node == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,4"
    assert "--set-device" in line
    code = "import os, torch; from pycomm.launch.worker_setup import setup_worker"
    code += "; torch.cuda.device_count = lambda: 2; torch.cuda.set_device = print"
    code += "; setup_worker(os.getppid(), 3, None, True)"
    rank = [sys.executable, "-c", code]  # a session of its own: it must end with its parent
    assert subprocess.check_output(rank, env=CLEAN, timeout=LIMIT_S) == b"1\n"


@pytest.mark.parametrize(
    ("options", "devices", "text"),
    [
        ([], 0, ": one per 2 processors; --nproc N sets it"),
        (["--nproc", "3"], 0, ""),
        (["--nproc", "3"], 2, ", on 2 GPUs: NCCL refuses two ranks of a group on one GPU"),
        ([], 2, ""),
    ],
)
def test_the_table_tells_how_ranks_are_counted(
    options: list[str], devices: int, text: str, monkeypatch: Any
) -> None:
    import torch

    from pycomm.launch import command

    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    count, found, shown = command._ranks(command.parser().parse_args([*options, PROGRAM]))
    assert (found, shown) == (devices, f"{count}{text}")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pycomm.launch", "--help"]
    done = finished(command, timeout=LIMIT_S)
    assert done.stdout.startswith("usage: pycomm launch"), done.stderr


def test_restart_has_separate_logs(tmp_path: Path, capsys: Any) -> None:
    from pycomm.launch import tables

    (tmp_path / "log").mkdir()
    logs = tables.Logs(str(tmp_path / "log"), False, [("program", "x")], str(tmp_path))
    env = dict.fromkeys(tables.SHOWN, "3")
    for attempt, ending in (("0", "log"), ("2", "2.log")):
        found = logs.reify({0: {**env, "TORCHELASTIC_RESTART_COUNT": attempt}})
        assert found.stdouts == {0: str(tmp_path / "log" / f"rank3.{ending}")}
        link = tmp_path / f"rank3.{ending}"  # of the latest run
        assert str(link.readlink()) == f"log/rank3.{ending}"
        assert "starting 3 of 3 processes on this host" in capsys.readouterr().out


def of(rank: int, kind: str, when: float, status: int = 1) -> Failure:
    return Failure(rank, "host", 1, kind, "text", when=when, status=status)


def test_first_failure_is_determined() -> None:
    lost, wrong = of(0, "PeerLost", 1.0), of(1, "ValueError", 2.0)
    silent, ended = of(2, "", 0.0, 137), of(3, "", 0.0, 143)
    assert failure.first([lost, wrong]) is wrong
    assert failure.first([wrong, of(0, "ValueError", 1.5)]).when == 1.5
    assert failure.first([lost, wrong, silent]) is silent
    assert failure.first([ended, lost]) is lost
    assert failure.first([ended]) is ended


def test_default_counts_and_cores(monkeypatch: Any) -> None:
    assert worker_setup.default_count(3) == 3
    cores = sorted(os.sched_getaffinity(0))
    assert worker_setup.default_count(0) == max(1, len(cores) // 2)
    assert worker_setup.cores_of(0, len(cores)) == cores
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worker_setup.threads_for(1, 3) == {"OMP_NUM_THREADS": "3"}
    assert worker_setup.threads_for(1, None) == {"OMP_NUM_THREADS": str(len(cores))}
    assert worker_setup.threads_for(2 * len(cores), None) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_setup.threads_for(1, 3) == {}


def start_hosts(
    net: Network, folder: Path, order: list[int], *arguments: str, secret: str = SECRET
) -> list[Any]:
    """The launchers of two hosts, 1 and 2 ranks, started in this order; by host. Without a secret
    each rank imports torch, for its store."""
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"{net.hosts[0].ipv4()}:29400"]
    started = {
        number: net.hosts[number].start(
            [*LAUNCH, *meeting, "--nproc", str(number + 1), f"--log-dir={folder}", *arguments],
            {"PYTHONPATH": CLEAN["PYTHONPATH"], "PYCOMM_SECRET": secret},
        )
        for number in order
    }
    return [started[number] for number in sorted(order)]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("secret", ["", SECRET], ids=["no secret", "secret"])
def test_two_hosts_train_together(secret: str, tmp_path: Path) -> None:
    """With a secret the ranks use rank 0's own store."""
    with Network(2, ipv6=False) as net:
        for process in start_hosts(net, tmp_path, [1, 0], PROGRAM, "train", secret=secret):
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + err
            assert ("any client that can reach" in err) != bool(secret)
            assert "frame #" not in err, err  # of torch's store, which the other host serves
            for host in net.hosts:  # the places of all ranks, on each host
                assert re.search(rf"\| ranks? \d( to \d)? +\| \S+, {host.ipv4()} +\|", out), out
    logs = sorted(tmp_path.glob("rank*.log"))
    assert len(logs) == 3
    lines = {line for log in logs for line in log.read_text().splitlines() if "bits" in line}
    assert len(lines) == 1
    assert lines.pop().endswith(f" 2 {'TcpStore' if secret else 'TorchStore'}")  # hosts


@pytest.mark.parametrize("how", ["endpoint", "node rank", "kubeflow trainer"])
def test_two_launchers_of_a_run_on_one_machine(how: str, tmp_path: Path) -> None:
    """As with torchrun; for example two pods in the network of one node. Kubeflow's Trainer sets
    variables in place of options."""
    program = tmp_path / "program.py"
    program.write_text("import pycomm; print(pycomm.init().size, 'ranks')")
    port, launchers = free_port(), []
    for number in range(2):
        place = {"master-addr": "127.0.0.1", "master-port": str(port), "node-rank": str(number)}
        place |= {"nnodes": "2", "nproc-per-node": "1"}
        variables = {f"PET_{name.upper().replace('-', '_')}": x for name, x in place.items()}
        meeting = {
            "endpoint": [f"--rdzv-endpoint=127.0.0.1:{port}", "--nnodes=2"],
            "node rank": [f"--{name}={x}" for name, x in place.items()],
            "kubeflow trainer": [],
        }[how]
        words = [*LAUNCH, *meeting, f"--log-dir={tmp_path / str(number)}", str(program)]
        env = {**CLEAN, "PYCOMM_SECRET": SECRET, **({} if meeting else variables)}
        launchers.append((words, env))
    for done in finished_together(launchers, timeout=LIMIT_S):
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 ranks" in done.stdout


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_both_hosts_name_the_rank_that_failed(tmp_path: Path) -> None:
    with Network(2, ipv6=False) as net:
        for process in start_hosts(net, tmp_path, [0, 1], PROGRAM, "fail", "raise", secret=""):
            _, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 1, err
            assert re.search(r"the first failure was rank 1 on .*LookupError", err), err


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("dies", [False, True])
def test_a_host_that_has_ended_does_not_wait_for_one_that_fails(tmp_path: Path, dies: bool) -> None:
    """Torch's agent would, for 300 s."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Network(2, ipv6=False) as net:
        ended, failing = start_hosts(net, tmp_path, [0, 1], PROGRAM, "part", str(pipe))
        limit = threading.Timer(LIMIT_S, ended.kill)  # ends the lines below
        limit.start()
        assert any("waiting for the other hosts" in line for line in ended.stdout)
        limit.cancel()
        if dies:
            failing.kill()  # and its ranks end with it
        else:
            pipe.write_text("now")
            _, err = failing.communicate(timeout=LIMIT_S / 2)
            assert failing.returncode == 1, err
        out, err = ended.communicate(timeout=LIMIT_S / 2)
        assert ended.returncode == 0, err
        assert ("no heartbeat from the launcher of host 1 of 2" in out) == dies
        assert "Traceback" not in err


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_launcher_reports_that_the_rendezvous_launcher_died(tmp_path: Path) -> None:
    with Network(2, ipv6=False) as net:
        killed, left = start_hosts(net, tmp_path, [0, 1], PROGRAM, "wait")
        limit = threading.Timer(LIMIT_S, killed.kill)  # ends the lines below
        limit.start()
        assert any(line.startswith("pids") for line in killed.stdout)
        limit.cancel()
        killed.kill()
        _, err = left.communicate(timeout=LIMIT_S / 2)
        assert left.returncode == 1, err
        assert "or the launcher there ended: " in err
        assert "Traceback" not in err


def other_launchers(rank: int, port: int) -> dict[str, dict[str, str]]:
    """The variables that Slurm, Open MPI, Paddle and Kubeflow's Training Operator set for rank
    `rank` of two."""
    me, place = str(rank), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {
        "slurm": {
            **{"SLURM_PROCID": me, "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": me},
            **{"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)},
        },
        "openmpi": {
            **{"OMPI_COMM_WORLD_RANK": me, "OMPI_COMM_WORLD_SIZE": "2", **place},
            **{"OMPI_COMM_WORLD_LOCAL_RANK": me, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        },
        "paddle": {
            **{"PADDLE_TRAINER_ID": me, "PADDLE_TRAINERS_NUM": "2"},
            **{"PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{port},127.0.0.1:{port + 1}"},
            **{"PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port + rank}", "FLAGS_selected_gpus": me},
        },
        "kubeflow operator": {
            **{"RANK": me, "WORLD_SIZE": "2", **place, "PET_NODE_RANK": me, "PET_NNODES": "2"},
            **{"PET_NPROC_PER_NODE": "1", **{f"PET_{name}": x for name, x in place.items()}},
        },
    }


TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WITHOUT = {k: v for k, v in CLEAN.items() if k not in TORCHRUNS}
LOCAL_RANKS = "import pycomm as p; p.init(timeout_s=60); print(p.all_gather_object(p.local_rank()))"


def test_failure_of_a_rank_is_reported_on_other_ranks() -> None:
    """Started without a launcher, which would end them before they can report it."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "PYCOMM_SECRET": SECRET}
    rank = [sys.executable, "-m", "pycomm.launch.rank", f"--parent={os.getpid()}", "--kind=script"]
    command = [*rank, "--", PROGRAM, "fail", "raise"]
    other_stderr, own_stderr = (
        done.stderr
        for done in finished_together(
            (command, {**WITHOUT, **place, "RANK": number, "LOCAL_RANK": number}) for number in "01"
        )
    )
    assert "LookupError: rank one has lost its way" in own_stderr
    assert "rank 1 failed with LookupError: rank one has lost its way" in other_stderr


@pytest.mark.parametrize("whose", ["slurm", "openmpi", "paddle", "kubeflow operator"])
def test_variables_of_other_launchers_suffice(whose: str) -> None:
    port = free_port()
    command, secret = [sys.executable, "-c", LOCAL_RANKS], {"PYCOMM_SECRET": SECRET}
    ranks = finished_together(
        (command, {**WITHOUT, **other_launchers(rank, port)[whose], **secret}) for rank in range(2)
    )
    assert [rank.stdout for rank in ranks] == ["[0, 1]\n"] * 2


BY_TORCH = """
import torch.distributed as dist
dist.init_process_group("pycomm")
import pycomm
print(pycomm.all_gather_object(dist.get_rank()))
dist.destroy_process_group()
"""
# The init_process_group of docs/launching.md, whose variables are torchrun's.
AS_TORCHRUN = ["sh", "-c", 'RANK=$PMI_RANK WORLD_SIZE=$PMI_SIZE exec "$0" "$@"']


@pytest.mark.parametrize(
    ("arguments", "code"), [([], LOCAL_RANKS), (AS_TORCHRUN, BY_TORCH)], ids=["init", "torch"]
)
def test_mpiexec_starts_the_ranks(arguments: list[str], code: str) -> None:
    """MPICH's mpiexec. Without a secret: the ranks use torch's store."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    done = finished(
        [mpiexec, "-n", "2", *arguments, sys.executable, "-c", code],
        env={**WITHOUT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        timeout=LIMIT_S,
    )
    # mpiexec may put the line of one rank between the text and the line end of the other.
    assert (done.returncode, done.stdout.count("[0, 1]")) == (0, 2), done.stdout + done.stderr
