"""Checks the wording of docs, docstrings, comments, error texts and names of tests.

    python tools/language.py                 all files, and the subjects of commits
    python tools/language.py docs/errors.md  one or more files

Prints each finding with its line, and fails if there are any.

A banned word is a private metaphor for which the field has a term; see docs/glossary.md. Sentences
of docs have at most LONGEST words, with a median of at most MEDIAN. Subjects of commits name their
area, are in the imperative and have at most SUBJECT characters.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LONGEST, MEDIAN, SUBJECT = 30, 18, 72

# Banned patterns, which ignore case, and what to write instead.
BANNED = {
    r"nobody|no one": "no rank, no process",
    r"whoever|whomever": "the rank that, the peer that",
    r"strangers?": "unauthenticated client",
    r"owed?|owes|owing": "residual, unsent",
    r"lobby|doorman": "connector",
    r"bells?": "wake-up socket",
    r"errands?": "pending callback",
    r"parcels?": "packet",
    r"last words?": "goodbye message",
    r"in peace": "cleanly",
    r"hung up|hangs up": "connection closed",
    r"(?:has|have|had|having) given up|gives? up|gave up|giving up": "abort",
    r"stands|stood": "is established, is",
    r"travel(?:s|led|ling)?": "is sent",
    r"(?:lies|lay|lain)": "is stored, is",
    r"lean": "compact",
    r"dear": "expensive",
    r"(?:comes?|came) to nothing": "fails",
    r"are told|is told|was told|were told": "receives the error, is notified",
    r"heed(?:s|ed)?": "check",
    r"faces": "APIs, front ends",
    r"made-up": "simulated",
    r"a number that is none|that is none|that are none": "invalid X: got V, expected R",
    r"whereabouts": "call state",
    r"goes by|go by|went by": "uses",
    r"goes on|go on|went on": "continues",
    r"for (?:ever|good)": "permanently",
    r"way back": "all-gather phase",
    r"house|rooms?|floors?(?![(\w])": "layer, folder",
    r"roll call": "liveness check",
    r"gone astray|go astray|went astray": "differs",
    r"of (?:its|their|our) own accord": "without being asked",
}
BANNED_RE = {re.compile(rf"\b(?:{p})\b", re.IGNORECASE): hint for p, hint in BANNED.items()}

# Commits up to this one are not checked.
FIRST = "861be9b"

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"]
PAGES += ["benchmarks/RESULTS.md"]
SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
CODE = ["csrc", "pycomm", "benchmarks", "tests", "tools", "examples"]  # and the files of the root


class Finding(NamedTuple):
    """A finding in a line of a file."""

    path: Path
    line: int
    what: str


def pages() -> list[Path]:
    """All documentation pages."""
    return [ROOT / p for p in PAGES] + sorted((ROOT / "docs").rglob("*.md"))


def sources() -> Iterator[Path]:
    """All source files."""
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*"))]
    for path in [*paths, *sorted(ROOT.glob("*.py"))]:
        if path.suffix in SUFFIXES and path != Path(__file__):
            yield path


def python_text(source: str) -> Iterator[tuple[int, str]]:
    """Comments, strings and names of tests, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING}:
            for i, line in enumerate(token.string.splitlines()):
                yield token.start[0] + i, line
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


NATIVE_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def native_text(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, with their lines."""
    for match in NATIVE_TEXT.finditer(source):
        first = source.count("\n", 0, match.start()) + 1
        if not source[source.rfind("\n", 0, match.start()) + 1 :].startswith("#include"):
            for i, line in enumerate(match[0].splitlines()):
                yield first + i, line


def text_of(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file for readers, by line; of pages everything except code."""
    source = path.read_text()
    if path.suffix in {".py", ".pyi"}:
        yield from python_text(source)
    elif path.suffix == ".md":
        code = False
        for i, line in enumerate(source.splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if not code:
                yield i, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
    else:
        yield from native_text(source)


def banned_of(path: Path) -> list[Finding]:
    """Every banned word of a file."""
    return [
        Finding(path, line, f'banned word "{match[0]}": write {hint}')
        for line, text in text_of(path)
        for pattern, hint in BANNED_RE.items()
        for match in pattern.finditer(text)
    ]


def sentences(path: Path) -> list[tuple[int, str]]:
    """The sentences of a page's paragraphs and lists, without tables, headings and code."""
    found: list[tuple[int, str]] = []
    block: list[str] = []
    first = 0

    def end() -> None:
        text = re.sub(r"\s+", " ", " ".join(block))
        text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
        cut = re.split(r"(?<=[.!?:;])\s+(?=[A-Z\[*`\d(])|(?<=[.!?])[)*_]*\s+", text)
        found.extend((first, s) for s in cut if s.strip())
        block.clear()

    code = False
    for i, line in enumerate(path.read_text().splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            code = not code
        item = re.match(r"(?:[*+-]|\d+\.)\s+", bare)
        if code or not bare or item or bare.startswith(("```", "#", "|", "<", "!", ">")):
            end()
        if code or not bare or bare.startswith(("```", "#", "|", "<", "!", ">")):
            continue
        if not block:
            first = i
        block.append(bare[item.end() :] if item else bare)
    end()
    return found


def long_of(path: Path) -> list[Finding]:
    """Sentences of a page that are too long, alone or in the median."""
    counts = [(line, len(text.split()), text) for line, text in sentences(path)]
    found = [Finding(path, at, f"{n} words: {text[:90]}") for at, n, text in counts if n > LONGEST]
    median = statistics.median([n for _, n, _ in counts] or [0])
    return found + [Finding(path, 1, f"{median} words in the median")] * (median > MEDIAN)


def subjects() -> list[str]:
    """What is wrong with the subjects of the commits since FIRST."""
    git = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{FIRST}..HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    wrong = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():  # a copy without history
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT:
            wrong.append(f"commit {commit}: {len(subject)} characters in the subject: {subject}")
        if not re.match(r"[a-z0-9_/., ]+: [a-z]", subject):
            wrong.append(f"commit {commit}: no `area: imperative` in the subject: {subject}")
    return wrong


def main() -> None:
    """Checks all files, or those that are named."""
    paths = [Path(p).resolve() for p in sys.argv[1:]]
    wrong = [] if paths else subjects()
    for path in paths or [*pages(), *sources()]:
        found = banned_of(path) + (long_of(path) if path.suffix == ".md" else [])
        where = path.relative_to(ROOT)
        wrong += [f"{where}:{finding.line}: {finding.what}" for finding in sorted(found)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
