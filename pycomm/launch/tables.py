"""The ranks' log files, and the tables that the launcher prints at the start."""

from __future__ import annotations

import os
from pathlib import Path

from rich.box import ASCII2
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from pycomm._tables import Table, console
from pycomm.config import ELASTIC_FILE, ELASTIC_JOINS
from pycomm.launch import worker_setup
from pycomm.launch.folder import link_logs
from pycomm.launch.hosts import Place
from pycomm.launch.losses import Replacement

SHOWN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ALSO_SHOWN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


class Logs(LogsSpecs):
    """A log file per rank, rank<k>.log, or per spare process, spare<k>.log; the terminal shows the
    first rank of this host, or all.

    torch's elastic launcher calls reify() once it knows the ranks of this host.

    Args:
        folder: for the files.
        all_ranks: show all ranks.
        rows: name and value of the configuration.
        errors: a folder for the failure reports of ranks.

    Attributes:
        variables: further environment variables of the ranks, which are not shown, such as the key.
        places: all hosts.
        replacement: how ranks are replaced; None: they are not.
        serves_rendezvous: this host serves torch's store.
        quiet: print no tables.
    """

    replacement: Replacement | None = None
    serves_rendezvous = True
    quiet = False

    def __init__(
        self, folder: str, all_ranks: bool, rows: list[tuple[str, str]], errors: str
    ) -> None:
        super().__init__(folder)
        self.variables: dict[str, str] = {}
        self.places: list[Place] = []
        self._folder, self._all_ranks, self._rows, self._errors = folder, all_ranks, rows, errors

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return self._folder

    @property
    def spares(self) -> int:
        """The number of spare processes of this host."""
        return self.replacement.spares if self.replacement else 0

    @property
    def group_file(self) -> str:
        """The file of the elastic group."""
        return str(Path(self._errors) / "elastic_group")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files by local rank; also prints the tables, as the ranks are about to start."""
        folder = Path(self._folder)
        attempt = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        ending = ".log" if attempt == "0" else f".{attempt}.log"  # after a restart
        size, ranks = int(envs[0]["WORLD_SIZE"]), len(envs) - self.spares
        logs = {}
        for local, env in envs.items():
            rank = int(env["RANK"])
            name = f"rank{rank}" if local < ranks else f"spare{rank - size}"
            logs[local] = str(folder / f"{name}{ending}")
        errors = {local: str(Path(self._errors) / f"{local}.{attempt}.json") for local in envs}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
            env["LOCAL_WORLD_SIZE"] = str(int(env["LOCAL_WORLD_SIZE"]) - self.spares)
            env.update(self.variables)
            if self.replacement is not None:
                env[ELASTIC_FILE] = self.group_file
            if local >= ranks:
                env[ELASTIC_JOINS] = "1"
        link_logs(list(logs.values()))
        if not self.quiet:
            self._print(envs[0])
        return LogsDest(
            stdouts=logs,
            stderrs=dict.fromkeys(envs, ""),  # the rank joins it to its output
            tee_stdouts=logs if self._all_ranks else {0: logs[0]},
            error_files=errors,
        )

    def _print(self, env: dict[str, str]) -> None:
        numbers = [int(env[name]) for name in SHOWN[2:]]
        first = {**os.environ, **env, **worker_setup.variables(*numbers)}
        names = [*SHOWN, *worker_setup.variables(*numbers), *(n for n in ALSO_SHOWN if n in first)]
        print("pycomm launch: configuration")
        console().print(table([*self._rows, *_hosts(self.places)]))
        print(
            f"pycomm launch: starting {numbers[3]} of {numbers[1]} processes on this host"
            + (f", spares: {self.spares}; " if self.spares else "; "),
            end="",
        )
        print("environment of the first")
        console().print(table([(name, first[name]) for name in names]))


def _hosts(places: list[Place]) -> list[tuple[str, str]]:
    """The ranks of each host, and where it is."""
    rows, rank = [], 0
    for place in places:
        last = rank + place.ranks - 1
        name = f"ranks {rank} to {last}" if last > rank else f"rank {rank}"
        rows.append((name if place.ranks else "spares", place.where))
        rank += place.ranks
    return rows


def table(rows: list[tuple[str, str]]) -> Table:
    """Names and values in a box."""
    shown = Table({"name": "", "value": ""}, box=ASCII2, headings=False)
    for row in rows:
        shown.add(*row)
    return shown
