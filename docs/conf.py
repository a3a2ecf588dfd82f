"""The site: the pages of docs/ and a reference from the docstrings. `make docs` builds it.

Its extensions: docstrings are adapted to reStructuredText, links of pages to files outside
docs/ become links to the checkout (or to SOURCE_URL), and directives read what autodoc cannot: the
help of commands, the variables of the environment, and classes of the compiled core.
"""

import ast
import contextlib
import io
import os
import re
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "100"  # width of the help texts

from pycomm import __main__ as command_line  # noqa: E402 - found in ROOT
from pycomm import config, errors  # noqa: E402 - as above

# Where files outside docs/ are published, as "https://.../blob/main"; "": the checkout itself.
SOURCE_URL = os.environ.get("SOURCE_URL", "")

project = "pycomm"
author = "the pycomm developers"
version = release = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
if os.environ.get("INTERSPHINX"):  # links to types of other projects; needs a network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
exclude_patterns = ["conf.py"]
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output
copybutton_selector = "div:not(.highlight-output) > div.highlight > pre"
smartquotes_action = "D"  # dashes alone: quotation marks are code
default_role = "literal"  # docstrings have `x` for code
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [
    # Types that only signatures have.
    ("py:class", r"Op|Tensor|Array|(Async)?(Calls|Messages)|Launcher"),
    ("py:class", r"pycomm\..*\.(Result|Expected|Stats)"),
    (r"py:.*", r"(collections|contextlib|numpy|os|torch)\..*"),
    (r"py:.*", r"(Store|_DistributedBackendOptions|timedelta)"),  # torch's and datetime's
    (r"py:.*", r"(pycomm\.)?(_core|_c10d|compiled)\..*"),
]

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"pycomm {release}"
html_copy_source = False
html_show_sphinx = False

log = logging.getLogger(__name__)

# Lists of names without types, which the signatures have; several names may share one entry.
SECTIONS = Config(napoleon_use_param=False, napoleon_use_rtype=False)
# What has a meaning in docstrings: code in backticks, short strings, *Emphasis*.
MARKED = re.compile(r"""(`[^`]*`|"[\w.*-]*"|\*[A-Z][\w' ]*\*)""")


class Docstring(GoogleDocstring):
    """A docstring in Google's style, with two sections read otherwise."""

    def _consume_returns_section(self, preprocess_types: bool = False) -> list[Any]:
        """Text: of "name: meaning" the name is no type."""
        del preprocess_types
        return [("", "", self._dedent(self._consume_to_next_section()))]

    def _parse_attributes_section(self, section: str) -> list[str]:
        """An entry for each, with its type in the first line."""
        del section
        lines = []
        for name, given, text in self._consume_fields():
            kind = given or self._lookup_annotation(name)
            lines += [f".. attribute:: {name}", *([f"   :type: {kind}"] if kind else []), ""]
            lines += [*self._indent(text, 3), ""]
        return lines


def escaped(text: str) -> str:
    """Text of a docstring as reStructuredText: code is literal, and the rest has no markup."""
    parts = MARKED.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            plain = re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", part)
            parts[i] = re.sub(r"\bdocs/([\w/]+)\.md\b", r":doc:`docs/\1.md </\1>`", plain)
        elif part[0] == '"':
            parts[i] = f"`{part}`"
    return "".join(parts)


def verbatim(lines: list[str]) -> list[bool]:
    """Which lines are of an indented block that an empty line separates from the text before."""
    marks: list[bool] = []
    for i, line in enumerate(lines):
        above = [other for other in lines[:i] if other.strip()][-1:]
        starts = line.startswith("    ") and i > 0 and not lines[i - 1].strip()
        inside = bool(marks) and marks[-1] and (not line.strip() or line.startswith("    "))
        marks.append(inside or (starts and above != [] and not above[0].startswith(" ")))
    return marks


def adapt_docstring(app: Sphinx, what: str, *args: Any) -> None:
    """Makes reStructuredText of a docstring."""
    *rest, lines = args
    text: list[str] = []
    for is_code, block in groupby(zip(verbatim(lines), lines, strict=True), itemgetter(0)):
        joined = "\n".join(line for _, line in block)
        text += ["::", "", joined] if is_code else [escaped(joined)]
    if what == "property":
        what = "method"  # else napoleon takes the first words of "By rank: ..." for a type
    lines[:] = str(Docstring("\n".join(text), SECTIONS, app, what, *rest)).split("\n")


class SourceLinks(SphinxTransform):
    """Links to files outside docs/ point at the checkout, or at SOURCE_URL."""

    default_priority = 5

    def apply(self, **_kwargs: Any) -> None:
        """Replaces them before they are taken for pages or for files to copy."""
        page = Path(self.env.doc2path(self.env.docname))
        for link in list(self.document.findall(nodes.Element)):
            if not isinstance(link, (addnodes.pending_xref, addnodes.download_reference)):
                continue
            target, _, anchor = link.get("reftarget", "").partition("#")
            path = Path(os.path.normpath(page.parent / target))
            if not target or path.is_relative_to(DOCS) or not path.is_relative_to(ROOT):
                continue
            if not path.exists() and path.with_suffix(".md").exists():
                path = path.with_suffix(".md")  # MyST drops it
            if not path.exists():
                log.warning("no such file: %s", target, location=link)
            built = Path(self.app.outdir, self.env.docname).parent
            url = SOURCE_URL and f"{SOURCE_URL}/{path.relative_to(ROOT)}"
            url = url or os.path.relpath(path, built)
            reference = nodes.reference(refuri=url + (anchor and f"#{anchor}"))
            reference += link.children
            link.replace_self(reference)


def match_exactly(_app: Sphinx, doctree: nodes.document) -> None:
    """Keeps the type `bytes` from being taken for an attribute of that name of any class."""
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refspecific") is False:  # Sphinx asks whether it is there
            del node["refspecific"]


def resolve_short(app: Sphinx, env: Any, node: addnodes.pending_xref, content: Any) -> Any:
    """Finds a class by its name alone: `Timeout`, or a private path to a public class."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rpartition(".")[2]
    found = {
        name: entry
        for name, entry in env.domains["py"].objects.items()
        if name.endswith(f".{last}") and entry.objtype in {"class", "exception"}
    }
    if len(found) != 1:
        return None
    name, entry = found.popitem()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Makes links of code such as `pycomm.init` and `Timeout`, in pages and docstrings."""
    objects = app.env.domains["py"].objects
    known = {name: entry for name, entry in objects.items() if name != "pycomm"}
    known |= {name: known.get(f"pycomm.errors.{name}") for name in errors.__all__}
    for code in list(doctree.findall(nodes.literal)):
        entry = known.get(code.astext().removesuffix("()"))
        if entry is None or isinstance(code.parent, (nodes.reference, nodes.title)):
            continue
        link = make_refnode(app.builder, page, entry.docname, entry.node_id, code.deepcopy())
        code.replace_self(link)


class CoreClass(SphinxDirective):
    """A class of the compiled core that calls return, as pycomm/_core.pyi declares it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Writes the directives that autodoc would."""
        stub = ROOT / "pycomm" / "_core.pyi"
        self.env.note_dependency(str(stub))
        name = self.arguments[0]
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                break
        else:
            raise self.error(f"{stub.name} has no class {name}")
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        lines = [f".. py:class:: {name}()", "   :module: pycomm._core", ""]
        lines += [f"   {line}" for line in escaped(ast.get_docstring(node) or "").split("\n")]
        for field in fields:
            lines += ["", f"   .. py:attribute:: {ast.unparse(field.target)}"]
            lines += ["      :module: pycomm._core"]
            lines += [f"      :type: {ast.unparse(field.annotation)}"]
        return self.parse_text_to_nodes("\n".join(lines))


class CommandHelp(Directive):
    """What a command prints with --help; `:group:` names one group of its options."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"group": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Calls the command itself."""
        _, *words = self.arguments[0].split()
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            contextlib.suppress(SystemExit),
        ):
            command_line.main([*words, "--help"])
        text = re.split(r"^pycomm.*: error:", printed.getvalue(), flags=re.MULTILINE)[0]
        if not text.startswith("usage:"):
            raise self.error(f"{self.arguments[0]} --help: {text}")
        if group := self.options.get("group"):
            text = text[text.index(f"\n{group}:\n") + 1 :]
        return [nodes.literal_block(text=text, language="text")]


class Variables(Directive):
    """The variables of the environment that pycomm reads, and their meaning."""

    def run(self) -> list[nodes.Node]:
        """One entry of a definition list for each."""
        entries = []
        for name, meaning in config.VARIABLES.items():
            term = nodes.term("", "", nodes.literal(text=name))
            meant = nodes.definition("", nodes.paragraph(text=meaning))
            entries.append(nodes.definition_list_item("", term, meant))
        return [nodes.definition_list("", *entries)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", adapt_docstring)
    app.connect("doctree-read", match_exactly)
    app.connect("missing-reference", resolve_short)
    app.connect("doctree-resolved", link_names)
    app.add_transform(SourceLinks)
    app.add_directive("core-class", CoreClass)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("environment-variables", Variables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
