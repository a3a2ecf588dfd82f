"""Checks the layers: the allowed includes of C++ and imports of Python, and the sizes of files and
classes.

The tables are at the top; a new folder of csrc or module of pycomm needs a row there.
"""

import ast
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiers import QUICK, UNIT

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PYCOMM = ROOT / "pycomm"

# Which pycomm headers a file with this path prefix may include; the longest prefix applies. A name
# that ends in "/" is a folder.
MAY_INCLUDE = {
    "core/": ["core/"],
    "os/": ["core/", "os/"],
    "collectives/": ["core/", "collectives/"],
    "kernels/": ["core/", "kernels/", "os/thread.h"],
    # The store authenticates clients with the transports' handshake.
    "rendezvous/": [
        "core/",
        "os/",
        "rendezvous/",
        "transport/admission.h",
        "transport/handshake.h",
    ],
    "transport/": ["core/", "os/", "transport/"],
    "engine/": [
        *("core/", "engine/", "collectives/plan.h", "kernels/kernels.h"),
        *("os/fd.h", "os/process.h", "transport/transport.h", "transport/frame.h"),
    ],
    # Plans on a GPU's streams; the device and NCCL are arguments.
    "device/": ["core/", "device/", "collectives/plan.h", "nccl/", "os/thread.h"],
    "shared/": [
        *("core/", "shared/", "collectives/plan.h", "engine/engine.h", "kernels/kernels.h"),
        *("os/process_memory.h", "os/random.h", "os/shared_heap.h", "transport/frame.h"),
    ],
    "group/": [
        *("core/", "os/", "collectives/", "kernels/", "rendezvous/"),
        *("transport/", "engine/", "shared/", "group/", "device/", "nccl/"),
    ],
    "bindings/core": [
        *("bindings/core", "core/", "group/group.h", "group/connect.h", "group/device_group.h"),
        *("bindings/kernels.h", "kernels/kernels.h", "kernels/bandwidth.h", "os/shared_heap.h"),
        *("kernels/lean.h", "os/fd.h", "rendezvous/"),
    ],
    "bindings/kernels.h": [
        *("core/", "kernels/device_kernels.h", "kernels/lean.h", "kernels/packet.h"),
    ],
    "bindings/c10d": ["bindings/c10d", "group/group.h"],
    "bindings/cuda": [
        *("bindings/cuda", "bindings/kernels.h", "core/", "cuda/cuda_kernels.h", "nccl/nccl.h"),
        *("cuda/cuda_device.h", "cuda/bandwidth.h"),
    ],
    "nccl/": ["core/", "nccl/"],
    "cuda/": [
        *("core/", "cuda/", "device/device.h", "gpu.hpp"),
        *("kernels/device_kernels.h", "kernels/lean_layout.h", "kernels/packet.h"),
    ],
    "gpu.hpp": [],
}
STANDARD_LIBRARY_ONLY = ["core/", "collectives/"]
MAY_INCLUDE_TORCH = "bindings/c10d"

# Modules and packages of pycomm, lowest layer first: each may import itself and lower layers.
LAYERS = [
    ["_core", "_cuda", "_c10d"],
    ["errors"],
    ["secret"],
    ["arrays", "config", "flight_recorder", "nccl", "serialization"],
    ["launcher_watch", "rendezvous", "shrink", "thresholds"],
    ["group", "kernels"],
    ["device_groups"],
    ["calls", "memory"],
    ["collectives", "reference"],
    ["objects", "communicators", "coalesced", "shrink_result", "reference_compact"],
    ["compress", "data", "metrics", "checkpoint", "printing"],
    ["parallel", "optim", "functional"],
    ["launch", "torch_backend", "testing"],
    ["flight_report", "info", "planner", "top", "trace", "tuning"],
    ["__init__"],
    ["demo"],
    ["__main__"],
]
# The small module that torch imports as a backend plugin.
SAME_MODULE = {"_torch_autoload": "torch_backend"}
MAY_IMPORT_TORCH = [
    *("torch_backend", "demo"),
    "rendezvous",  # inside a function, to join torch's own store
    *("coalesced", "shrink_result", "compress", "data", "metrics", "checkpoint", "parallel"),
    "optim",
    *("functional", "launch", "planner"),
]
# Modules that read the environment. Launchers pass it on to children.
MAY_SEE_ENVIRONMENT = [
    "pycomm/config.py",
    "pycomm/launch/",
    "pycomm/demo/processes.py",
    "pycomm/demo/netns.py",
]

LONGEST_FILE = 500
MOST_METHODS, MOST_FIELDS = 25, 15
# The methods and fields of each class that is still larger: these numbers may only decrease.
LARGE_CLASSES: dict[str, tuple[int, int]] = {
    "Reading": (0, 21),
    "Writing": (0, 20),
    "Tables": (0, 20),
    "ConnectOptions": (0, 21),
    "DeviceGroup": (29, 11),
    "FlightRecorderHead": (0, 18),
    "Call": (0, 16),
    "HostGroup": (49, 20),
    "MeshRequest": (0, 19),
    "Functions": (0, 18),
    "StoreServer": (16, 17),
    "TcpStore": (25, 16),
    "Faulty": (20, 18),
    "Handshake": (25, 18),
    "DGC": (21, 24),
    "FlightRecord": (1, 18),
}
MOST_VARIABLES = 10
# Set by setup.py for the compiler, and by pycomm's launchers for their ranks: not for users.
NOT_VARIABLES = {"PYCOMM_TORCH_VERSION", "PYCOMM_STORE_PORT"}


def tree(*folders: str, ends: tuple[str, ...]) -> list[Path]:
    """The files in these folders of the repository with one of these suffixes."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in ends]
    return sorted(found)


CPP = tree("csrc", ends=(".cpp", ".h", ".hpp", ".cu", ".cuh"))
PYTHON = tree("pycomm", ends=(".py",))


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


def test_lowest_folders_use_the_standard_library_only() -> None:
    low = [p for p in CPP if begins(name_of(p), STANDARD_LIBRARY_ONLY)]
    assert list(lines_with(r"#\s*include <(.*[./].*)>", low)) == []


def test_torch_headers_are_included_by_the_adaptor_only() -> None:
    rest = [p for p in CPP if not name_of(p).startswith(MAY_INCLUDE_TORCH)]
    assert list(lines_with(r'#\s*include [<"]((?:torch|ATen|c10|caffe2)/.*)[>"]', rest)) == []


@pytest.mark.timeout(300)
def test_every_header_compiles_alone() -> None:
    """Except the adaptor's headers, which take half a minute each and have one includer."""
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
    headers = [h for h in headers if not h.startswith(MAY_INCLUDE_TORCH)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [text for text in pool.map(complaint, headers) if text] == []


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
    compiled = dotted in ("pycomm._core", "pycomm._cuda", "pycomm._c10d")
    return compiled or path.is_dir() or path.with_suffix(".py").exists()


def module_of(path: Path) -> str:
    """The module or package of pycomm that a file belongs to."""
    return known_as(path.relative_to(PYCOMM).parts[0].removesuffix(".py"))


def known_as(module: str) -> str:
    return SAME_MODULE.get(module, module)


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
            seen = known_as(rest[0]) if rest else "__init__"
            if first == "pycomm" and seen != module and layer_of(seen) >= layer_of(module):
                wrong.append(f"{name_of(path)}:{line} may not import {name}")
    assert wrong == []


def test_torch_is_imported_by_the_adaptor_and_the_training_layer_only() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in PYTHON
        if module_of(path) not in MAY_IMPORT_TORCH
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


def test_files_are_short() -> None:
    folders = ("csrc", "pycomm", "benchmarks", "examples", "tests", "tools")
    paths = tree(*folders, ends=(".cpp", ".h", ".hpp", ".cu", ".cuh", ".py"))
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in [*paths, ROOT / "setup.py"]}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FILE} == {}


NOT_MEMBERS = r"(using|friend|typedef|static_assert|enum|class|struct|union|extern|operator)\b"
DATA_TYPE = r"^\s*(?:\w+\s*:\s*)?(?:template\s*<[^;]*>\s*)?(?:class|struct|enum|union)\b[^()=]*$"
FOREIGN_BASE = r"\b(?:c10d|torch)::"
Sizes = dict[str, tuple[int, int]]


def without_text(source: str) -> str:
    """C++ source without comments, literals, preprocessor lines and attributes."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^\s*#(?:[^\n]*\\\n)*[^\n]*|\[\[.*?\]\]'
    return re.sub(pattern, " ", source, flags=re.DOTALL | re.MULTILINE)


def block_at(code: str, begin: int) -> str:
    """What is inside the braces that open at `begin`."""
    depth = 0
    for at in range(begin, len(code)):
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        if depth == 0:
            return code[begin + 1 : at]
    raise ValueError("unbalanced braces")


def statements(body: str) -> Iterator[str]:
    """The declarations of a class body, without the contents of their braces."""
    text, at = "", 0
    while at < len(body):
        ends = body[at] == ";"
        if body[at] == "{":
            at += len(block_at(body, at)) + 1
            # The body of a function ends it; the braces of a type, a field or an argument do not.
            inside = text.count("(") > text.count(")")
            ends = not inside and not re.search(DATA_TYPE, text) and is_function(text)
            ends |= not text.strip()  # the body behind the braces of a constructor's initializers
            text += "" if ends else "{}"
        elif not ends:
            text += body[at]
        if ends:
            yield text
            text = ""
        at += 1


def declared(statement: str) -> str:
    """A declaration without access, template and the contents of its parentheses."""
    text = re.sub(r"\b(public|protected|private)\s*:(?!:)", " ", statement)
    text = re.sub(r"\(\s*\*\s*(\w*)\s*\)\s*\([^()]*\)", r" \1 ", text)  # a pointer to a function
    short, depth = "", 0
    for letter in text:
        depth -= letter == ")"
        short += letter if depth == 0 else ""
        depth += letter == "("
    while (shorter := re.sub(r"<[^<>]*>", "", short)) != short:
        short = shorter
    return re.sub(r"^\s*template\b", "", short).strip()


def is_function(statement: str) -> bool:
    return "()" in declared(statement).split("=")[0]


def sizes_of(source: str) -> Sizes:
    """The classes that C++ source defines: the methods and fields of each. Constructors,
    destructors and operators are no methods, nor are overrides of an interface of torch; constants
    are no fields."""
    code = without_text(source)
    found = {}
    head = r"(?<!enum )\b(?:class|struct)\s+(\w+)(?:<[^{;]*>)?(\s+final)?\s*(:[^:{;][^{;]*)?\{"
    for match in re.finditer(head, code):
        name, foreign = match[1], re.search(FOREIGN_BASE, match[3] or "")
        methods = fields = 0
        for statement in statements(block_at(code, match.end() - 1)):
            text = declared(statement)
            if not text or text.startswith(",") or re.match(NOT_MEMBERS, text):
                continue
            if re.search(rf"\boperator\b|\b{name}\s*\(\)", text):
                continue
            if is_function(statement):
                methods += not (foreign and re.search(r"\boverride\b", statement))
            elif not re.match(r"static\b", text):
                fields += 1 + text.count(",")
        found[name] = (methods, fields)
    return found


def sizes_of_python(source: str) -> Sizes:
    """The same for Python, without methods like __init__. Fields are annotated in the class or
    assigned in __init__."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = {f.name for f in functions if not re.fullmatch(r"__\w+__", f.name)}
        fields = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
        for init in (f for f in functions if f.name == "__init__"):
            stored = (n for n in ast.walk(init) if isinstance(n, ast.Attribute))
            own = (n for n in stored if ast.unparse(n.value) == "self")
            fields |= {n.attr for n in own if isinstance(n.ctx, ast.Store)}
        found[node.name] = (len(names), len(fields))
    return found


def test_classes_are_counted() -> None:
    source = """
    class A final : public c10d::Backend {  // int no_ = 0;
     public:
      explicit A(int x) : x_(x), y_{x} {}
      ~A() override { f(); }
      A& operator=(const A&) = delete;
      A(int x, int y) : x_{x}, y_(y) { h(); }
      std::vector<int> f(std::function<void(int)> g = {}) const { return {x_, y_}; }
      [[noreturn]] static void h();
      void foreign() override;
     private:
      struct Inner { int a, b = 2; };
      static constexpr int kMany = 3;
      int x_ = f(1)[0], y_{2};
      std::function<void(const A&)> g_;
      int (*pointer)(int) = nullptr, b = 0, c;
    };"""
    assert sizes_of(source) == {"A": (2, 6), "Inner": (0, 2)}
    python = "class A:\n x: int\n def __init__(s): pass\n def f(self): pass"
    assert sizes_of_python(python) == {"A": (1, 1)}


def test_classes_are_small() -> None:
    large: Sizes = {}
    for path in [*CPP, *PYTHON]:
        sizes = (sizes_of_python if path in PYTHON else sizes_of)(path.read_text())
        for name, (methods, fields) in sizes.items():
            if methods > MOST_METHODS or fields > MOST_FIELDS:
                assert name not in large, f"two large classes are called {name}"
                large[name] = (methods, fields)
    within = {
        name for name, size in large.items()
        if all(n <= most for n, most in zip(size, LARGE_CLASSES.get(name, (0, 0)), strict=True))
    }  # fmt: skip
    assert {name: size for name, size in large.items() if name not in within} == {}
    assert LARGE_CLASSES.keys() - large.keys() == set(), "these are small now: remove their rows"


def test_every_file_of_a_tier_exists() -> None:
    files = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    assert (UNIT | QUICK) - files == set()
    assert not UNIT & QUICK


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
