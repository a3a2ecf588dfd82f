"""Files of ninja, and compilers: for setup.py and for the builders of the tests' programs."""

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# By rule. A compiler that writes $out.d lists there the headers that it read.
COMMANDS = {
    "compile": "$cxx -MMD -MF $out.d $flags $header -c $in -o $out",
    "precompile": "$cxx -MMD -MF $out.d $flags -x c++-header $in -o $out",
    # clang's names files of this clone: ccache does not store it, and compares the sum.
    "precompile_here": "CCACHE_DISABLE=1 $cxx -MMD -MF $out.d $flags -x c++-header $in -o $out"
    " && CCACHE_DISABLE=1 $cxx $flags -E -P -x c++-header $in | md5sum > $out.sum",
    "nvcc": "$nvcc -MD -MF $out.d $flags $in -o $out",
    "link": "$cxx $flags $in $libs -o $out",
}
# For ccache, where the compilers are its links: it serves precompiled headers, and any clone.
CACHE = {
    "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
    "CCACHE_BASEDIR": str(Path(__file__).resolve().parents[2]),
    "CCACHE_NOHASHDIR": "1",
    "CCACHE_PCH_EXTSUM": "1",
}


class BuildFailed(Exception):
    """Something was not built; the text is the compiler's."""


def ninja_binary() -> str:
    """The ninja of the PyPI package, else the one on PATH. Raises BuildFailed if there is none."""
    try:
        for file in importlib.metadata.distribution("ninja").files or []:
            if file.name == "ninja" and file.parent.name == "bin":
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:  # use the one on PATH
        pass
    path = shutil.which("ninja")
    if path is None:
        raise BuildFailed("ninja not found: pip install ninja (on Debian: ninja-build)")
    return path


def nvcc() -> str | None:
    """The CUDA compiler, on PATH or at its default location."""
    usual = "/usr/local/cuda/bin/nvcc"
    return shutil.which("nvcc") or (usual if os.access(usual, os.X_OK) else None)


def torch_root() -> Path | None:
    """Folder of the torch package, found without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder. One process at a time builds in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str) -> None:
    """Writes the file; keeps it, and its time, if it has this text already."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class NinjaFile:
    """The text of a build.ninja with the rules of COMMANDS and `commands`."""

    def __init__(self, variables: Mapping[str, str], commands: Mapping[str, str] | None = None):
        self._lines = ["ninja_required_version = 1.5"]
        self._lines += [f"{name} = {value}" for name, value in variables.items()]
        for rule, command in {**COMMANDS, **(commands or {})}.items():
            self._lines += [f"rule {rule}", f"  command = {command}"]
            self._lines.append(f"  description = {rule} $out")
            if "$out.d" in command:
                self._lines += ["  depfile = $out.d", "  deps = gcc"]

    def build(
        self,
        target: str | Path,
        rule: str,
        inputs: Iterable[str | Path] = (),
        *,
        after: Iterable[str | Path] = (),
        **variables: str,
    ) -> str:
        """Adds a target and returns it. It is built again if an input or a file of `after` changes,
        with these values of variables instead of the file's."""
        words = ["build", f"{_escape(target)}:", rule, *map(_escape, inputs)]
        self._lines.append(" ".join([*words, "|", *map(_escape, after)]))
        self._lines += [f"  {name} = {value}" for name, value in variables.items()]
        return str(target)

    def text(self) -> str:
        """The contents of the file."""
        return "\n".join(self._lines) + "\n"

    def run(
        self,
        folder: Path,
        targets: Iterable[str] = (),
        *,
        name: str = "build.ninja",
        jobs: int | None = None,
        show: bool = False,
    ) -> None:
        """Builds these targets, or all, in a folder that the caller has locked.

        `show`: prints what ninja prints. Otherwise BuildFailed contains it.
        """
        write(folder / name, self.text())
        command = [ninja_binary(), "-C", str(folder), "-f", name, *targets]
        command += ["-j", str(jobs)] if jobs else []
        done = subprocess.run(
            command, capture_output=not show, text=True, check=False, env={**CACHE, **os.environ}
        )
        if done.returncode:
            shown = "the build failed; see the first error above"
            raise BuildFailed(shown if show else done.stdout + done.stderr)


def _escape(path: str | Path) -> str:
    return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")
