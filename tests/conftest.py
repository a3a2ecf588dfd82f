"""Rules for every test: it leaks no resources; skips are shown in a table, and in CI only a missing
GPU is a valid reason.

The timeout of every test is in pyproject.toml (pytest-timeout).
"""

import contextlib
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import warm
from attack import AttackPlugin, no_attack
from gpu_devices import start_cuda
from order import longest_first
from sample import title
from tiers import may_have, tier_of

from benchmarks.support.leak_check import leaked, resources

EXCUSE = re.compile(r"needs (a GPU|\d+ GPUs)")
_skips: dict[str, str] = {}


# Where a worker of pytest has the width of a terminal, commands under test would print for it.
os.environ.pop("COLUMNS", None)
# Ignored where the tests run in the background: the programs that they start would ignore it too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options --no-attack and --built."""
    text = "no unauthenticated clients connect to the listeners of the run: attack.py"
    parser.addoption("--no-attack", action="store_true", help=text)
    text = "all programs of the tests are built: support/programs_of_tiers.py"
    parser.addoption("--built", action="store_true", help=text)


def pytest_report_header() -> str:
    """Names the rows of long tables that this run has."""
    return title()


@pytest.fixture(params=["cpu", "emulated", "cuda"], scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device of kernel_devices.py: the tests of the kernels run on each."""
    from kernel_devices import DEVICES

    with DEVICES[request.param]() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def held_by_libraries(request: pytest.FixtureRequest) -> None:
    """Starts what libraries keep for the rest of the process: children of multiprocessing, and, if
    the test files imported torch, CUDA and what torch_first_store describes."""
    resource_tracker.ensure_running()
    warm.enable()
    if "torch" in sys.modules:
        start_cuda()
        request.getfixturevalue("torch_first_store")


@pytest.fixture(scope="session")
def torch_first_store() -> None:
    """torch's first store creates a pipe (for libuv's signals), and torch.distributed.nn keeps the
    current default group in its default arguments. For files whose tests import torch later:
    `pytestmark = pytest.mark.usefixtures("torch_first_store")`."""
    with contextlib.suppress(ImportError):  # a machine without torch
        import torch.distributed.nn.functional  # noqa: F401 - DDP imports it, with a group there
        from torch.distributed import TCPStore

        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class ResourcesBefore:
    """The resources that existed before a test, and those that may outlive it."""

    def __init__(self) -> None:
        self.held = resources()

    @contextlib.contextmanager
    def keep_new(self) -> Iterator[None]:
        """Resources created inside this context may outlive the test."""
        earlier = resources()
        yield
        now = resources()
        for kind, some in self.held.items():
            some.update(now[kind] - earlier[kind])


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_scanned(held_by_libraries: None) -> None:
    """The leak check collects garbage after many tests. A scan of all of torch's objects takes 0.2
    s, that of the objects that are newer than the test file takes a few milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def skip_attack(request: pytest.FixtureRequest) -> Iterator[None]:
    """Excludes a test that is marked `no_attack` from the attack."""
    with no_attack() if request.node.get_closest_marker("no_attack") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, skip_attack: None) -> Iterator[ResourcesBefore]:
    """Fails a test that leaks descriptors, threads, children, shared memory or files. Costs 3 ms.

    Module-level fixtures run first, so their resources count as existing. Threads of torch and of
    pycomm's kernels persist by design and are not counted.
    """
    before, failures = ResourcesBefore(), request.session.testsfailed
    yield before
    failed = request.session.testsfailed > failures  # the exception references its frames
    if not failed and (found := leaked(before.held)):
        pytest.fail(f"left behind: {found}", pytrace=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores test files that have no test of the tier."""
    tested = collection_path.name.startswith("test_")
    return True if tested and not may_have(collection_path, config.option.markexpr) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Gives each test the marker of its tier (tiers.py), by which pytest then selects, and orders
    the selected ones for xdist (order.py)."""
    for item in items:
        name = getattr(item, "originalname", item.name)
        item.add_marker(tier_of(item.path, name))
    yield
    if (worker := getattr(config, "workerinput", None)) is not None:
        order = longest_first([item.nodeid for item in items], worker["workercount"])
        items[:] = [items[i] for i in order]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Runs once for a run, not in each worker of xdist. Prints each failure immediately, since a
    long run may be killed before pytest's summary, and starts the attack."""
    if config.option.built:
        os.environ["TEST_PROGRAMS_ARE_BUILT"] = "1"  # read by tests/native/build.py
    if hasattr(config, "workerinput"):
        return
    if (terminal := config.pluginmanager.get_plugin("terminalreporter")) is not None:
        config.pluginmanager.register(FailurePrinter(terminal))
    if not (config.option.no_attack or config.option.collectonly):
        config.pluginmanager.register(AttackPlugin())


class FailurePrinter:
    """Prints the name of each failed test immediately."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            why = str(report.longrepr).strip().rsplit("\n", 1)[-1]
            self.terminal.write_line(f"\n{report.when} of {report.nodeid} failed: {why}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Records the reason of every skip, at any stage of the test."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skips[report.nodeid] = _reason(report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """The same for files that skip themselves as a whole."""
    if report.skipped:
        _skips[report.nodeid] = _reason(report.longrepr)


def _reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def _unexcused() -> list[str]:
    if os.environ.get("CI", "").lower() not in ("1", "true"):
        return []
    return [test for test, reason in _skips.items() if not EXCUSE.fullmatch(reason)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of skips above pytest's closing line."""
    if not _skips:
        return
    terminalreporter.section("skipped")
    width = max(len(test) for test in _skips)
    for test, reason in sorted(_skips.items()):
        terminalreporter.line(f"{test:{width}}  {reason}")
    for test in _unexcused():
        terminalreporter.line(f'FAILED {test}: in CI a test may be skipped only as "needs a GPU"')


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if CI met a skip without a valid reason."""
    if _unexcused() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
