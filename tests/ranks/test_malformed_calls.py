"""Malformed calls of everything in docs/reference, on one rank and on two.

tests/support/malformed.py makes them. The names are read from the reference, with the methods of
its classes; a name without a valid call is in LEFT, with the reason.
"""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_ranks import on_ranks
from paths import ROOT

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

pytest.importorskip("torch")

from malformed import failures, function_of
from valid_calls import ALONE, KERNELS, VALID, x
from valid_process_calls import FILES, PROCESS
from valid_training import METHODS, METHODS_ALONE, STATES, TRAINING

# Names of the reference without a valid call, and why.
LEFT = {
    "results, which programs do not make": "Group launch.Launcher "
    "elastic.ShrinkResult elastic.Microbatch",
    "tuples, which the functions that take them check": "kernels.GroupBatch kernels.PacketBatch "
    "kernels.GroupPackets",
    "not validated, as the page says": "reference.Step reference.Update",
    "pass all arguments on: to the user's module, to print() and to torch's module": "print0 "
    "DataParallel.forward DataParallel.state_dict DataParallel.load_state_dict",
    "made by pycomm; another field is a TypeError, as of Python's errors": "errors.Error "
    "errors.InvalidArgument errors.Unsupported errors.Mismatch errors.Timeout errors.PeerLost "
    "errors.GroupBroken errors.InternalError",
}


def names_of_the_reference() -> Iterator[str]:
    """Functions and classes, and the methods of the classes; without those without parameters."""
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        pattern = r"auto(?:function|class):: pycomm\.([\w.]+)(?:\(\))?\n((?:   :.*\n)*)"
        for name, options in re.findall(pattern, page.read_text()):
            found = function_of(name)
            without = found.__init__ is object.__init__ and found.__new__ is object.__new__
            if not without and inspect.signature(found).parameters:
                yield name
            members = re.search(r":members:(.*)", options)
            if members is None:
                continue
            known = dir(found) if "inherited-members" in options else vars(found)
            listed = [one.strip() for one in members[1].split(",") if one.strip()]
            for member in listed or [one for one in known if not one.startswith("_")]:
                method = inspect.getattr_static(found, member, None)
                is_class_method = isinstance(method, classmethod)
                if inspect.isfunction(method) or is_class_method:
                    parameters = inspect.signature(getattr(found, member)).parameters
                    if len(parameters) > (not is_class_method):
                        yield f"{name}.{member}"


def test_every_name_of_the_reference_is_called_or_left() -> None:
    tables = {
        *VALID,
        *ALONE,
        *KERNELS,
        *TRAINING,
        *METHODS,
        *METHODS_ALONE,
        *STATES,
        *PROCESS,
        *FILES,
    }
    called = {name.partition(" ")[0] for name in tables}
    left = set(" ".join(LEFT.values()).split())
    assert not called & left
    assert set(names_of_the_reference()) == called | left


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "calls",
    [{**VALID, **ALONE}, KERNELS, TRAINING, {**METHODS, **METHODS_ALONE}, FILES],
    ids=["collectives", "kernels", "training", "methods", "files"],
)
def test_malformed_calls_of_one_rank(
    calls: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a text is the name of a file
    assert run_ranks(1, failures, calls) == [[]]
    pycomm.set_num_threads(len(os.sched_getaffinity(0)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "calls", [VALID, TRAINING, METHODS, FILES], ids=["collectives", "training", "methods", "files"]
)
def test_malformed_calls_of_two_ranks(
    calls: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, failures, calls) == [[], []]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_malformed_states(ranks: int) -> None:
    assert run_ranks(ranks, failures, STATES) == [[]] * ranks


@pytest.mark.filterwarnings("ignore")
def test_malformed_calls_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert failures(None, PROCESS) == []


def test_the_check_of_processes() -> None:
    with pytest.raises(errors.InvalidArgument, match="processes"):
        run_ranks(1, len, processes="x")  # True would start a process


@on_ranks(1)
def test_all_gather_with_the_arguments_of_torch_names_its_own(group: Group) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"got list.* out = pycomm.all_gather\(x\)"):
        pycomm.all_gather([x(), x()], x(), group=group)
