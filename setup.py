"""Builds pycomm's compiled modules: writes a build.ninja and runs ninja.

pyproject.toml contains the metadata. pip uses this file (`pip install .`,
`pip install -e . --no-build-isolation`), as does `python setup.py build_ext --inplace`.

    _core   the engine and its Python bindings; needs no torch
    _c10d   the torch.distributed backend; only if torch is importable
    _cuda   the CUDA kernels, and NCCL through dlopen; only if nvcc is found

_cuda is built for the GPUs of this machine and later ones; without any as PTX, which the driver
compiles at the first load on any GPU from 7.5 on. CUDAARCHS, as for CMake, selects others: a wheel
for other machines is built with "80-real;90-real;100-real;120". nvcc has to be 12.5 or newer. The
CUDA runtime is linked statically, so _cuda loads on any machine.

If torch is importable every module uses torch's own pybind11 headers: modules that were built with
different ones cannot exchange classes.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
FLAGS = [
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
    "-Wno-restrict",  # false positives of g++ 12 in std::string
    # As with NDEBUG: the check takes 3 % of the time of a 4-byte call.
    "-DPYBIND11_NO_ASSERT_GIL_HELD_INCREF_DECREF",
]

NINJA_RULES = """\
ninja_required_version = 1.5
rule compile
  command = $cxx -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = c++ $in
rule cuda
  command = $nvcc -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = nvcc $in
rule link
  command = $cxx -shared -pthread $in $libs -o $out
  description = link $out
"""


@dataclass(frozen=True)
class Module:
    """A compiled module: its sources, and its flags beyond FLAGS."""

    name: str
    sources: list[Path]
    flags: list[str] = field(default_factory=list)
    libs: list[str] = field(default_factory=list)
    cuda_flags: list[str] = field(default_factory=list)  # for nvcc


def torch_root() -> Path | None:
    """Folder of the torch package, found without importing it, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def python_flags(torch: Path | None) -> list[str]:
    """Include paths of Python and pybind11. Exits with a message if headers are missing."""
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        major, minor = sys.version_info[:2]
        sys.exit(
            f"pycomm: {include}/Python.h not found: the build needs Python's headers. "
            f"On Debian: apt-get install python{major}.{minor}-dev"
        )
    if torch is not None:
        pybind = str(torch / "include")
    else:
        import pybind11

        pybind = pybind11.get_include()
    return ["-isystem", str(include), "-isystem", pybind]


def c10d_sources() -> list[Path]:
    """The files that include torch."""
    return sorted((CSRC / "bindings").glob("c10d*.cpp"))


def cuda_sources() -> list[Path]:
    """The bindings of _cuda, which g++ compiles."""
    return sorted((CSRC / "bindings").glob("cuda*.cpp"))


def nvcc() -> str | None:
    """The CUDA compiler, on PATH or at its default location."""
    usual = "/usr/local/cuda/bin/nvcc"
    return shutil.which("nvcc") or (usual if os.access(usual, os.X_OK) else None)


def gpus_here() -> list[str]:
    """The architectures of this machine's GPUs, for CUDAARCHS."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\d+)\.(\d)$", done.stdout, re.MULTILINE)
    return sorted({major + minor for major, minor in found})


def gpu_flags() -> list[str]:
    """nvcc's options for the GPU architectures: see the module docstring."""
    requested = os.environ.get("CUDAARCHS", "").replace(",", ";").split(";")
    names = [name.strip() for name in requested if name.strip()]
    if names in (["all"], ["all-major"]):
        return [f"-arch={names[0]}"]
    if names == ["native"] or (not names and os.path.exists("/proc/driver/nvidia/version")):
        # Not -arch=native, which makes no PTX: the module would run on no later GPU.
        names = gpus_here()
    flags = []
    for name in names or ["75-virtual"]:
        parts = re.fullmatch(r"(\d+[af]?)(-real|-virtual)?", name)
        if parts is None:
            sys.exit(
                f"pycomm: CUDAARCHS: {name!r} is no architecture. Use all, all-major, native, or a "
                "list such as 80-real;90-real;120 (80: compute capability 8.0)"
            )
        number, kind = parts.groups()
        code = {"-real": f"sm_{number}", "-virtual": f"compute_{number}"}
        both = f"[sm_{number},compute_{number}]"
        flags.append(f"-gencode=arch=compute_{number},code={code.get(kind, both)}")
    return flags


def cuda_module(python: list[str]) -> Module:
    """The CUDA kernels, with the CUDA runtime."""
    compiler = [f"-Xcompiler={flag}" for flag in ("-fPIC", "-fvisibility=hidden", "-Wall")]
    flags = ["-std=c++20", "-O3", f"-I{CSRC}", *compiler, *gpu_flags()]
    lib = Path(os.path.realpath(str(nvcc()))).parent.parent
    folders = [f"-L{lib / name}" for name in ("lib64", "lib")]
    nccl = CSRC / "nccl" / "library.cpp"  # _core contains it as well
    sources = [*cuda_sources(), nccl, *sorted(CSRC.glob("cuda/*.cu"))]
    libs = [*folders, "-L/usr/local/cuda/lib64", "-L/usr/local/cuda/lib"]
    return Module("_cuda", sources, python, [*libs, "-lcudart_static", "-ldl", "-lrt"], flags)


def modules() -> list[Module]:
    """The modules that can be built here."""
    torch = torch_root()
    python = [f"-I{CSRC}", *python_flags(torch)]
    c10d = c10d_sources()
    excluded = {*c10d, *cuda_sources()}
    every = [p for p in sorted(CSRC.rglob("*.cpp")) if CSRC / "cuda" not in p.parents]
    found = [Module("_core", [p for p in every if p not in excluded], python)]
    if nvcc() is not None:
        found.append(cuda_module(python))
    if torch is not None and c10d:
        version = importlib.metadata.version("torch").split("+")[0]
        # No rpath: _c10d is imported after torch, which loads these libraries.
        found.append(
            Module(
                "_c10d",
                c10d,
                [
                    *python,
                    *("-isystem", str(torch / "include/torch/csrc/api/include")),
                    f'-DPYCOMM_TORCH_VERSION="{version}"',
                ],
                [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"],
            )
        )
    return found


def compiler() -> str:
    """The C++ compiler ($CXX, else g++). Exits with a message if there is none."""
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(cxx)[0]) is None:
        sys.exit(f"pycomm: no C++ compiler ({cxx} not found). On Debian: apt-get install g++")
    return cxx


def ninja_binary() -> str:
    """The ninja of the PyPI package, else the one on PATH."""
    try:
        for file in importlib.metadata.distribution("ninja").files or []:
            if file.name == "ninja" and file.parent.name == "bin":
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:  # use the one on PATH
        pass
    path = shutil.which("ninja")
    if path is None:
        sys.exit("pycomm: ninja not found: pip install ninja (on Debian: ninja-build)")
    return path


def escape(text: str | Path) -> str:
    """A path escaped for build.ninja."""
    return str(text).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


def shell(words: list[str]) -> str:
    """Words of a command as the value of a ninja variable."""
    return shlex.join(words).replace("$", "$$")


def write_ninja(folder: Path, built: list[Module]) -> None:
    """Writes build.ninja into `folder`: objects in <folder>/<module>/, modules in <folder>."""
    lines = [NINJA_RULES, f"cxx = {compiler()}", f"nvcc = {nvcc()}", "builddir = ."]
    for module in built:
        lines.append(f"{module.name}_compile = {shell(FLAGS + module.flags)}")
        lines.append(f"{module.name}_cuda = {shell(module.cuda_flags)}")
        objects = []
        for source in module.sources:
            target = escape(Path(module.name) / source.relative_to(CSRC).with_suffix(".o"))
            rule = "cuda" if source.suffix == ".cu" else "compile"
            lines += [
                f"build {target}: {rule} {escape(source)}",
                f"  flags = ${module.name}_{rule}",
            ]
            objects.append(target)
        lines += [
            f"build {module.name}.so: link {' '.join(objects)}",
            f"  libs = {shell(module.libs)}",
        ]
    text = "\n".join(lines) + "\n"
    path = folder / "build.ninja"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


class NinjaBuild(build_ext):
    """build_ext that runs ninja: parallel and incremental."""

    def build_extensions(self) -> None:
        """Builds every module and copies it to setuptools' destination."""
        folder = ROOT / "build" / str(sysconfig.get_config_var("SOABI"))
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open(
            "w"
        )  # one build at a time; released at the end of this function
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = modules()
        write_ninja(folder, built)
        jobs = ["-j", str(self.parallel)] if self.parallel else []
        if subprocess.run([ninja_binary(), "-C", str(folder), *jobs], check=False).returncode:
            sys.exit("pycomm: the build failed; see the first error above")
        for module in built:
            target = Path(self.get_ext_fullpath(f"pycomm.{module.name}"))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # running processes keep their mapping of the old one
            shutil.copy2(folder / f"{module.name}.so", target)


def extensions() -> list[Extension]:
    """The module names for setuptools. Must not compile: `sdist` calls it, too."""
    names = ["_core"]
    if torch_root() is not None and c10d_sources():
        names.append("_c10d")
    if nvcc() is not None:
        names.append("_cuda")
    return [Extension(f"pycomm.{name}", []) for name in names]


setup(ext_modules=extensions(), cmdclass={"build_ext": NinjaBuild})
