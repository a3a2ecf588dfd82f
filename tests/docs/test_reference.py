"""Every public name is in docs/reference, and every name there exists. `make docs` renders them."""

import importlib
import re
from pkgutil import resolve_name

import pytest
from paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
MODULES = [
    "pycomm",
    "pycomm.data",
    "pycomm.errors",
    "pycomm.functional",
    "pycomm.kernels",
    "pycomm.metrics",
    "pycomm.reference",
    "pycomm.testing",
    "pycomm.torch_backend",
]
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+).*\n((?:   .*\n)*)", re.MULTILINE)


def documented() -> list[object]:
    """The names in directives of the pages, and the public names of modules with `:members:`."""
    found = []
    for page in sorted(REFERENCE.glob("*.md")):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            there = resolve_name(name)
            found.append(there)
            if kind == "module" and ":members:" in options:
                found += [getattr(there, public) for public in there.__all__]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    there = importlib.import_module(module)
    known = {id(thing) for thing in documented()}
    assert [name for name in there.__all__ if id(getattr(there, name)) not in known] == []


def test_no_name_is_in_the_reference_twice():
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    names = [name for _, name, _ in DIRECTIVE.findall(text)]
    assert len(names) > 80
    assert sorted(set(names)) == sorted(names)


def test_every_page_is_in_the_table_of_contents():
    index = (REFERENCE.parent / "index.md").read_text()
    assert [p.stem for p in REFERENCE.glob("*.md") if f"reference/{p.stem}\n" not in index] == []
