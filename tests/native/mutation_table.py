"""Tables of changes to sources, each with the test that must fail for it.

A section [KEY: TEST] names what detects its rows. A row is `NAME FILE: ANCHOR ... OLD => NEW`: in
FILE the first OLD after ANCHOR becomes NEW. Without ANCHOR, OLD is found once; without NEW, it is
removed. ANCHOR is found once.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One row, with the key and the test of its section."""

    name: str
    file: str
    anchor: str
    old: str
    new: str
    key: str
    test: str

    def of(self, text: str) -> str:
        """The text of `file`, changed."""
        mark = self.anchor or self.old
        assert text.count(mark) == 1, f"{self.name}: found {text.count(mark)} times in {self.file}"
        at = text.index(self.old, text.index(mark))
        return text[:at] + self.new + text[at + len(self.old) :]


def read(table: Path) -> list[Mutation]:
    """The rows of a table."""
    rows, key, test = [], "", ""
    for line in table.read_text().splitlines():
        if line.startswith("["):
            key, _, test = line.strip("[]").partition(": ")
        elif line and not line.startswith("#"):
            head, _, edit = line.partition(": ")
            name, file = head.split()
            old, _, new = edit.partition(" =>")
            anchor, _, old = old.rpartition(" ... ")
            rows.append(Mutation(name, file, anchor, old, new.strip(), key, test))
    return rows
