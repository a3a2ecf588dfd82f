"""`pycomm launch` runs a program as python does: `__main__`, its threads, sys.path, its output."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import warm
from finished import finished
from test_launch import CLEAN, LIMIT_S

LAUNCH = ["-m", "pycomm", "launch", "--nproc", "1"]

# Prints what a program sees of itself; `__main__` is used after the last line, by a thread and at
# exit, and under the other name that children of multiprocessing use.
SEES_ITSELF = """
import atexit, multiprocessing, os, pickle, sys, threading
if not __package__:
    from beside import value
else:
    from .beside import value

class State:
    pass

def work(_):
    return State()

def save(how, after=None):
    if after is not None:
        after.join()
    assert isinstance(pickle.loads(pickle.dumps(State())), State)
    assert sys.modules["__main__"].State is State
    print(how, flush=True)

if __name__ == "__main__":
    main = sys.modules["__main__"]
    print("file", os.path.realpath(__file__), "package", __package__, "argv", sys.argv)
    print("path", [os.path.realpath(entry) for entry in sys.path[:2]])
    print("spec", __spec__ and __spec__.name, type(__loader__).__name__, "value", value)
    print("names", sorted(vars(main).keys() - {"__annotations__"}))
    # Python itself cannot start a folder's or an archive's program again in a child.
    for how in () if __spec__ and __spec__.name == "__main__" else ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            assert type(pool.map(work, [1])[0]) is State, how
    threading.Thread(target=save, args=("thread", threading.main_thread())).start()
    atexit.register(save, "exit")
"""


def run(folder: Path, *line: str, **env: str) -> Any:
    if line[:2] == ("-m", "pycomm"):
        return warm.pycomm(list(line[2:]), folder, {**CLEAN, **env}, LIMIT_S)
    return finished([sys.executable, *line], cwd=folder, env={**CLEAN, **env}, timeout=LIMIT_S)


def shown(folder: Path, *line: str, **env: str) -> list[str]:
    """What the program prints, without the tables of the launcher."""
    done = run(folder, *line, **env)
    assert done.returncode == 0, done.stderr + done.stdout
    return [text for text in done.stdout.splitlines() if text[:1] not in "+|p" or "path" in text]


@pytest.mark.parametrize(
    ("kind", "safe"),
    [
        ("file", ""),
        ("link", "1"),
        ("module", ""),
        ("module", "1"),
        ("folder", ""),
        ("archive", "1"),
    ],
)
def test_a_program_is_main_as_under_python(tmp_path: Path, kind: str, safe: str) -> None:
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    for name in ("prog.py", "__main__.py", "pkg/prog.py"):
        (source / name).write_text(SEES_ITSELF)
    for name in ("beside.py", "pkg/beside.py", "pkg/__init__.py"):
        (source / name).write_text("value = 3\n")
    (tmp_path / "linked.py").symlink_to(source / "prog.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(source / name, name)
    words = {
        "file": ["source/prog.py"],
        "link": ["linked.py"],
        "module": ["-m", "pkg.prog"],
        "folder": ["source"],
        "archive": ["app.zip"],
    }[kind]
    folder = source if kind == "module" else tmp_path
    env = {"PYTHONSAFEPATH": safe, "PYTHONPATH": f"{source}{os.pathsep}{CLEAN['PYTHONPATH']}"}
    expected = shown(folder, "-u", *words, "argument", **env)
    assert expected[-2:] == ["thread", "exit"]
    assert shown(folder, *LAUNCH, *words, "argument", **env) == expected


def test_closed_output(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text("print('ran', flush=True)\n")
    for closed in (">&-", ">&- 2>&-"):
        line = ["bash", "-c", f'"$@" {closed}', "x", sys.executable, *LAUNCH, "prog.py"]
        done = subprocess.run(
            line, cwd=tmp_path, env=CLEAN, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert (tmp_path / "log" / "rank0.log").read_text() == "ran\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    program, temporary = tmp_path / "prog.py", tmp_path / "temporary"
    temporary.mkdir()
    program.write_text("print('ran', flush=True)\n")
    done = run(Path("/proc"), *LAUNCH, str(program), TMPDIR=str(temporary))
    assert done.returncode == 0
    assert "ran\n" in done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "--log-dir sets another folder" in done.stderr
    assert next(temporary.glob("pycomm_log_*/rank0.log")).read_text() == "ran\n"
    done = run(tmp_path, *LAUNCH, "--log-dir=/proc/x", str(program))
    assert done.returncode == 2
    assert done.stderr == "pycomm launch: --log-dir /proc/x: No such file or directory\n"


def test_each_run_has_a_folder_for_its_logs(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text("import sys; print(sys.argv[1], flush=True)\n")
    for word in ("first", "second"):
        assert run(tmp_path, *LAUNCH, "prog.py", word).returncode == 0
        assert (tmp_path / "log" / "rank0.log").read_text() == f"{word}\n"  # of the latest
    kept = sorted((tmp_path / "log").glob("*/rank0.log"))
    assert sorted(one.read_text() for one in kept) == ["first\n", "second\n"]


def test_a_program_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    for words, kind in (
        (["nosuch.py"], "file nosuch.py"),
        (["-m", "nosuch.module"], "module nosuch.module"),
        (["--no-python", "nosuch"], "command nosuch"),
    ):
        done = run(tmp_path, *LAUNCH, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"pycomm launch: there is no {kind}\n"
    assert not os.listdir(tmp_path)
