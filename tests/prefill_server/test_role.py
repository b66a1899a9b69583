import pytest

from protocol import kv_params
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import add

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@pytest.mark.parametrize("depth", [0, 1])
def test_kv_of_which_no_answer_can_tell_goes_home_at_once(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise ValueError("too large to be told")

    pair = Pair(depth=depth)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(kv_params, "build", cannot)
            pair.p.core.round([add("a", PROMPT, 1, retain_kv=True, num_choices=2)])
            pair.until(lambda: pair.p.core.is_idle)
        (end,) = pair.p.out.terminals("a")
        assert end.error is not None and end.error.code == "internal_error"
        pair.until(pair.p.blocks_home)  # no lease has to expire: P's clock stands still
        assert pair.answer(pair.ask(PROMPT, pair.prefill(PROMPT)))
    finally:
        pair.close()
