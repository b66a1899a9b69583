"""What holds for all tests: processes that share them (`pytest -n auto`, as in make test),
coroutines, and what property tests draw."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import uvloop

from protocol.settings.machine import available_cores

_MOST = 4  # processes: each starts servers of its own
_EACH_BYTES = 4 << 30  # of memory: torch in every server, and a dozen servers at most
_OF_CLUSTERS = "tests/e2e/"
_COROUTINE_S = (
    240.0  # pytest's own limit comes later: what a test has started ends in order
)

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    # Threads that spin for work would take the cores from the other processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example, and drawing it, may take as long as it likes: others want the processor. The same
# commit draws the same examples, so that a run says something about a commit; `make test-all` draws
# new ones, and three times as many (tests/rigs/examples.py).
_untimed = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("exploring", **_untimed, print_blob=True)
hypothesis.settings.register_profile(
    "repeatable", **_untimed, derandomize=True, max_examples=34
)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(
    optionalhook=True
)  # GPU machines run part of the tests without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = (
        available_cores()
    )  # of which a process leaves much: it waits for servers it has started
    return max(1, min(cores + cores // 2, _MOST, memory_bytes // _EACH_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time, but all that ask the session's clusters of one process, which starts them
    once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return _OF_CLUSTERS if scope.startswith(_OF_CLUSTERS) else scope

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(session: pytest.Session) -> Iterator[None]:
    """Tells of a wrong -m or -k, of which pytest-xdist's own words are an internal error."""
    try:
        yield
    except pytest.UsageError as error:
        session.shouldfail = str(error)
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, on the event loop that servers use."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, _COROUTINE_S))
    return True
