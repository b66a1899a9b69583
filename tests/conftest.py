"""Settings for all tests.

The settings are for the processes of `pytest -n auto` (as in make test), for tests that
are coroutines, and for the examples of property-based tests.
"""

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import uvloop

from protocol.settings.machine import available_cores

_MAX_PROCESSES = 4  # each process starts its own servers
# Memory of one process: a dozen servers at most, each with torch.
_PROCESS_BYTES = 4 << 30
_E2E_FOLDER = "tests/e2e/"
# In the order of file names, the second half of the tests of _E2E_FOLDER begins here.
# Both halves take about equally long.
_SECOND_E2E_PART = "tests/e2e/test_g"
# This limit is shorter than pytest's timeout, so that a test that hangs can still end
# the servers and tasks that it has started.
_COROUTINE_TIMEOUT_S = 240.0

# A shell starts background jobs with SIGINT ignored, and child processes inherit this.
# Tests that send SIGINT to a program, like Ctrl-C, need the default handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    # OpenMP threads that wait by spinning would take the cores from the other
    # processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis examples have no time limit, because other processes use the same cores.
# `make test` always draws the same examples for a commit, so its result depends only on
# the commit. `make test-all` draws new examples each time, and three times as many
# (tests/rigs/examples.py).
_untimed = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("exploring", **_untimed, print_blob=True)
hypothesis.settings.register_profile(
    "repeatable", **_untimed, derandomize=True, max_examples=34
)
hypothesis.settings.load_profile("repeatable")


# These hooks are optional, because GPU machines run some tests without pytest-xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes: 1.5 per core, or fewer if memory is scarce.

    There are more processes than cores, because a process mostly waits for the servers
    that it has started.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = available_cores()
    processes = min(cores + cores // 2, _MAX_PROCESSES, memory_bytes // _PROCESS_BYTES)
    return max(1, processes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process one file at a time.

    The files of tests/e2e go to two processes, so that their shared clusters start only
    twice.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            if not scope.startswith(_E2E_FOLDER):
                return scope
            return _E2E_FOLDER if scope < _SECOND_E2E_PART else _SECOND_E2E_PART

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(session: pytest.Session) -> Iterator[None]:
    """Report a wrong -m or -k as a usage error. pytest-xdist would report an internal
    error.
    """
    try:
        yield
    except pytest.UsageError as error:
        session.shouldfail = str(error)
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on uvloop, the event loop of the servers."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, _COROUTINE_TIMEOUT_S))
    return True
