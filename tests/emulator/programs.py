"""Builds the programs that run CUDA kernels without a GPU, and nvcc's output for them.

    python tests/emulator/programs.py [target ...]

Targets, in build/emulator/:
    gpu_check                      compares and times the kernels on a GPU: no Python, no torch
    micro.<kind>, gpu_check.<kind> programs over the emulator; kind: plain, coverage, tsan, asan
    streams.<kind>                 the stream engine over the emulator and the fake NCCL
    _emulated.so                   the same for Python, through _cuda's bindings: kernels, devices
                                   with their streams, and the fake NCCL
    _emulated_torch.so             torch tensors on the devices of _emulated.so
    mutants/<name>/gpu_check       gpu_check.<kind> with one change in the text of a kernel
    ptx/<unit>.ptx                 nvcc's output for a build without CUDAARCHS
    cubin/<unit>.<arch>.cubin      machine code as in a wheel, or as the driver makes of the PTX,
                                   with <unit>.<arch>.log: registers, spills

The emulator itself is never instrumented; kernels are. Clang compiles what has AddressSanitizer,
and the mutants without ThreadSanitizer, in less time than g++. The objects of the module _core, as
`make build` left them, supply what is not under test, and those of the native suites the engine
under a sanitizer. Ninja builds only what has changed, and a mutant compiles one file. CUDA's
headers come with nvcc; nothing of this can be built without it.
"""

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pybind11

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "compile"))
from mutation_table import Mutation
from ninja_files import BuildFailed, NinjaFile, locked, nvcc, torch_root, write

import build as native
from build import CLANG_FLAGS, clang, is_built

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
OUT = ROOT / "build" / "emulator"

WHEEL = ("80", "90", "100", "120")  # machine code in a wheel
FROM_PTX = ("75", "86", "89")
ARCHITECTURES = (*FROM_PTX, *WHEEL)
KINDS = {
    "plain": ["-O1", "-g1"],
    "coverage": ["-O0", "-g1", "--coverage"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread"],
    "asan": [
        *("-g1", "-fsanitize=address,undefined,bounds", "-fstrict-flex-arrays=3"),
        # As g++ by default: each of the many fibers would have a second stack.
        *("-fno-sanitize-recover=all", "-fsanitize-address-use-after-return=never"),
        *("-D__SANITIZE_ADDRESS__=1", *CLANG_FLAGS),
    ],
}
# With clang's run time ThreadSanitizer has 255 names for the fibers of a grid, and sees no race of
# two with one name: g++ compiles for it.
COMPILERS = {"plain": "g++", "coverage": "g++", "tsan": "g++", "asan": "clang"}
# Clang's objects, those of the native suites, name these functions otherwise than g++'s run time.
CLANG_NAMES = [f"-Wl,--defsym=__tsan_{name}={name}" for name in ("memcpy", "memmove", "memset")]
LINKED = {**KINDS, "tsan": [*KINDS["tsan"], *CLANG_NAMES]}
# How a file is compiled: by which compiler, with which options. Each has a precompiled header.
SETTINGS = {
    **{kind: (COMPILERS[kind], KINDS[kind]) for kind in KINDS},
    # For mutants: most run one short case.
    "unoptimized": ("clang", ["-g0", *CLANG_FLAGS]),
    "tsan_unoptimized": ("g++", [*KINDS["tsan"], "-O0", "-g0", "-w"]),
}
OF_MUTANTS = {"plain": "unoptimized", "tsan": "tsan_unoptimized", "asan": "asan"}
FLAGS = [
    *("-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-omit-frame-pointer", "-Wall", "-Wextra"),
    *("-Werror", "-Wno-restrict", "-Wno-unknown-pragmas"),  # nvcc knows `unroll`
]
EMULATOR = ("fiber", "grid", "lanes", "runtime", "host_calls")
FAKE_NCCL = ("fake_nccl", "fake_wires")  # of the emulator, for programs with several ranks
ENGINE = (  # of csrc: the stream engine and the arithmetic of the fake
    *("collectives/*.cpp", "device/*.cpp", "nccl/*.cpp", "kernels/reducers.cpp"),
    *("kernels/cpu/reduce.cpp", "cpu/isa.cpp"),
)
# Of ENGINE, for _emulated.so: the arithmetic of the fake, and the texts of NCCL's errors.
ARITHMETIC = ("kernels/reducers.cpp", "kernels/cpu/reduce.cpp", "cpu/isa.cpp", "nccl/library.cpp")
MODULE = tuple(CSRC / "bindings" / name for name in ("cuda_device.cpp", "cuda_nccl.cpp"))
CASES = (
    *("gpu_check", "cases_step", "cases_packets", "cases_compact", "cases_dense"),
    *("cases_quantize", "cases_groups"),
)
STREAMS = (
    *("streams_test", "host_staging_channel_test", "host_callback_thread_test"),
    "channels_test",
)
HEADER = "precompiled.hpp"
# Of csrc, to compare with.
CPU_KERNELS = (
    *("codec/cpu/*.cpp", "kernels/*.cpp", "kernels/cpu/*.cpp", "cpu/*.cpp"),
    *("core/*.cpp", "os/thread.cpp", "os/processor.cpp"),
)

LOGGED = "> $log 2>&1 || { cat $log; false; }"
COMMANDS = {
    "module": "$cxx -shared -Wl,-Bsymbolic $flags $in -o $out",
    "assemble": f"$ptxas -v -arch=sm_$arch $in -o $out {LOGGED}",
    "cubin": f"$nvcc -MD -MF $out.d $flags -Xptxas=-v -cubin $in -o $out {LOGGED}",
}


@dataclass(frozen=True)
class Mutant:
    """One planted mistake, in a file of csrc/cuda."""

    mistake: Mutation
    unit: str  # the .cu that is compiled with it
    kind: str

    @property
    def name(self) -> str:
        """The name of the mistake."""
        return self.mistake.name


@cache
def cuda_include() -> Path:
    """The folder of cuda_runtime.h, from nvcc."""
    done = subprocess.run(
        [str(nvcc()), "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    for line in done.stderr.splitlines():
        name, _, value = line.removeprefix("#$ ").partition("=")
        if name == "INCLUDES":
            return Path(value.split('"')[1].removeprefix("-I")).resolve()
    raise BuildFailed(f"{nvcc()} does not say where its headers are:\n{done.stderr}")


@cache
def _setup(architectures: str) -> Any:
    """The module _cuda as setup.py builds it with this value of CUDAARCHS."""
    with mock.patch("setuptools.setup"), mock.patch.dict(os.environ, CUDAARCHS=architectures):
        return runpy.run_path(str(ROOT / "setup.py"))["cuda_module"]([])


def device_flags(architectures: str) -> str:
    """nvcc's options, as setup.py passes them with this value of CUDAARCHS."""
    return " ".join([*_setup(architectures).cuda_flags, "-Werror all-warnings"])


def python_flags(pybind: str = pybind11.get_include()) -> list[str]:
    """Headers for a module: by default with the pybind11 of _core, with which it shares classes."""
    return ["-fvisibility=hidden", f"-isystem {sysconfig.get_paths()['include']} -isystem {pybind}"]


def units() -> list[str]:
    """The .cu files of csrc/cuda, by name."""
    return sorted(p.stem for p in (CSRC / "cuda").glob("*.cu"))


def csrc_sources(patterns: Iterable[str]) -> list[Path]:
    """The files of csrc that match one of these patterns."""
    return sorted(path for pattern in patterns for path in CSRC.glob(pattern))


@cache
def _compiler(name: str) -> str:
    """If there is no clang, a command that says so: not every target needs one."""
    if name != "clang":
        return os.environ.get("CXX", name)
    try:
        return clang()
    except BuildFailed as error:  # shown by the command
        return f"echo {shlex.quote(str(error))}; false"


def _of_module(name: str, sources: Iterable[Path]) -> list[str]:
    """The objects of the module _core or _cuda."""
    built = ROOT / "build" / str(sysconfig.get_config_var("SOABI")) / name
    return [str(built / source.relative_to(CSRC).with_suffix(".o")) for source in sources]


def _of_suites(kind: str, sources: Iterable[Path]) -> list[str]:
    """The objects of the native suites under a sanitizer."""
    return [str(native.object_of(kind, source)) for source in sources]


def _add_device_code(ninja: NinjaFile) -> None:
    """What nvcc makes of each unit."""
    for unit in units():
        source, ptx = CSRC / "cuda" / f"{unit}.cu", f"ptx/{unit}.ptx"
        ninja.build(ptx, "nvcc", [source], flags=f"{device_flags('75-virtual')} -ptx")
        for arch in ARCHITECTURES:
            target, log = f"cubin/{unit}.{arch}.cubin", f"cubin/{unit}.{arch}.log"
            if arch in WHEEL:
                flags = device_flags(f"{arch}-real")
                ninja.build(target, "cubin", [source], flags=flags, log=log)
            else:
                ninja.build(target, "assemble", [ptx], arch=arch, log=log)


def _compile(ninja: NinjaFile, target: str, source: Path, flags: Iterable[str]) -> str:
    return ninja.build(target, "compile", [source], flags=" ".join(flags))


def _compile_with(
    ninja: NinjaFile, setting: str, target: str, source: Path, flags: Iterable[str]
) -> str:
    """As _compile, with the compiler, the options and the precompiled header of the setting."""
    compiler, special = SETTINGS[setting]
    return ninja.build(
        target, "compile", [source],
        after=[f"{setting}/{HEADER}.gch"],
        cxx=_compiler(compiler),
        flags=" ".join([*flags, *special]),
        header=f"-include {setting}/{HEADER} -Winvalid-pch -x c++",
    )  # fmt: skip


def _link(ninja: NinjaFile, target: str, kind: str, objects: Iterable[str]) -> None:
    compiler, flags = _compiler(COMPILERS[kind]), " ".join([*LINKED[kind], "-pthread"])
    ninja.build(target, "link", objects, cxx=compiler, flags=flags)


def _add_gpu_check(ninja: NinjaFile, flags: list[str], cpu_kernels: list[str]) -> None:
    """gpu_check for a GPU, with the objects of the module _cuda: CUDAARCHS=90-real make build."""
    architectures = os.environ.get("CUDAARCHS", "")
    timing = f"{device_flags(architectures)} -DON_GPU -I{HERE} -c"
    built = [
        *_of_module("_cuda", sorted((CSRC / "cuda").glob("*.cu"))),
        ninja.build("gpu/time_kernels.o", "nvcc", [HERE / "time_kernels.cu"], flags=timing),
    ]
    for name in CASES:
        options = [*flags, "-O2", "-DON_GPU"]
        built.append(_compile(ninja, f"gpu/{name}.o", HERE / f"{name}.cpp", options))
    libs = " ".join(_setup(architectures).libs)
    ninja.build("gpu_check", "link", [*built, *cpu_kernels], flags="-pthread", libs=libs)


def _add_modules(ninja: NinjaFile, flags: list[str], objects: list[str]) -> None:
    """_emulated.so with these objects beside its own, and _emulated_torch.so."""
    flags = [*flags, "-O0", "-g1"]
    built = []
    for source in (HERE / "module.cpp", *MODULE):
        target = f"module/{source.stem}.o"
        built.append(_compile(ninja, target, source, [*flags, *python_flags()]))
    built += _of_module("_core", csrc_sources(ARITHMETIC))
    ninja.build("_emulated.so", "module", [*built, *objects], flags="-pthread")
    if root := torch_root():
        flags += [
            *python_flags(f"{root}/include"),
            f"-isystem {root}/include/torch/csrc/api/include",
        ]
        made = _compile(ninja, "module/torch_device.o", HERE / "torch_device.cpp", flags)
        libs = f"-Wl,--no-as-needed -L{root}/lib -ltorch -ltorch_cpu -ltorch_python -lc10"
        ninja.build("_emulated_torch.so", "module", [made], flags=libs)


def ninja_file(mutants: Iterable[Mutant]) -> NinjaFile:
    """All targets."""
    ptxas = Path(str(nvcc())).resolve().with_name("ptxas")
    variables = {"cxx": _compiler("g++"), "nvcc": str(nvcc()), "ptxas": str(ptxas)}
    ninja = NinjaFile(variables, COMMANDS)
    folders = [f"-I{CSRC}", f"-I{ROOT / 'tests'}", f"-I{HERE}"]
    flags = [*FLAGS, f"-isystem {cuda_include()}", *folders]
    emulator, fake = (
        [
            _compile(ninja, f"emulator/{name}.o", HERE / f"{name}.cpp", ["-O2", "-g1", *flags])
            for name in names
        ]
        for names in (EMULATOR, FAKE_NCCL)
    )
    for setting, (compiler, special) in SETTINGS.items():
        target, options = f"{setting}/{HEADER}.gch", " ".join([*flags, *special])
        cxx = _compiler(compiler)
        ninja.build(target, "precompile", [HERE / HEADER], cxx=cxx, flags=options)
    cpu_kernels = _of_module("_core", csrc_sources(CPU_KERNELS))
    kernels: dict[str, list[str]] = {}
    objects: dict[str, list[str]] = {}
    for kind in KINDS:
        kernels[kind] = [
            _compile_with(ninja, kind, f"{kind}/{unit}.o", CSRC / "cuda" / f"{unit}.cu", flags)
            for unit in units()
        ]
        of = "plain" if kind == "coverage" else kind  # of its cases: the kernels alone are counted
        objects[kind] = [*kernels[kind], *(f"{of}/{name}.o" for name in CASES), *cpu_kernels]
        _link(ninja, f"gpu_check.{kind}", kind, [*objects[kind], *emulator])
        if kind == "coverage":
            continue
        for name, file in [("micro", "micro.cu"), *((name, f"{name}.cpp") for name in CASES)]:
            _compile_with(ninja, kind, f"{kind}/{name}.o", HERE / file, flags)
        sources = [*(HERE / f"{name}.cpp" for name in STREAMS), HERE.parent / "native/harness.cpp"]
        streams = [
            _compile_with(ninja, kind, f"{kind}/{source.stem}.o", source, flags)
            for source in sources
        ]
        # Of an inline function in several files the linker takes the first, so the files with a
        # sanitizer come first: it must see, for example, each change of a shared_ptr's count.
        engine = csrc_sources(ENGINE)
        streams += _of_module("_core", engine) if kind == "plain" else _of_suites(kind, engine)
        _link(ninja, f"streams.{kind}", kind, [*kernels[kind], *streams, *fake, *emulator])
        _link(ninja, f"micro.{kind}", kind, [f"{kind}/micro.o", *emulator])
    _add_gpu_check(ninja, flags, cpu_kernels)
    _add_modules(ninja, flags, [*kernels["plain"], *fake, *emulator])
    for m in mutants:
        folder, unit = f"mutants/{m.name}", f"{m.unit}.o"
        source, includes = OUT / folder / "cuda" / f"{m.unit}.cu", [f"-I{OUT / folder}", *flags]
        target = _compile_with(ninja, OF_MUTANTS[m.kind], f"{folder}/{unit}", source, includes)
        others = [o for o in objects[m.kind] if o != f"{m.kind}/{unit}"]
        _link(ninja, f"{folder}/gpu_check", m.kind, [target, *others, *emulator])
    _add_device_code(ninja)
    return ninja


# A mutant of these units has only the dtypes of its cases, which compile in a fraction of the time:
# the file that its folder has instead of csrc's, and the dtypes that this lacks.
DTYPES_FILE = Path("core", "visit_float.h")
LEFT_OUT = {
    "step": ("float16", "bfloat16", "float64"),
    "packets": ("float16", "float64"),
}


def _few_dtypes(left_out: Iterable[str]) -> str:
    text = (CSRC / DTYPES_FILE).read_text()
    for name in left_out:
        line = rf"^.* return f\(std::integral_constant<Dtype, Dtype::{name}>\(\)\);\n"
        text, found = re.subn(line, "", text, flags=re.MULTILINE)
        if not found:
            raise BuildFailed(f"{DTYPES_FILE} no longer visits {name}")
    return text


def _plant(mutant: Mutant) -> None:
    folder = OUT / "mutants" / mutant.name / "cuda"
    if mutant.unit in LEFT_OUT:
        write(folder.parent / DTYPES_FILE, _few_dtypes(LEFT_OUT[mutant.unit]))
    for source in (CSRC / "cuda").iterdir():
        text = source.read_text()
        if source.name == mutant.mistake.file:
            text = mutant.mistake.of(text)
        write(folder / source.name, text)


def build(targets: Iterable[str], mutants: Iterable[Mutant] = ()) -> list[Path]:
    """Builds these targets; their paths. `mutants` are all there are, whichever is built.

    Raises:
        BuildFailed: with the output of the compiler.
    """
    targets, mutants = list(targets), list(mutants)
    if not is_built(OUT, targets):
        for kind in ("asan", "tsan"):
            if f"streams.{kind}" in targets:
                native.build(kind, ["library.a"])
        with locked(OUT):
            for mutant in mutants:
                _plant(mutant)
            name = "mutants.ninja" if mutants else "build.ninja"
            ninja_file(mutants).run(OUT, targets, name=name, jobs=os.cpu_count())
    return [OUT / target for target in targets]


@cache
def emulated() -> Any:
    """The module _emulated, built: CUDA's kernels on host memory, for
    `devices.override_kernels`."""
    return _loaded("_emulated")


@cache
def emulated_torch() -> Any:
    """The module _emulated_torch, built: torch tensors on the devices of emulated()."""
    module = _loaded("_emulated_torch")
    module.set_query(emulated().runtime.query_address())
    for index in range(8):
        module.add(emulated().open_device(index))
    return module


def _loaded(name: str) -> Any:
    (path,) = build([f"{name}.so"])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    try:
        print(*build(sys.argv[1:] or ["micro.plain", "gpu_check.plain"]), sep="\n")
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(str(error))
