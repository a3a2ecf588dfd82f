"""Reads machine code of GPUs: nvdisasm's text, and what it says of loads and of memory order."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"
LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*(.*?)\s*;")
LABEL = re.compile(r"\.(L_x_\d+):")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode with modifiers, operands, and whether a branch ends here."""

    opcode: str
    operands: str
    labelled: bool

    def accesses(self, opcode: str, width: str = "") -> bool:
        """Whether it is this opcode, such as "LDG", of this width in bits; "": of any."""
        parts = self.opcode.split(".")
        return parts[0] == opcode and width in ("", *parts)


@cache
def nvdisasm() -> str | None:
    """The disassembler of the package, or the toolkit's; None if there is none."""
    try:
        for file in importlib.metadata.distribution(PACKAGE).files or []:
            path = Path(str(file.locate()))
            if path.name == "nvdisasm" and os.access(path, os.X_OK):
                return str(path)
    except importlib.metadata.PackageNotFoundError:  # the toolkit may have it
        pass
    return shutil.which("nvdisasm")


def functions(cubin: Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel, by its mangled symbol."""
    done = subprocess.run(
        [str(nvdisasm()), "-c", str(cubin)], capture_output=True, text=True, check=True
    )
    found: dict[str, list[Instruction]] = {}
    labelled = False
    for line in done.stdout.splitlines():
        if symbol := re.fullmatch(r"(_Z\w+):", line):
            code = found.setdefault(symbol[1], [])
        elif LABEL.match(line):
            labelled = True
        elif match := LINE.match(line):
            code.append(Instruction(match[3], match[4], labelled))
            labelled = False
    return found


def _registers(operands: str) -> set[int]:
    """The general registers that are named; a wide operand names its first one alone."""
    return {int(number) for number in re.findall(r"\bR(\d+)\b", operands)}


def loads_in_flight(code: Iterable[Instruction], width: str = "") -> int:
    """The largest number of loads of this width that are issued before one of them is used.

    Within one stretch of code that no branch enters: a lower bound.
    """
    most = 0
    pending: list[set[int]] = []  # the registers of each load
    for one in code:
        if one.labelled:
            pending = []
        target, _, rest = one.operands.partition(",")
        load = one.accesses("LDG")
        used = _registers(rest if load else one.operands)
        if any(used & registers for registers in pending):
            pending = []
        if one.accesses("LDG", width):
            first = min(_registers(target))
            words = 4 if one.accesses("LDG", "128") else 2 if one.accesses("LDG", "64") else 1
            pending.append(set(range(first, first + words)))
            most = max(most, len(pending))
    return most


def _near(code: list[Instruction], at: int, step: int, opcode: str) -> bool:
    """Whether the opcode is among the next instructions in this direction.

    Within four: ERRBAR and waits for its result may be between them.
    """
    for i in range(1, 5):
        other = at + step * i
        if not 0 <= other < len(code) or code[other if step > 0 else other + 1].labelled:
            return False
        if code[other].opcode.startswith(opcode):
            return True
    return False


@dataclass(frozen=True)
class Order:
    """Accesses of a kernel by the order that they have in a scope."""

    release_stores: int  # behind a MEMBAR
    release_atomics: int  # behind a MEMBAR, and followed by an invalidation of the L1 cache
    acquire_loads: int  # followed by an invalidation of the L1 cache
    relaxed_stores: int
    fresh_loads: int  # past the L1 cache, without an order of other accesses


def order(code: list[Instruction], scope: str = "GPU") -> Order:
    """Counts the accesses with the scope of the GPU, or "SYS": of all GPUs and the host.

    A fence of a wider scope counts, too.
    """
    counts = dict.fromkeys(Order.__dataclass_fields__, 0)
    fences = [f"MEMBAR.{how}.{of}" for how in ("ALL", "SC") for of in {scope, "SYS"}]
    for i, one in enumerate(code):
        kind, *modifiers = one.opcode.split(".")
        if not {"STRONG", scope} <= set(modifiers):
            continue
        behind = any(_near(code, i, -1, fence) for fence in fences)
        invalidates = _near(code, i, 1, "CCTL.IVALL")
        if kind in ("ST", "STG"):
            counts["release_stores" if behind else "relaxed_stores"] += 1
        elif kind in ("ATOM", "ATOMG"):
            counts["release_atomics"] += behind and invalidates
        elif kind in ("LD", "LDG"):
            counts["acquire_loads" if invalidates else "fresh_loads"] += 1
    return Order(**counts)
