"""Checks classes: few methods and fields in C++ and Python, one definition of each type in C++."""

import ast
import re
from collections.abc import Iterator

from source_files import CPP, PYTHON

MOST_METHODS, MOST_FIELDS = 25, 15
# The methods and fields of each class that is larger: these numbers may only decrease.
LARGE_CLASSES: dict[str, tuple[int, int]] = {
    # Plain data: options, a row of a table, the layout of a file, the arguments of a kernel.
    "ConnectOptions": (0, 23),
    "FlightRecord": (1, 18),
    "FlightRecorderHead": (0, 19),
    "Functions": (0, 18),  # of NCCL, one pointer each
    "Line": (0, 16),
    "MeshRequest": (0, 19),
    "Reading": (0, 22),
    "Tables": (0, 20),
    "Writing": (0, 21),
}

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
    found: Sizes = {}
    head = r"(?<!enum )\b(?:class|struct)\s+(?:alignas\([^()]*\)\s*)?(?:\w+::)*(\w+)"
    head += r"(?:<[^{;]*>)?(\s+final)?\s*(:[^:{;][^{;]*)?\{"
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
        before = found.get(name, (0, 0))  # a class of the same name, or a specialization
        found[name] = (max(methods, before[0]), max(fields, before[1]))
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
    };
    template <typename T>
    struct alignas(64) B {
      void f();
      T x;
    };
    template <>
    struct B<int> {
      int x, y;
    };
    struct A::Hidden : Base {
      int x;
    };"""
    assert sizes_of(source) == {"A": (2, 6), "Inner": (0, 2), "B": (1, 2), "Hidden": (0, 1)}
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


# ---- one definition ------------------------------------------------------------------------------

OPENS_NAMESPACE = re.compile(r"(?:inline\s+)?namespace\s*([\w:]*)\s*$")
DEFINES_TYPE = re.compile(
    r"\b(?:class|struct|enum|union)\s+(?:class\s+|struct\s+)?(\w+)\s*(?:final\s*)?(?::[^:].*)?$",
    re.DOTALL,
)


def types_of(source: str) -> Iterator[str]:
    """The qualified names of the types that a file defines outside of functions, other types and
    namespaces without a name."""
    scopes: list[str] = []
    text = ""
    code = re.sub(r"alignas\([^()]*\)", "", without_text(source))
    for part in re.split(r"([{};])", code):
        if part == "{":
            named = OPENS_NAMESPACE.search(text)
            found = DEFINES_TYPE.search(text)
            if named is None and found and "" not in scopes and "(" not in text:
                yield "::".join([*scopes, found[1]])
            scopes.append(named[1] if named else "")
        elif part == "}":
            scopes.pop()
        text = "" if part in "{};" else part


def test_a_type_has_one_definition():
    """Linking two types of one name is undefined behaviour. `make nightly` lets the linker compare
    their content too: tests/native/test_one_definition.py."""
    files: dict[str, list[str]] = {}
    for path in CPP:
        if "csrc" in path.parts:
            for name in types_of(path.read_text()):
                files.setdefault(name, []).append(path.name)
    assert len(files) > 300
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_two_definitions_are_found():
    one = "namespace a::b {\nstruct alignas(8) Stage { int x; };\nvoid f() { struct Local {}; }\n}"
    other = "namespace a::b {\nnamespace {\nstruct Hidden {};\n}\nclass Stage final : X {};\n}"
    assert list(types_of(one)) == ["a::b::Stage"]
    assert list(types_of(other)) == ["a::b::Stage"]
