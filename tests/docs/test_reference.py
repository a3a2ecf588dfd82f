"""Public is what docs/reference lists. `make docs` renders it."""

import ast
import importlib
import re
from collections.abc import Iterator
from pkgutil import resolve_name

import pytest
from paths import ROOT
from source_files import PYTHON

import pycomm

REFERENCE = ROOT / "docs" / "reference"
CALLED_BY_NAME = {"register_backend"}  # of torch_backend: by the compiled backend
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+).*\n((?:   .*\n)*)", re.MULTILINE)


def module_of(path) -> str:
    """The module of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def listed() -> list[str]:
    """The names in directives of the pages, and the public names of modules with `:members:`."""
    found = []
    for page in sorted(REFERENCE.glob("*.md")):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            if kind != "module":
                found.append(name)
            elif ":members:" in options:
                apart = re.search(r":exclude-members: (.*)", options)
                names = set(resolve_name(name).__all__) - set((apart or [""])[1].split(", "))
                found += [f"{name}.{one}" for one in sorted(names)]
    return found


def with_public_names() -> dict[str, list[str]]:
    """By module: its public names. __init__.pyi has those of pycomm, other modules __all__."""
    stub = ast.parse((ROOT / "pycomm" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    names = [alias.name for node in imports for alias in node.names]
    found = {"pycomm": [name for name in names if name != "__version__"]}
    for path in PYTHON:
        module = module_of(path)
        if "._" not in module and module != "pycomm" and "__all__ = " in path.read_text():
            found[module] = importlib.import_module(module).__all__
    return found


def objects(names: list[str]) -> dict[int, str]:
    return {id(resolve_name(name)): name for name in names}


def test_public_is_what_the_reference_lists() -> None:
    """Some objects are public in two modules: one of their names is in the reference."""
    public = [f"{module}.{name}" for module, names in with_public_names().items() for name in names]
    assert len(public) > 100
    known, there = objects(listed()), objects(public)
    assert [name for key, name in there.items() if key not in known] == []
    assert [name for key, name in known.items() if key not in there] == []
    assert [name for name in [*public, *listed()] if "._" in name] == []
    assert set(listed()) - set(public) == set()


def own_names(module: str) -> Iterator[str]:
    """The functions and classes that a module defines."""
    there = importlib.import_module(module)
    for name, value in vars(there).items():
        if getattr(value, "__module__", "") == module and callable(value):
            yield name


@pytest.mark.parametrize("module", sorted(set(with_public_names()) - {"pycomm"}))
def test_other_names_of_public_modules_have_an_underscore(module: str) -> None:
    names = set(own_names(module)) - set(with_public_names()[module]) - CALLED_BY_NAME
    assert [name for name in sorted(names) if not name.startswith("_")] == []


def test_private_modules_have_no_list_of_names() -> None:
    listing = [module_of(path) for path in PYTHON if "__all__ = " in path.read_text()]
    # Its modules are imported through the package.
    assert [name for name in listing if "._" in name] == ["pycomm._quantize"]


def test_dir_lists_the_usual_names() -> None:
    usual = {"DataParallel", "DGC", "data", "elastic", "torch_backend", "__version__"}
    assert usual <= set(dir(pycomm)) == set(pycomm.__all__)
    assert len(dir(pycomm)) <= 40
    others = set(with_public_names()["pycomm"]) - set(dir(pycomm))
    assert {"save", "user_get", "dgc_hook"} <= others
    assert [name for name in others if not hasattr(pycomm, name)] == []


def test_no_name_is_in_the_reference_twice():
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    names = [name for _, name, _ in DIRECTIVE.findall(text)]
    assert len(names) > 80
    assert sorted(set(names)) == sorted(names)


def test_every_page_is_in_the_table_of_contents():
    index = (REFERENCE.parent / "index.md").read_text()
    assert [p.stem for p in REFERENCE.glob("*.md") if f"reference/{p.stem}\n" not in index] == []
