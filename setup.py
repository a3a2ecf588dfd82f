"""Builds pycomm's compiled modules: writes a build.ninja and runs ninja.

pyproject.toml contains the metadata. pip uses this file (`pip install .`,
`pip install -e . --no-build-isolation`), as does `python setup.py build_ext --inplace`.

    _core                      the engine and its Python bindings; needs no torch
    _c10d.torch_<major>_<minor>  the torch.distributed backend; only if torch is importable
    _cuda                      the CUDA kernels, and NCCL through dlopen; only if nvcc is found

_cuda is built for the GPUs of this machine and later ones; without any as PTX, which the driver
compiles at the first load on any GPU from 7.5 on. CUDAARCHS, as for CMake, selects others: a wheel
for other machines is built with "80-real;90-real;100-real;120". nvcc has to be 12.5 or newer. The
CUDA runtime is linked statically, so _cuda loads on any machine.

PYCOMM_TORCH_HEADERS, the folder that tools/torch_headers.py writes, compiles the backend for each
version of torch in it instead of for the installed one. Torch is not linked: symbols are found in
its libraries when the module is loaded, and stand-ins without content name them to the linker.
"""

import importlib.metadata
import os
import platform
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

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools" / "compile"))
from ninja_files import BuildFailed, NinjaFile, locked, nvcc, torch_root

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
FLAGS = [
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread"),
    *("-Wall", "-Wextra", "-Werror"),
    # False positives of g++ 12 in std::string.
    *("-Wno-restrict", "-Wno-array-bounds", "-Wno-stringop-overflow", "-Wno-stringop-overread"),
    # As with NDEBUG: the check takes 3 % of the time of a 4-byte call.
    "-DPYBIND11_NO_ASSERT_GIL_HELD_INCREF_DECREF",
]

# Of the repository's files, such as "https://github.com/OWNER/pycomm/{}/main", where {} is "blob"
# for a page and "raw" for a picture. "": it has no public address, and links stay relative.
URL = ""
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")


@dataclass(frozen=True)
class Module:
    """A compiled module: its sources, and its flags beyond FLAGS."""

    name: str
    sources: list[Path]
    flags: list[str] = field(default_factory=list)
    libs: list[str] = field(default_factory=list)
    precompiled: bool = True  # whether its files include the header that precompiled() names
    cuda_flags: list[str] = field(default_factory=list)  # for nvcc


def torch_headers() -> dict[str, Path]:
    """The folders of headers to compile the backend with, by <major>_<minor>."""
    given = os.environ.get("PYCOMM_TORCH_HEADERS")
    if given:
        found = {folder.name: folder / "include" for folder in Path(given).resolve().iterdir()}
        if not found:
            sys.exit(f"pycomm: PYCOMM_TORCH_HEADERS={given}: no headers: tools/torch_headers.py")
    else:
        torch = torch_root()
        found = {importlib.metadata.version("torch"): torch / "include"} if torch else {}
    return {"_".join(re.findall(r"\d+", version)[:2]): found[version] for version in sorted(found)}


def python_include() -> Path:
    """The folder of Python's headers. Exits with a message if they are missing."""
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        major, minor = sys.version_info[:2]
        sys.exit(
            f"pycomm: {include}/Python.h not found: the build needs Python's headers. "
            f"On Debian: apt-get install python{major}.{minor}-dev"
        )
    return include


def c10d_sources() -> list[Path]:
    """The files that include torch."""
    return sorted((CSRC / "bindings").glob("c10d*.cpp"))


def cuda_sources() -> list[Path]:
    """The bindings of _cuda, which g++ compiles."""
    return sorted((CSRC / "bindings").glob("cuda*.cpp"))


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
    libs = [*libs, "-lcudart_static", "-ldl", "-lrt"]
    return Module("_cuda", sources, python, libs, cuda_flags=flags)


def c10d_module(version: str, torch: Path, python: list[str]) -> Module:
    """The backend for one version of torch, with torch's own pybind11."""
    includes = [torch, torch / "torch/csrc/api/include"]
    flags = [*python, *(word for folder in includes for word in ("-isystem", str(folder)))]
    name = f"torch_{version}"
    # No rpath: the module is imported after torch, which loads these libraries.
    libs = ["-Wl,--no-as-needed", "-L.", *(f"-l{library}" for library in TORCH_LIBRARIES)]
    flags.append(f"-DBACKEND_MODULE={name}")
    return Module(f"_c10d.{name}", c10d_sources(), flags, libs, precompiled=False)


def modules() -> list[Module]:
    """The modules that can be built here."""
    import pybind11

    python = [f"-I{CSRC}", "-isystem", str(python_include())]
    bound = [*python, "-isystem", pybind11.get_include()]
    excluded = {*c10d_sources(), *cuda_sources()}
    every = [p for p in sorted(CSRC.rglob("*.cpp")) if CSRC / "cuda" not in p.parents]
    found = [Module("_core", [p for p in every if p not in excluded], bound)]
    if nvcc() is not None:
        found.append(cuda_module(bound))
    # First: their file compiles longest, and one processor alone would end the build with it.
    backends = [c10d_module(version, torch, python) for version, torch in torch_headers().items()]
    return [*backends, *found]


def compiler() -> str:
    """The C++ compiler ($CXX, else g++). Exits with a message if there is none."""
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(cxx)[0]) is None:
        sys.exit(f"pycomm: no C++ compiler ({cxx} not found). On Debian: apt-get install g++")
    return cxx


def shell(words: list[str]) -> str:
    """Words of a command as the value of a ninja variable."""
    return shlex.join(words).replace("$", "$$")


def precompiled(module: Module, source: Path) -> Path | None:
    """The header that is compiled once for files such as `source`."""
    if source.suffix == ".cu" or not module.precompiled:
        return None
    return CSRC / ("bindings" if CSRC / "bindings" in source.parents else "core") / "precompiled.h"


def ninja_file(built: list[Module]) -> NinjaFile:
    """Objects in <module>/, and the modules beside these folders."""
    variables = {"cxx": compiler(), "nvcc": str(nvcc()), "builddir": "."}
    variables |= {f"{module.name}_compile": shell(FLAGS + module.flags) for module in built}
    stand_in = "$cxx -shared -nostdlib -Wl,-soname,$out -x c /dev/null -o $out"
    ninja = NinjaFile(variables, {"stand_in": stand_in})
    stand_ins = [ninja.build(f"lib{library}.so", "stand_in") for library in TORCH_LIBRARIES]
    for module in built:
        objects, flags = [], f"${{{module.name}_compile}}"
        headers = {source: precompiled(module, source) for source in module.sources}
        for header in sorted({header for header in headers.values() if header is not None}):
            target = f"{module.name}/{header.relative_to(CSRC)}.gch"
            ninja.build(target, "precompile", [header], flags=flags)
        for source, header in headers.items():
            target = Path(module.name) / source.relative_to(CSRC).with_suffix(".o")
            if source.suffix == ".cu":
                ninja.build(target, "nvcc", [source], flags=f"{shell(module.cuda_flags)} -c")
            elif header is None:
                ninja.build(target, "compile", [source], flags=flags)
            else:  # found in the first folder as .gch, else in csrc
                name = header.relative_to(CSRC)
                more = {"flags": f"-I{module.name} {flags}", "header": f"-include {name}"}
                after = [f"{module.name}/{name}.gch"]
                ninja.build(target, "compile", [source], after=after, **more)
            objects.append(target)
        link = {"flags": "-shared -pthread", "libs": shell(module.libs)}
        ninja.build(f"{module.name}.so", "link", objects, after=stand_ins, **link)
    return ninja


def check_libc() -> None:
    """Exits with a message if this Python does not use glibc."""
    if platform.libc_ver()[0] != "glibc":
        sys.exit(
            "pycomm: this Python does not use glibc; musl (Alpine Linux) is not supported, by "
            "torch either. Use a Python of a glibc system, such as the image python:3.12-slim"
        )


class NinjaBuild(build_ext):
    """build_ext that runs ninja: parallel and incremental."""

    def build_extensions(self) -> None:
        """Builds every module and copies it to setuptools' destination."""
        check_libc()
        usual = Path(sys.prefix) == ROOT / ".venv"
        # Other flags, such as the folder of another pybind11.
        kind = ".wheel" if "PYCOMM_TORCH_HEADERS" in os.environ else "" if usual else ".other"
        folder = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}{kind}"
        with locked(folder):
            built = modules()
            try:
                ninja_file(built).run(folder, jobs=self.parallel, show=True)
            except BuildFailed as error:  # without a traceback
                sys.exit(f"pycomm: {error}")
            for module in built:
                target = Path(self.get_ext_fullpath(f"pycomm.{module.name}"))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)  # processes that run keep their mapping of the old
                shutil.copy2(folder / f"{module.name}.so", target)


def extensions() -> list[Extension]:
    """The module names for setuptools. Must not compile: `sdist` calls it, too."""
    names = ["_core", *(f"_c10d.torch_{version}" for version in torch_headers())]
    if nvcc() is not None:
        names.append("_cuda")
    return [Extension(f"pycomm.{name}", []) for name in names]


def readme(url: str = URL) -> str:
    """README.md for the page of a package index, where relative links have no target."""
    text = (ROOT / "README.md").read_text()
    if not url:
        return text
    link = re.compile(r"(?P<picture>!?)(?P<text>\[[^]]*\])\((?!https?:|#)")
    kinds = {"!": "raw", "": "blob"}
    return link.sub(
        lambda at: f"{at['picture']}{at['text']}({url.format(kinds[at['picture']])}/", text
    )


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": NinjaBuild},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
