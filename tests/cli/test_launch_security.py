"""Security of the launchers: shared secrets, listening addresses, leftover processes."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finished import finished
from sample import of_the_day
from test_launch import CLEAN, LAUNCH, LIMIT_S, PROGRAM, launch

from benchmarks.support.unauthenticated import inodes, with_descendants
from pycomm import _secret as secret
from pycomm import config
from pycomm.errors import InvalidArgument

pytestmark = pytest.mark.no_attack  # counts listeners, and reads what is left of processes

KEY = "0123456789abcdef" * 4
LOOPBACKS = ("127.", "::1", "::ffff:127.")


def where_it_listens(pid: int) -> list[str]:
    """The addresses of the TCP listeners of a process and all its descendants."""
    theirs = {str(inode) for inode in inodes(with_descendants(pid))}
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in theirs:
                # Of 4 bytes, in the host's byte order.
                words = bytes.fromhex(local.partition(":")[0])
                swapped = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, swapped))
    return found


MEETS = """
import os, sys
if os.environ["RANK"] == "1":
    print("waits", flush=True)
    open(sys.argv[1]).read()
"""
BY_NUMPY = "import pycomm; print(pycomm.init(transport='tcp').size, 'torch' in sys.modules)"
BY_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("pycomm")
x = torch.ones(1)
dist.all_reduce(x)
import pycomm
print(int(x[0]), pycomm.init().size, "PYCOMM_SECRET" in os.environ)
"""
DECORATED = """
import os, sys, pycomm
@pycomm.launcher(nproc=2, device="cpu")
def main():
    return [name for name in ("torch", "torch.distributed") if name in sys.modules]
if __name__ == "__main__":
    print(main(), flush=True)
"""


def started(folder: Path, *arguments: str, **more: str) -> Any:
    return subprocess.Popen(
        [*arguments],
        cwd=folder,
        env={**CLEAN, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ending(process: Any) -> Iterator[Any]:
    """The process, which is terminated at the end, and after a while in any case."""
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def by_command(folder: Path, code: str) -> list[str]:
    (folder / "program.py").write_text(MEETS + code)
    return [*LAUNCH, "--nproc", "2", "-t", "3", "program.py", str(folder / "pipe")]


# The decorator's group is formed before the function: a rank waits as it imports the script.
WAITS_FIRST = """
import os, sys, pycomm
{meets}
@pycomm.launcher(nproc=2, device="cpu")
def main():
    {code}
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("code", [BY_NUMPY, BY_TORCH], ids=["numpy", "torch"])
@pytest.mark.parametrize("how", of_the_day(["command", "decorator"], 2))
def test_on_one_host_all_listen_on_the_loopback(how: str, code: str, tmp_path: Path) -> None:
    """Checked while rank 0 waits for rank 1: it serves its store and the mesh listens."""
    os.mkfifo(tmp_path / "pipe")
    if how == "command":
        arguments = by_command(tmp_path, code)
    else:
        meets = MEETS.replace('os.environ["RANK"]', 'os.environ.get("RANK")')
        text = WAITS_FIRST.format(
            meets=meets.replace("sys.argv[1]", repr(str(tmp_path / "pipe"))),
            code=code.strip().replace("\n", "\n    "),
        )
        (tmp_path / "program.py").write_text(text)
        arguments = [sys.executable, "program.py"]
    with ending(started(tmp_path, *arguments)) as process:
        line = next((line for line in process.stdout if "waits" in line), "")
        assert line, process.stderr.read()
        ours = 2 if how == "command" and code == BY_TORCH else 3  # the first is the launcher's
        found: list[str] = []
        while len(found) < ours and process.poll() is None:  # rank 0 starts as soon as it can
            found = where_it_listens(process.pid)
            select.select([], [], [], 0.02)
        (tmp_path / "pipe").write_text("now")
        out, err = process.communicate(timeout=LIMIT_S)
    assert found
    assert [address for address in found if not address.startswith(LOOPBACKS)] == []
    assert process.returncode == 0, out + err
    if code == BY_NUMPY and how == "command":
        assert "2 False" in out  # and without torch
    elif how == "command":
        assert "2 2 False" in out


def test_the_ranks_of_the_decorator_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DECORATED)
    with ending(started(tmp_path, sys.executable, "script.py")) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert out == "[[], []]\n", err


PRINT_KEY = "import os; print('key', os.environ.get('PYCOMM_SECRET'))"


def keys(done: Any) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in done.stdout.splitlines() if " key " in line]


def test_launcher_generates_a_secret_for_each_run(tmp_path: Path) -> None:
    (tmp_path / "print_key.py").write_text(PRINT_KEY)
    arguments = ["--nproc", "2", "-t", "3", "print_key.py"]
    first, second = keys(launch(tmp_path, *arguments)), keys(launch(tmp_path, *arguments))
    assert len(first) == 2
    assert len(set(first)) == 1
    assert len(first[0]) == 64
    assert first[0] != second[0]


def test_secret_is_read_from_the_environment_a_file_or_a_descriptor(tmp_path: Path) -> None:
    (tmp_path / "print_key.py").write_text(PRINT_KEY)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    arguments = ["--nproc", "1", "-t", "3", "print_key.py"]
    assert keys(launch(tmp_path, *arguments, env={"PYCOMM_SECRET": KEY})) == [KEY]
    other = {"PYCOMM_SECRET": KEY[::-1]}
    assert keys(launch(tmp_path, "--secret-file", str(file), *arguments, env=other)) == [KEY]
    with file.open() as descriptor:
        number = descriptor.fileno()
        done = finished(
            [*LAUNCH, "--secret-fd", str(number), *arguments],
            cwd=tmp_path,
            env=CLEAN,
            timeout=LIMIT_S,
            pass_fds=[number],
        )
    assert keys(done) == [KEY]


def test_secret_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(InvalidArgument, match=f"mode {mode:04o}: group or others"):
            secret.read_file(str(file))
    file.chmod(0o600)
    assert secret.read_file(str(file)) == KEY
    file.write_text("short")
    kinds = {file: "has 5 characters", tmp_path / "none": "cannot be read: No such file"}
    for path, text in {**kinds, tmp_path: "not a regular file"}.items():
        with pytest.raises(InvalidArgument, match=text):
            secret.read_file(str(path))
    with pytest.raises(InvalidArgument, match="descriptor 999 cannot be read: Bad file"):
        secret.read_descriptor(999)


def test_secret_is_stretched_and_a_weak_one_rejected() -> None:
    assert secret.key_of(KEY) == KEY
    stretched = "e4bb3cccdca52e8ce6509fc92d273884861f35d5b5496cfe02c9d3e08b02d7da"
    assert secret.key_of("correct horse battery") == stretched  # of another implementation
    for weak, text in (("a" * 16, "1 different characters"), ("abcde" * 9, "5 different")):
        with pytest.raises(InvalidArgument, match=text):
            config.environment({"PYCOMM_SECRET": weak})
    key = config.environment({"PYCOMM_SECRET": "correct horse battery"}).secret
    assert key == secret.key_of("correct horse battery")
    assert config.environment({}, secret="correct horse battery").secret == key


def test_rank_removes_its_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYCOMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config._taken, "key", "")
    monkeypatch.setenv("PYCOMM_SECRET", KEY)
    assert config.environment().secret == KEY  # a single process is no rank
    assert os.environ["PYCOMM_SECRET"] == KEY
    monkeypatch.setenv("PYCOMM_RANK", "0")
    monkeypatch.setenv("PYCOMM_SIZE", "2")
    assert config.environment().secret == KEY
    assert "PYCOMM_SECRET" not in os.environ
    seen = subprocess.check_output([sys.executable, "-c", PRINT_KEY], text=True)
    assert seen == "key None\n"
    assert config.environment().secret == KEY  # the second init
    assert ("PYCOMM_SECRET", "(set)") in [row[:2] for row in config.described()]


def check_ends(process: Any, ranks: int, how: int, limit_s: float) -> None:
    """Sends the launcher a signal when so many ranks have printed their process ids: all end."""
    pids: list[str] = []
    while len(pids) < ranks:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        pids += line.split()[1:] if line.startswith("pid") else []
    pidfds = [os.pidfd_open(int(pid)) for pid in pids]
    process.send_signal(how)
    process.wait(60)
    try:
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], limit_s)[0], "a rank outlives the launcher"
    finally:
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):  # it ended, as it should
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


ENDS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])


@ENDS
def test_no_rank_outlives_the_launcher(how: signal.Signals, tmp_path: Path) -> None:
    with ending(started(tmp_path, *LAUNCH, "--nproc", "2", PROGRAM, "wait")) as process:
        check_ends(process, 2, how, 60)
        assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)


# Lives until it is killed.
SLEEPS = """{python} -c 'import os, time
print("pid", os.getpid(), flush=True)
time.sleep(3600)'"""
# Without exec; one in the background, one in another session.
WRAPPER = f"#!/bin/sh\n{SLEEPS} &\nsetsid {SLEEPS}\necho never replaced by exec\n"
IN_FRONT = f"#!/bin/sh\n{SLEEPS}\necho never replaced by exec\n"


def wrapped(folder: Path, code: str) -> list[str]:
    script = folder / "wrapper.sh"
    script.write_text(code.format(python=sys.executable))
    script.chmod(0o755)
    return [*LAUNCH, "--nproc", "1", "--no-python", str(script)]


@ENDS
def test_processes_of_a_wrapper_end_with_the_launcher(how: int, tmp_path: Path) -> None:
    code = WRAPPER if how == signal.SIGKILL else IN_FRONT
    with ending(started(tmp_path, *wrapped(tmp_path, code))) as process:
        check_ends(process, code.count("getpid"), how, 30)


@pytest.mark.parametrize(
    ("code", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143), ("exit 0", 0)]
)
def test_exit_status_of_a_command_is_kept(code: str, status: int, tmp_path: Path) -> None:
    done = launch(tmp_path, *wrapped(tmp_path, "#!/bin/sh\n" + code)[len(LAUNCH) :])
    assert done.returncode == status, done.stderr


def test_signals_are_forwarded_to_the_command(tmp_path: Path) -> None:
    code = (
        "#!/bin/sh\ntrap 'echo caught; exit 5' USR1\necho pid $PPID\nwhile :; do sleep 0.1; done\n"
    )
    with ending(started(tmp_path, *wrapped(tmp_path, code))) as process:
        line = next(line for line in process.stdout if line.startswith("pid"))
        os.kill(int(line.split()[1]), signal.SIGUSR1)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert "caught" in out
    assert process.returncode == 5


def test_folders_of_killed_launchers_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    arguments = [*LAUNCH, "--nproc", "1", "--no-python", "sh", "-c", "echo pid $$; sleep 3600"]
    with ending(started(tmp_path, *arguments, TMPDIR=str(place))) as process:
        assert any(line.startswith("pid") for line in process.stdout)
        assert len(list(place.iterdir())) == 1
        done = launch(tmp_path, "--nproc", "1", "--no-python", "true", env={"TMPDIR": str(place)})
        assert done.returncode == 0, done.stderr
        assert len(list(place.iterdir())) == 1  # that of a running launcher is kept
    assert len(list(place.iterdir())) == 1  # killed
    launch(tmp_path, "--nproc", "1", "--no-python", "true", env={"TMPDIR": str(place)})
    assert list(place.iterdir()) == []


# Its ranks share a pipe and do not buffer: print() would write each of its words by itself.
UNDER_TORCHRUN = """
import os, pycomm, numpy as np
pycomm.init(heartbeat_s=0)
os.write(1, f"pid {os.getpid()}\\n".encode())
try:
    pycomm.recv(np.zeros(1), 1 - pycomm.rank())
except pycomm.errors.Error as error:
    open(f"said{pycomm.rank()}", "w").write(str(error))
"""


@pytest.mark.parametrize("wrapped", [False, True], ids=["script", "wrapper"])
def test_ranks_of_torchrun_end_with_an_error_when_it_is_killed(
    wrapped: bool, tmp_path: Path
) -> None:
    """Both wait for the other, without heartbeats that could detect a dead rank."""
    (tmp_path / "program.py").write_text(UNDER_TORCHRUN)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    in_a_shell = ["--no-python", "sh", "-c", f"{sys.executable} program.py; true"]
    arguments = [*run, *(in_a_shell if wrapped else ["program.py"])]
    with ending(started(tmp_path, *arguments)) as process:
        check_ends(process, 2, signal.SIGKILL, 10)
    for rank in range(2):
        assert "the launcher of this rank (torchrun" in (tmp_path / f"said{rank}").read_text()
