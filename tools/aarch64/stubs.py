"""Libraries without contents, in place of those that torch's wheel needs and that are not there.

Each function of them returns 100, CUDA's error for "no device"; those of the runtime that register
a library's kernels return 0.
"""

import re
import subprocess
from pathlib import Path

READELF, COMPILER = "aarch64-linux-gnu-readelf", "aarch64-linux-gnu-gcc"
SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|z)|ld-linux-aarch64)\.so")
NO_DEVICE = 100


def make(folder: Path, out: Path) -> None:
    """Makes in `out` what the libraries in `folder` need."""
    out.mkdir(parents=True, exist_ok=True)
    libraries = sorted(path for path in folder.rglob("*.so*") if path.is_file())
    needed: set[str] = set()
    versions: dict[str, set[str]] = {}
    undefined, defined = set(), set()
    for path in libraries:
        text = _read("-dVW", path)
        needed |= set(re.findall(r"NEEDED.*\[(.+)\]", text))
        file = ""
        for file_name, version in re.findall(r"File: (\S+)|Name: (\S+)", text):
            file = file_name or file
            if version and file:
                versions.setdefault(file, set()).add(version)
        for line in _read("--dyn-syms", path).splitlines():
            words = line.split()
            if len(words) >= 8:
                (undefined if words[6] == "UND" else defined).add(words[7])
    names = {name.split("@")[0] for name in defined}
    symbols = {tuple(name.split("@")[:2]) for name in undefined if name.split("@")[0] not in names}
    present = {path.name for path in libraries}
    for name in sorted(needed - present):
        if not SYSTEM.match(name):
            _compile(name, versions.get(name, set()), symbols, out)


def _compile(name: str, versions: set[str], symbols: set[tuple[str, ...]], out: Path) -> None:
    """One library. Without versions, the prefix of a function tells where it belongs."""
    prefix = re.sub(r"^lib(nv)?|\.so.*", "", name).lower()
    functions: dict[str, str] = {}
    for function, *version in symbols:
        unversioned = not version and not versions and function.lower().startswith(prefix)
        if unversioned or (version and version[0] in versions):
            functions[function] = version[0] if version else ""
    lines = [
        f"long {function}(void) {{ return {0 if function.startswith('__') else NO_DEVICE}; }}\n"
        for function in sorted(functions)
    ]
    source, script = out / f"{name}.c", out / f"{name}.map"
    source.write_text("".join(lines))
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
    if versions:
        nodes = []
        for version in sorted(versions):
            inside = [f"{function};" for function, of in functions.items() if of == version]
            nodes.append(f"{version} {{ global: {' '.join(inside) or 'none;'} }};\n")
        script.write_text("".join(nodes))
        flags.append(f"-Wl,--version-script={script}")
    subprocess.run([COMPILER, *flags, str(source), "-o", str(out / name)], check=True)


def _read(option: str, path: Path) -> str:
    command = [READELF, "-W", option, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
