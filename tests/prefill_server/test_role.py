import pytest

from prefill_server.connector import PrefillConnector
from protocol import kv_params
from protocol.messages import AbortRequest
from tests.rigs.engine_pair import Pair
from tests.rigs.shadow import add

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def _digests(pair: Pair) -> dict[str, str]:
    assert isinstance(pair.p.core.connector, PrefillConnector)
    return {of.request_id: digest for of, digest in pair.p.core.connector._digests.items()}


def test_a_prompt_is_digested_while_the_device_computes_it() -> None:
    pair = Pair(depth=1)
    try:
        core = pair.p.core
        core.round([add("a", PROMPT, 1, retain_kv=True), add("plain", PROMPT[:3], 4)])
        core.connector.poll()
        assert _digests(pair) == {"a": kv_params.prompt_digest(PROMPT)}
        pair.until(lambda: bool(pair.p.out.terminals("a")))
        told = pair.p.out.terminals("a")[0].kv_transfer_params
        assert told is not None
        assert told["prompt_digest"] == kv_params.prompt_digest(PROMPT)
        assert kv_params.parse(pair.prefill([7, 7]))
        assert not _digests(pair)
    finally:
        pair.close()


def test_digests_of_prompts_that_are_given_up_are_not_kept() -> None:
    pair = Pair(depth=1)
    try:
        core = pair.p.core
        core.round([add("a", PROMPT, 1, retain_kv=True)])
        core.round([add("b", PROMPT, 1, retain_kv=True), AbortRequest("a"), AbortRequest("b")])
        pair.until(lambda: core.is_idle)
        core.round([])
        assert not _digests(pair)
    finally:
        pair.close()


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
