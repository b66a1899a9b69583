"""When an engine counts as computing."""

from kvcache.step_watch import StepWatch


def test_an_engine_is_busy_while_a_step_runs_and_between_two_decode_steps():
    now, ended = 100.0, False
    stepping = StepWatch(lambda: now)
    assert not stepping.busy  # it never stepped
    stepping.launching()
    assert stepping.busy
    stepping.launched(lambda: ended)
    now += 10.0
    assert stepping.busy  # however long the step takes
    ended = True
    assert not stepping.busy
    stepping.launching()
    now += 0.01
    assert stepping.busy  # the next one is likely to follow
    now += 0.02
    assert not stepping.busy
