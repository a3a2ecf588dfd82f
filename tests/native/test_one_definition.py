"""No two types of csrc have the same name: linking them would be undefined behaviour, unnoticed.

Only a link with -flto compares the types of different files. The modules of users are built
without it.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest
from finished import finished

sys.path.insert(0, str(Path(__file__).parent))
from build import FLAGS, SANITIZERS, BuildFailed, build

pytestmark = [
    pytest.mark.no_attack("compiles and runs nothing"),
    pytest.mark.timeout(1200),  # compiles the whole core
]

TYPES = ("struct Stage { int begin; };", "struct Stage { double begin, end; };")


def test_core_has_no_two_types_of_one_name() -> None:
    try:
        build("odr", ["core"])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)


def test_two_types_of_one_name_fail_to_link(tmp_path: Path) -> None:
    files = []
    for i, text in enumerate(TYPES):
        files.append(tmp_path / f"stage{i}.cpp")
        files[i].write_text(f"{text}\nint use{i}(Stage& stage) {{ return int(stage.begin); }}\n")
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    command = [*cxx, *FLAGS, *SANITIZERS["odr"], "-shared", "-o", str(tmp_path / "planted.so")]
    done = finished([*command, *map(str, files)])
    assert done.returncode != 0
    assert "violates the C++ One Definition Rule" in done.stderr
