"""StepWatch reports whether an engine is busy computing."""

from kvcache.step_watch import StepWatch


def test_engine_is_busy_during_a_step_and_between_two_decode_steps():
    now = 100.0
    has_ended = False
    watch = StepWatch(lambda: now)
    assert not watch.is_busy, "busy before the first step"
    watch.launching()
    assert watch.is_busy
    watch.launched(lambda: has_ended)
    now += 10.0
    assert watch.is_busy, "not busy during a step"
    has_ended = True
    assert not watch.is_busy
    watch.launching()
    now += 0.01
    assert watch.is_busy, "not busy right before the next decode step"
    now += 0.02
    assert not watch.is_busy
