"""Slurm for real: slurmctld and a slurmd on each of two hosts of netns.py, with munge."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import ROOT

from pycomm.bench.support.netns import Network, missing

LIMIT_S = 120
SECRET = "0123456789abcdef" * 2
DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "salloc")
ABSENT = [
    name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
WHY_NOT = missing() or (f"needs make packages for {', '.join(ABSENT)}" if ABSENT else "")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

CONFIGURATION = """\
ClusterName=pycomm
SlurmctldHost=host0({first})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=host0 NodeAddr={first} CPUs=8
NodeName=host1 NodeAddr={second} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""
PROGRAM = """\
import os
import pycomm
pycomm.init(timeout_s=40)
found = pycomm.all_gather_object((os.environ["SLURMD_NODENAME"], pycomm.local_rank()))
if pycomm.rank() == 0:
    print(pycomm.host_count(), found)
"""


class Cluster:
    """Two nodes, host0 and host1; commands run on the first."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.started: list[subprocess.Popen[str]] = []
        addresses = {"first": net.hosts[0].ipv4(), "second": net.hosts[1].ipv4()}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, **addresses))
        key = os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(key, os.urandom(128))
        os.close(key)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._start(["munged", "-F", "--force", f"--socket={folder}/munge.socket", *files])
        self._await((folder / "munge.socket").exists)
        self._start(self._on(0, "slurmctld", "-D"))
        for number in range(2):
            self._start(self._on(number, "slurmd", "-D", "-N", f"host{number}"))
        self._await(lambda: "idle 2" in self.run("sinfo", "-h", "-o", "%T %D").stdout)

    def _on(self, number: int, *command: str) -> list[str]:
        """With the host's network, name and names of hosts, and this machine's cgroups."""
        name = self.net.hosts[number].name
        enter = f"mount --bind /etc/netns/{name}/hosts /etc/hosts && hostname host{number}"
        shell = ["sh", "-c", f'{enter} && exec "$0" "$@"']
        return ["nsenter", f"--net=/run/netns/{name}", "unshare", "-um", *shell, *command]

    def _environment(self, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM", "SLURM"))}
        paths = {"PATH": f"{inherited['PATH']}:/usr/sbin", "PYTHONPATH": str(ROOT)}
        return {**inherited, **paths, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def _start(self, command: list[str]) -> None:
        with (self.folder / "daemons.log").open("a") as log:
            self.started.append(
                subprocess.Popen(
                    command, env=self._environment(), stdout=log, stderr=log, text=True
                )
            )

    def _await(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            logs = (self.folder / "daemons.log").read_text()
            assert time.monotonic() < end, logs
            assert all(one.poll() is None for one in self.started), logs
            time.sleep(0.1)  # polls: the daemons do not notify

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command on the first node."""
        return subprocess.run(
            self._on(0, *command), env=self._environment(**more), capture_output=True, text=True,
            timeout=LIMIT_S, check=False, cwd=self.folder,
        )  # fmt: skip

    def end(self) -> None:
        for process in self.started[::-1]:
            process.terminate()
            process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "program.py").write_text(PROGRAM)
    with Network(2, ipv6=False) as net:
        made = Cluster(net, folder)
        try:
            yield made
        finally:
            made.end()


TWO_EACH = ("-N2", "-n4", "--ntasks-per-node=2")
RUN = (sys.executable, "program.py")
HERE, THERE = [("host0", 0), ("host0", 1)], [("host1", 0), ("host1", 1)]


@pytest.mark.parametrize("secret", ["", SECRET], ids=["no secret", "secret"])
def test_a_step_is_a_group(cluster: Cluster, secret: str) -> None:
    variables = {"PYCOMM_SECRET": secret} if secret else {}
    done = cluster.run("srun", *TWO_EACH, *RUN, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 {HERE + THERE}\n"


def test_steps_at_once_are_separate_groups(cluster: Cluster) -> None:
    line = " ".join(["srun", "--overlap", *TWO_EACH, *RUN])
    done = cluster.run("salloc", *TWO_EACH, "sh", "-c", f"{line} & {line} & wait")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 {HERE + THERE}\n" * 2


def test_rank_0_on_another_node_says_what_to_set(cluster: Cluster) -> None:
    (cluster.folder / "order").write_text("host1\nhost0\nhost1\n")
    words = ["srun", "-n3", "--distribution=arbitrary", "--kill-on-bad-exit=1", *RUN]
    order = {"SLURM_HOSTFILE": str(cluster.folder / "order"), "PYCOMM_SECRET": SECRET}
    done = cluster.run(*words, **order)
    assert done.returncode != 0
    assert "rank 0 runs on host1" in done.stderr
    assert "set MASTER_ADDR=host1 for all tasks" in done.stderr
    done = cluster.run(*words, **order, MASTER_ADDR="host1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"2 {[('host1', 0), ('host0', 0), ('host1', 1)]}\n"


def test_the_launcher_runs_in_a_step(cluster: Cluster) -> None:
    """The line of docs/launching.md."""
    launch = [sys.executable, "-m", "pycomm", "launch", "--nnodes", "2", "--nproc", "2"]
    launch += ["--rdzv-endpoint", "host0:29400", "--log-dir", str(cluster.folder / "log")]
    done = cluster.run("srun", "-N2", "-n2", *launch, "program.py", PYCOMM_SECRET=SECRET)
    assert done.returncode == 0, done.stderr
    assert f"2 {HERE + THERE}\n" in done.stdout


def test_a_program_outside_of_a_step_is_a_group_of_one(cluster: Cluster) -> None:
    one = [sys.executable, "-c", "import pycomm; print(pycomm.init().size)"]
    done = cluster.run("salloc", "-N2", "-n4", *one)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
