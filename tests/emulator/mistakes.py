"""The mistakes of mistakes.txt: by name the mutant, the case that detects it, and the message."""

from pathlib import Path

import mutation_table
import programs

UNIT = {
    "dense.cu": "dense",
    "compact.cu": "compact",
    "groups.cuh": "groups",
    "quantize.cuh": "quantize",
    "value_codes.cuh": "quantize",
    "decode.cuh": "packets",
    "search.cuh": "packets",
    "changed": "topk",  # a case
}  # else step.cu
UNIT |= {f"compact_{name}.cuh": "compact" for name in ("bits", "read", "values", "write")}

MISTAKES = {}
for _row in mutation_table.read(Path(__file__).with_suffix(".txt")):
    _kind, _case = _row.key.split()
    _unit = UNIT.get(_case, UNIT.get(_row.file, "step"))
    MISTAKES[_row.name] = (programs.Mutant(_row, _unit, _kind), _case, _row.test)
