"""What holds for every test: skips are shown in a table, and in CI only a missing GPU excuses one.

The time limit of every test stands in pyproject.toml (pytest-timeout).
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

EXCUSE = "needs a GPU"
_skips: dict[str, str] = {}


@pytest.fixture(params=["cpu", "emulated", "cuda"], scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device of kernel_devices.py: the tests of the kernels run on each."""
    from kernel_devices import DEVICES

    with DEVICES[request.param]() as found:
        yield found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the reason of every skip, wherever in the test it happened."""
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
    return [test for test, reason in _skips.items() if EXCUSE not in reason]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of skips above pytest's closing line."""
    if not _skips:
        return
    terminalreporter.section("skipped")
    width = max(len(test) for test in _skips)
    for test, reason in sorted(_skips.items()):
        terminalreporter.line(f"{test:{width}}  {reason}")
    for test in _unexcused():
        terminalreporter.line(f'FAILED {test}: in CI a test may be skipped only as "{EXCUSE}"')


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run when CI met a skip that nothing excuses."""
    if _unexcused() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
