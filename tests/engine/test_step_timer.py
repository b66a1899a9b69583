"""An engine measures its step durations with the executor that then serves requests."""

import logging
from typing import Any

import pytest

from engine.core.batch import StepFailed
from engine.core.budget.prefill_budget import UNMEASURED
from engine.core.budget.step_target import StepTarget
from engine.core.budget.step_times import Load
from engine.worker.ranks import RankExecutor, RankLinks
from engine.worker.step_timer import measure_steps, warn_of_impossible_target
from tests.rigs.rank_threads import ranks

TARGET = StepTarget(0.5)


@pytest.mark.parametrize("dcp", [1, 2])
def test_all_ranks_run_the_measured_steps(dcp):
    with ranks(2, dcp=dcp) as executor:
        executor.allocate(20, 8)
        runner = executor.runners[0]
        times = measure_steps(runner, executor, TARGET)
        assert times is not None
        assert times.decode_s(1, 8) > 0
        assert times.seconds(Load(1, 8, 16)) > 0
        assert runner.memory.pool.highest_block == -1, "no request has used a block"


def test_step_that_cannot_be_launched_leaves_durations_unmeasured(caplog):
    class FailingExecutor:
        depth = 0

        def launch(self, step: Any) -> Any:
            raise StepFailed("no kernel")

    with ranks(1) as executor, caplog.at_level(logging.WARNING):
        executor.allocate(20, 8)
        assert measure_steps(executor.runners[0], FailingExecutor(), TARGET) is None
    assert "durations of steps failed: no kernel" in caplog.text


def test_target_that_no_step_meets_is_accepted_with_a_warning(caplog):
    warn_of_impossible_target(1e-5, UNMEASURED)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    shortest_s = UNMEASURED.seconds(Load(1, 1, 1))
    assert f"takes {shortest_s:.4g} s" in record.getMessage()


def test_target_that_steps_meet_causes_no_warning(caplog):
    warn_of_impossible_target(0.5, UNMEASURED)
    assert not caplog.records


def test_only_a_target_that_the_user_has_set_causes_a_warning(caplog):
    with ranks(1) as executor:
        executor.allocate(20, 8)
        runner = executor.runners[0]
        measure_steps(runner, executor, StepTarget(1e-9))
        assert "cannot be kept" not in caplog.text
        measure_steps(runner, executor, StepTarget(1e-9, is_explicit=True))
    assert "--itl-target-s 1e-09 cannot be kept" in caplog.text


def test_engine_without_a_target_measures_nothing():
    with ranks(1) as executor:
        rank_executor = RankExecutor(executor.runners[0], RankLinks(0, []))
        assert rank_executor.measure_steps(None) is None
