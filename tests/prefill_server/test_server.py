"""A prefill server retains the KV of requests with do_remote_decode and returns a
reference to it.
"""

from typing import Any

import msgspec
import pytest

from engine.http.legs.either_leg import EitherLeg
from engine.http.legs.prefill_leg import PrefillLeg
from protocol.errors import InvalidRequest, KVParamsRejected, Overloaded
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineReady,
    SamplingParams,
    TokenDelta,
)
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import validate

_REQUEST = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip

_LEGS = EitherLeg(b"secret", "recompute")


def _prepare(**members: Any) -> list[bool]:
    body = {
        "model": "m",
        "prompt": [[1, 2], [3]],
        "max_tokens": 1,
        "kv_transfer_params": _REQUEST,
    }
    request = validate(CompletionRequest, {**body, **members})
    adds = _adds(2, 1, retain_kv=False)
    return [add.retain_kv for add in _LEGS.prepare(request, adds, _READY)]


def test_only_do_remote_decode_retains_the_kv_of_every_prompt():
    assert _prepare() == [True, True]
    assert _prepare(kv_transfer_params=None, max_tokens=9) == [False, False]


@pytest.mark.parametrize(
    ("is_reachable", "dcp", "fix"),
    [(False, 1, "--side-channel-host"), (True, 2, "--dcp")],
)
def test_prompt_is_refused_if_no_server_could_read_its_kv(is_reachable, dcp, fix):
    request = validate(
        CompletionRequest, {"model": "m", "prompt": [1], "kv_transfer_params": _REQUEST}
    )
    ready = msgspec.structs.replace(_READY, geometry={"dcp": dcp})
    with pytest.raises(KVParamsRejected, match=f"cannot read .*{fix}"):
        PrefillLeg(is_reachable=is_reachable).prepare(request, _adds(1), ready)


@pytest.mark.parametrize("members", [{"max_tokens": 2}, {"stream": True}])
def test_handover_of_more_than_one_token_is_refused(members):
    with pytest.raises(InvalidRequest, match="max_tokens 1 and stream false"):
        _prepare(**members)


def test_reference_together_with_do_remote_decode_is_refused():
    with pytest.raises(KVParamsRejected, match="remote_host"):
        _prepare(kv_transfer_params={**_REQUEST, "remote_host": "10.0.0.1"})


def test_one_prompt_answers_with_an_object_and_several_with_a_list():
    finals = [
        TokenDelta(request_id=r, kv_transfer_params={"lease_id": r}) for r in "ab"
    ]
    hooks = PrefillLeg()
    assert hooks.response_members(finals[:1]) == {
        "kv_transfer_params": {"lease_id": "a"}
    }
    assert hooks.response_members(finals) == {
        "kv_transfer_params": [{"lease_id": "a"}, {"lease_id": "b"}]
    }
    assert hooks.response_members([TokenDelta(request_id="c")]) == {}


def _prepare_leg(name: object) -> dict[str, Any]:
    return {"kv_transfer_params": {**_REQUEST, "transfer_id": name}}


def test_requests_are_aborted_by_their_transfer_id():
    hooks = PrefillLeg()
    for name, adds in (("a", _adds(3)), ("b", _adds(3, 4, 5)), ("a", _adds(6, 6))):
        hooks.admit(adds, _READY, **_prepare_leg(name))
    release = {"do_remote_decode": True, "transfer_id": "b"}
    assert hooks.release_messages(release) == [AbortRequest(i) for i in "012"]
    assert hooks.release_messages(release) == [], "released a second time"
    assert hooks.release_messages({**release, "transfer_id": "a"}) == [
        AbortRequest(i) for i in "001"
    ]


@pytest.mark.parametrize("name", [None, "", "x" * 129, 7, ["a"], "ordinary"])
def test_malformed_transfer_id_matches_no_transfer(name):
    hooks = PrefillLeg()
    is_named = name != "ordinary"
    hooks.admit(_adds(3, retain_kv=is_named), _READY, **_prepare_leg(name))
    assert hooks.release_messages({"transfer_id": name}) == []


def test_oldest_transfers_are_forgotten_first(monkeypatch):
    monkeypatch.setattr("engine.http.legs.prefill_leg.MAX_TRANSFERS", 2)
    hooks = PrefillLeg()
    for name in ("a", "b", "a", "a", "c"):
        hooks.admit(_adds(3), _READY, **_prepare_leg(name))
    reported = [len(hooks.release_messages({"transfer_id": name})) for name in "bac"]
    assert reported == [0, 2, 1], "not the last two transfers were remembered"


_READY = EngineReady(
    num_blocks=20, block_size=16, max_model_len=512, max_num_seqs=64, vocab_size=9
)


def _adds(*lengths: int, retain_kv: bool = True) -> list[AddRequest]:
    return [
        AddRequest(
            request_id=str(index),
            token_ids=[1] * length,
            sampling=SamplingParams(),
            max_tokens=1,
            retain_kv=retain_kv,
        )
        for index, length in enumerate(lengths)
    ]


def test_several_prompts_may_hold_half_of_the_pool_until_they_are_answered():
    hooks = PrefillLeg()
    first = hooks.admit(_adds(16, 17), _READY)  # 3 blocks
    # The second request needs 7 blocks. Both requests hold 10, half of the pool.
    second = hooks.admit(_adds(90, 1), _READY)
    with pytest.raises(Overloaded, match="2 prompts need 8 KV blocks"):
        hooks.admit(_adds(100, 1), _READY)
    first()
    second()
    hooks.admit(_adds(80, 80), _READY)
    with pytest.raises(Overloaded):
        hooks.admit(_adds(1, 1), _READY)
    # There is no limit for a single prompt, nor for prompts without retained KV.
    for adds in (_adds(320), _adds(300, 300, retain_kv=False)):
        hooks.admit(adds, _READY)()
