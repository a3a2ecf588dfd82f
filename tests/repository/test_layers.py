"""Checks the layers: the allowed includes of C++ and imports of Python, and the sizes of files.

The tables are at the top; a new folder of csrc or module of pycomm needs a row there.
"""

import ast
import graphlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT
from sample import of_the_day
from source_files import CPP, PYTHON, tree
from tiers import FILES, FOLDERS, NIGHTLY, SLOW

CSRC = ROOT / "csrc"
PYCOMM = ROOT / "pycomm"

# Which pycomm headers a file with this path prefix may include; the longest prefix applies. A name
# that ends in "/" is a folder.
MAY_INCLUDE = {
    "core/": ["core/"],
    "os/": ["core/", "os/"],
    "collectives/": ["core/", "collectives/"],
    # The loops' instruction sets and their arithmetic, for the codec and the kernels.
    "cpu/": ["core/", "cpu/"],
    "codec/": ["core/", "codec/", "cpu/"],
    "kernels/": [
        *("core/", "kernels/", "codec/compact.h", "codec/packet.h"),
        *("codec/cpu/indices.h", "codec/cpu/value_codes.h", "cpu/", "os/thread.h"),
    ],
    # The store authenticates clients with the transports' handshake.
    "rendezvous/": [
        "core/",
        "os/",
        "rendezvous/",
        "transport/admission.h",
        "transport/handshake.h",
    ],
    "transport/": ["core/", "cpu/copy.h", "os/", "transport/"],
    # Faults and rate limits of channels: only the bindings of _core set them, through a group's
    # options.
    "testing/": ["core/", "testing/", "os/fd.h", "transport/transport.h", "transport/frame.h"],
    "engine/": [
        *("core/", "engine/", "collectives/plan.h", "kernels/kernels.h"),
        *("os/process.h", "os/processor.h", "os/wake_event.h"),
        *("transport/transport.h", "transport/frame.h"),
    ],
    # Plans on a GPU's streams; the device and NCCL are arguments.
    "device/": ["core/", "device/", "collectives/plan.h", "nccl/", "os/thread.h"],
    "shared/": [
        *("core/", "shared/", "collectives/plan.h", "engine/engine.h", "kernels/kernels.h"),
        *("cpu/copy.h", "os/processor.h", "os/shared_heap.h"),
        "transport/frame.h",
    ],
    # A plan between hosts runs beside the sums inside a host.
    "shared/hierarchical_all_reduce": [
        *("core/", "shared/", "collectives/collectives.h", "engine/engine.h", "engine/task.h"),
    ],
    "observe/": ["core/", "observe/", "os/fd.h", "os/shared_memory.h", "os/thread.h"],
    # Connects the ranks of a group; the group's class is unknown here.
    "bootstrap/": [
        *("core/", "bootstrap/", "os/", "transport/", "collectives/choose.h"),
        *("engine/engine.h", "engine/peer_connector.h"),
    ],
    "group/": [
        *("core/", "group/", "bootstrap/mesh.h", "bootstrap/rank_info.h", "collectives/choose.h"),
        *(
            "collectives/plan.h",
            "engine/engine.h",
            "engine/schedule.h",
            "kernels/kernels.h",
            "observe/",
            "os/",
            "rendezvous/store.h",
        ),
        *("shared/", "transport/transport.h", "transport/frame.h"),
    ],
    # The interface of a group, which _c10d uses without linking an implementation.
    "group/group.h": ["core/"],
    "device_group/": [
        *("core/", "device_group/", "collectives/choose.h", "device/", "engine/engine.h"),
        *("group/check.h", "group/group.h", "nccl/nccl.h", "observe/heartbeat_thread.h"),
    ],
    "bindings/core": [
        *(
            "bindings/capsule.h",
            "bindings/contiguous_array.h",
            "bindings/core",
            "bindings/errors.h",
            "bindings/kernels.h",
            "bindings/names.h",
            "core/",
            "codec/compact.h",
            "codec/groups.h",
            "cpu/isa.h",
        ),
        *("device_group/device_group.h", "group/group.h", "group/connect.h"),
        *(
            "kernels/kernels.h",
            "kernels/group_batch.h",
            "kernels/groups.h",
            "kernels/quantize.h",
        ),
        *("os/fd.h", "os/shared_heap.h"),
        *("rendezvous/", "testing/"),
    ],
    "bindings/kernels.h": [
        *("bindings/names.h", "core/", "codec/compact.h", "codec/packet.h"),
        "kernels/device_kernels.h",
    ],
    "bindings/errors.h": ["core/"],
    "bindings/precompiled.h": ["core/precompiled.h"],
    "bindings/names.h": ["core/"],
    "bindings/capsule.h": [],
    "bindings/contiguous_array.h": ["core/"],
    "bindings/c10d": [
        *("bindings/c10d", "bindings/capsule.h", "bindings/contiguous_array.h"),
        *("bindings/errors.h", "device/device.h"),
        "group/group.h",
    ],
    "bindings/cuda": [
        *("bindings/capsule.h", "bindings/cuda", "bindings/kernels.h", "core/", "nccl/nccl.h"),
        *("cuda/cuda_device.h", "cuda/cuda_kernels.h"),
    ],
    "nccl/": ["core/", "nccl/"],
    "cuda/": [
        *("core/", "cuda/", "device/device.h", "gpu.hpp"),
        *("codec/format.h", "codec/packet.h", "kernels/device_kernels.h"),
    ],
    "gpu.hpp": [],
}
# Files that declare types of other folders without their headers.
FORWARD = {"group/group.h": ["pycomm::device", "pycomm::rendezvous"]}
STANDARD_LIBRARY_ONLY = ["core/", "collectives/"]
MAY_INCLUDE_TORCH = "bindings/c10d"

# Modules and packages of pycomm, lowest layer first: each may import itself and lower layers.
LAYERS = [
    ["_core", "_cuda"],
    ["errors", "reference", "_names"],
    ["_arguments", "_c10d", "_tables"],
    ["_secret", "_process_pool", "_command_line"],
    ["config"],
    ["_bootstrap"],
    ["group"],
    ["default_group"],
    ["_core_api"],
    ["kernels", "memory"],
    ["_quantize"],
    ["collectives"],
    ["objects", "_training"],
    ["elastic"],
    ["compress", "data", "metrics", "checkpoint", "printing"],
    ["parallel", "optim", "functional"],
    ["launch", "torch_backend", "testing"],
    ["observe", "tuning"],
    ["__init__"],
    ["bench"],
    ["demo"],
    ["__main__"],
]
MAY_IMPORT_TORCH = [
    "pycomm/_bootstrap/rendezvous.py",  # inside a function, to join torch's own store
    *("pycomm/torch_backend.py", "pycomm/_c10d/", "pycomm/launch/"),
    *("pycomm/bench/", "pycomm/demo/"),
    *("pycomm/_training/arguments.py", "pycomm/_training/coalesced.py"),
    *(
        "pycomm/_training/loss_scale.py",
        "pycomm/_training/parameters.py",
        "pycomm/_training/shards.py",
        "pycomm/checkpoint.py",
    ),
    *("pycomm/compress/", "pycomm/data/", "pycomm/elastic/", "pycomm/functional.py"),
    *("pycomm/metrics.py", "pycomm/optim/", "pycomm/parallel/", "pycomm/tuning/planner.py"),
]
# Modules that read the environment. Launchers pass it on to children.
MAY_SEE_ENVIRONMENT = [
    "pycomm/config.py",
    "pycomm/launch/",
    "pycomm/bench/collectives/mpi.py",
    "pycomm/bench/support/netns.py",
    "pycomm/bench/support/processes.py",
]

# Most lines of each folder: code, comments and blank lines of its files, and of the folders below
# that have no row. A change that adds lines deletes as many; one that deletes lowers the row.
BUDGETS = {
    "benchmarks": 7702,
    "csrc": 4394,
    "csrc/bindings": 5208,
    "csrc/codec": 1493,
    "csrc/collectives": 1934,
    "csrc/cuda": 5417,
    "csrc/device": 1557,
    "csrc/device_group": 2077,
    "csrc/engine": 4176,
    "csrc/group": 3541,
    "csrc/kernels": 3633,
    "csrc/os": 1746,
    "csrc/rendezvous": 1658,
    "csrc/shared": 1824,
    "csrc/transport": 2279,
    "examples": 979,
    "pycomm": 19374,
    "pycomm/bench": 3979,
    "pycomm/compress": 5920,
    "pycomm/kernels": 2458,
    "pycomm/launch": 2195,
    "tests": 7336,
    "tests/cli": 2516,
    "tests/devices": 3857,
    "tests/emulator": 8332,
    "tests/native": 16099,
    "tests/ranks": 8567,
    "tests/reliability": 5014,
    "tests/support": 6441,
    "tests/torch_backend": 4442,
    "tests/unit": 6328,
    "tools": 1989,
}
IN_ALL = 154_465
LONGEST_FILE = 500
MOST_VARIABLES = 11
# Set by setup.py for the compiler, and by pycomm's launchers for their ranks: not for users.
NOT_VARIABLES = {"PYCOMM_STORE_PORT", "PYCOMM_ELASTIC_FILE", "PYCOMM_ELASTIC_JOINS"}


def name_of(path: Path) -> str:
    """A file's path as the tables write it."""
    return str(path.relative_to(CSRC if CSRC in path.parents else ROOT))


def begins(name: str, beginnings: list[str]) -> bool:
    return any(name.startswith(b) for b in beginnings)


def lines_with(pattern: str, paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The matches of a pattern: (file:line, first group)."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in re.finditer(pattern, line):
                yield f"{name_of(path)}:{number}", match.group(1)


def test_cpp_folders_include_only_allowed_folders() -> None:
    wrong = []
    for where, header in lines_with(r'^\s*#\s*include "(.+?)"', CPP):
        beginnings = [b for b in MAY_INCLUDE if where.startswith(b)]
        assert beginnings, f"{where}: add this folder to MAY_INCLUDE"
        if not begins(header, MAY_INCLUDE[max(beginnings, key=len)]):
            wrong.append(f"{where} may not include {header}")
        elif not (CSRC / header).exists():
            wrong.append(f"{where}: there is no {header}")
    assert wrong == []


def test_cpp_folders_have_no_circle() -> None:
    """Also where MAY_INCLUDE would permit one. The bindings are one folder of three modules."""
    included: dict[str, set[str]] = {}
    for where, header in lines_with(r'^\s*#\s*include "(.+?)"', CPP):
        folder, other = where.split("/")[0], header.split("/")[0]
        if folder != other:
            included.setdefault(folder, set()).add(other)
    graphlib.TopologicalSorter(included).prepare()  # raises CycleError, which names the folders


def test_each_folder_has_its_namespace() -> None:
    """`pycomm` itself for core, so types of two folders may share a name."""
    wrong = []
    for where, name in lines_with(r"^namespace (pycomm[\w:]*) \{", CPP):
        file, folder = where.split(":")[0], where.split("/")[0]
        own = "pycomm" if folder == "core" else f"pycomm::{folder}"
        if name not in FORWARD.get(file, []) and name != own and not name.startswith(f"{own}::"):
            wrong.append(f"{where}: {name}, expected {own}")
    assert wrong == []


def test_lowest_folders_use_the_standard_library_only() -> None:
    low = [p for p in CPP if begins(name_of(p), STANDARD_LIBRARY_ONLY)]
    assert list(lines_with(r"#\s*include <(.*[./].*)>", low)) == []


def test_torch_headers_are_included_by_the_adaptor_only() -> None:
    rest = [p for p in CPP if not name_of(p).startswith(MAY_INCLUDE_TORCH)]
    assert list(lines_with(r'#\s*include [<"]((?:torch|ATen|c10|caffe2)/.*)[>"]', rest)) == []


def compiled_first() -> set[str]:
    """The headers with which a source of _core begins, directly or through a header: clang-tidy
    compiles them before anything else. The build includes a precompiled header before them."""
    first_of = {}
    for path in CPP:
        directives = re.findall(r"^\s*#\s*(?!pragma once)(.+)", path.read_text(), re.MULTILINE)
        found = re.match('include "(.+?)"', directives[0]) if directives else None
        first_of[name_of(path)] = found.group(1) if found else ""
    # The other modules are built only where there is torch, or nvcc.
    apart = (MAY_INCLUDE_TORCH, "bindings/cuda", "cuda/")
    found = set()
    for name, first in first_of.items():
        header = first if name.endswith(".cpp") and not name.startswith(apart) else ""
        while header and header not in found:
            found.add(header)
            header = first_of[header]
    return found


@pytest.mark.timeout(300)
def test_every_header_compiles_alone() -> None:
    """Those of the day; except headers that lint compiles so, and the adaptor's, which take half a
    minute each and have one includer."""
    import pybind11

    cxx = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fsyntax-only"]
    flags += [f"-I{CSRC}", "-isystem", sysconfig.get_paths()["include"]]
    flags += ["-isystem", pybind11.get_include()]

    def complaint(header: str) -> str:
        command = [cxx, *flags, "-x", "c++", "-"]
        text = f'#include "{header}"\n'
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        return f"{header}: {done.stderr}" if done.returncode else ""

    headers = [name_of(p) for p in CPP if p.suffix == ".h"]
    built = compiled_first()
    headers = [h for h in headers if not h.startswith(MAY_INCLUDE_TORCH) and h not in built]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [text for text in pool.map(complaint, of_the_day(headers, 8)) if text] == []


def test_no_function_like_macro() -> None:
    assert list(lines_with(r"^\s*#\s*define\s+(\w+\()", CPP)) == []


def test_the_core_neither_ends_the_process_nor_prints() -> None:
    pattern = r"\b(std::(?:abort|exit|quick_exit|terminate|cout|cerr)|_exit\(|\w*printf\(|puts\()"
    found = [hit for hit in lines_with(pattern, CPP) if "snprintf" not in hit[1]]
    assert found == []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, anywhere in it: (line, dotted name). `from a import b` is
    a.b if that is a module of pycomm and a otherwise; blocks for type checkers are skipped."""
    module = ast.parse(path.read_text())
    package = path.relative_to(ROOT).parent.parts
    for_checkers = [
        child
        for node in ast.walk(module)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    ]
    for node in ast.walk(module):
        if node in for_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield node.lineno, deeper if is_pycomm(deeper) else base


def is_pycomm(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    compiled = dotted in ("pycomm._core", "pycomm._cuda")
    return compiled or path.is_dir() or path.with_suffix(".py").exists()


def module_of(path: Path) -> str:
    """The module or package of pycomm that a file belongs to."""
    return path.relative_to(PYCOMM).parts[0].removesuffix(".py")


def layer_of(module: str) -> int:
    for height, modules in enumerate(LAYERS):
        if module in modules:
            return height
    pytest.fail(f"pycomm/{module} is missing in LAYERS: add it")


def test_python_folders_import_only_lower_layers() -> None:
    wrong = []
    for path in PYTHON:
        module = module_of(path)
        for line, name in imports(path):
            first, *rest = name.split(".")
            seen = rest[0] if rest else "__init__"
            if first == "pycomm" and seen != module and layer_of(seen) >= layer_of(module):
                wrong.append(f"{name_of(path)}:{line} may not import {name}")
    assert wrong == []


def test_python_modules_form_no_circle() -> None:
    graph = {}
    for path in PYTHON:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = {name for _, name in imports(path) if name.startswith("pycomm.")}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_torch_is_imported_by_the_adaptor_and_the_training_layer_only() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in PYTHON
        if not begins(name_of(path), MAY_IMPORT_TORCH)
        for line, name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_importing_pycomm_does_not_import_torch() -> None:
    code = "import pycomm, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_the_environment_is_read_by_the_configuration_only() -> None:
    ours = [p for p in PYTHON if not begins(name_of(p), MAY_SEE_ENVIRONMENT)]
    found = list(lines_with(r"\b(os\.environb?\b|(?:os\.|secure_)?getenv|environ\b)", CPP))
    found += lines_with(r"\b(os\.environb?\b|getenv\()", ours)
    found += lines_with(r"from os import .*\b(environ|getenv)", ours)
    assert found == []


def test_there_are_few_environment_variables() -> None:
    places = tree("csrc", "pycomm", "benchmarks", ends=(".cpp", ".h", ".py"))
    names = {name for _, name in lines_with(r"\b(PYCOMM_[A-Z0-9_]+)", places)} - NOT_VARIABLES
    assert len(names) <= MOST_VARIABLES, sorted(names)


def lengths() -> dict[Path, int]:
    """The lines of each file of code, by its path from the root."""
    folders = ("csrc", "pycomm", "benchmarks", "examples", "tests", "tools")
    paths = tree(*folders, ends=(".cpp", ".h", ".hpp", ".cu", ".cuh", ".py", ".pyi"))
    paths += tree("tests/native", "tests/emulator", ends=(".txt",))  # mutations
    return {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in paths}


def test_files_are_short() -> None:
    root = {Path(p.name): len(p.read_text().splitlines()) for p in ROOT.glob("*.py")}
    long = {path.name: n for path, n in (lengths() | root).items() if n > LONGEST_FILE}
    assert long == {}


def test_folders_keep_to_their_budgets() -> None:
    """Also that no budget is above its folder by a hundredth and 20 lines: what a change deletes,
    the next does not fill. Prints the ten fullest folders."""
    used = dict.fromkeys(BUDGETS, 0)
    for path, n in lengths().items():
        used[next(str(at) for at in path.parents if str(at) in BUDGETS)] += n
    fullest = sorted(BUDGETS, key=lambda folder: used[folder] / BUDGETS[folder], reverse=True)
    for folder in fullest[:10]:
        print(f"{folder:24} {used[folder]:6} of {BUDGETS[folder]:6} lines")
    most = {folder: n for folder, n in BUDGETS.items() if used[folder] > n}
    loose = {folder: n for folder, n in BUDGETS.items() if used[folder] * 1.01 + 20 < n}
    assert (most, loose) == ({}, {}), {folder: used[folder] for folder in (*most, *loose)}
    assert sum(BUDGETS.values()) <= IN_ALL


def test_tiers_list_existing_folders_and_tests_of_another_tier() -> None:
    """Also that no two files have one name, which pytest rejects in folders without packages."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    folders = {path.stem: path.parent.name for path in paths}
    assert len(folders) == len(paths)
    assert set(FOLDERS) - set(folders.values()) == set()
    assert set(FILES) - set(folders) == set()
    usual = {name: FOLDERS.get(folders[name], "full") for name in FILES}
    assert {name for name in FILES if FILES[name] == usual[name]} == set()
    listed = {**SLOW, **NIGHTLY}
    slow = {name for names in listed.values() for name in names}
    assert slow - {name for _, name in lines_with(r"^def (test_\w+)", paths)} == set()
    assert set(listed) - set(folders) == set()


def test_every_command_is_documented() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    help_text = subprocess.run(
        [sys.executable, "-m", "pycomm", "--help"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    ).stdout  # fmt: skip
    listed = re.search(r"\{([\w,-]+)\}", help_text)
    assert listed, help_text
    targets = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [f"pycomm {name}" for name in listed.group(1).split(",")]
    commands += [f"make {name}" for name in " ".join(targets).split() if name != "help"]
    assert [c for c in commands if not re.search(rf"{c}\b", text)] == []
