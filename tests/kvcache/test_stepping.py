"""When an engine counts as computing."""

from kvcache.step_watch import StepWatch


class Engine:
    """A clock and a step."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended = False
        self.stepping = StepWatch(lambda: self.now)

    def step(self) -> None:
        self.stepping.launching()
        self.stepping.launched(lambda: self.ended)


def test_an_engine_that_never_stepped_is_idle() -> None:
    assert not Engine().stepping.busy


def test_a_step_that_runs_keeps_the_engine_busy_however_long_it_takes() -> None:
    engine = Engine()
    engine.step()
    engine.now += 10.0
    assert engine.stepping.busy
    engine.ended = True
    assert not engine.stepping.busy


def test_between_two_decode_steps_the_engine_is_busy() -> None:
    engine = Engine()
    engine.ended = True
    engine.step()
    engine.now += 0.01
    assert engine.stepping.busy
    engine.now += 0.02
    assert not engine.stepping.busy


def test_a_step_that_is_being_launched_counts() -> None:
    engine = Engine()
    engine.stepping.launching()
    assert engine.stepping.busy
