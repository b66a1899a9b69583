"""A decode server verifies references to remote KV."""

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http.legs.either_leg import EitherLeg
from protocol import kv_params
from protocol.errors import KVParamsRejected
from protocol.kv_offers import sealed
from protocol.messages import (
    AddRequest,
    EngineReady,
    FirstToken,
    KVHint,
    ReleaseRemote,
    SamplingParams,
    TokenLogprobs,
)
from protocol.openai.completions import MAX_PROMPTS, CompletionRequest
from protocol.openai.requests import validate
from tests.rigs.offers import offer

_SECRET = b"the cluster's secret"
_PROMPT = [5, 6, 7, 8, 9]
_READY = EngineReady(
    num_blocks=20, block_size=16, max_model_len=512, max_num_seqs=64, vocab_size=50
)


def _signed_params(**changes: Any) -> dict[str, Any]:
    return offer(_SECRET, _PROMPT, SamplingParams(temperature=0.5, seed=7), **changes)


def _prepare(
    offered: object,
    policy: str = "recompute",
    uses_machine_secret: bool = False,
    **members: Any,
) -> AddRequest:
    body = {
        "model": "m",
        "prompt": _PROMPT,
        "temperature": 0.5,
        "kv_transfer_params": offered,
    }
    request = validate(CompletionRequest, {**body, **members})
    add = AddRequest(
        request_id="r", token_ids=_PROMPT,
        sampling=request.sampling_params(99 if request.seed is None else request.seed),
        max_tokens=request.token_limit if request.token_limit is not None else 9,
        stop_token_ids=[2, *request.stop_token_ids], num_choices=request.num_candidates,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )  # fmt: skip
    (prepared,) = EitherLeg(
        _SECRET, policy, uses_machine_secret=uses_machine_secret
    ).prepare(request, [add], _READY)
    return prepared


def test_signed_reference_of_this_request_is_used_with_its_seed():
    prepared = _prepare(_signed_params())
    assert prepared.remote and prepared.remote.block_ids == [3, 4]
    assert prepared.remote.first_tokens == [FirstToken(42)]
    assert prepared.sampling.seed == 7, (
        "the request did not take the seed of the prefill leg"
    )
    assert prepared.kv_rejected is None


def test_reference_with_a_negative_seed_is_used_with_it():
    drawn = SamplingParams(temperature=0.5, seed=-(2**63))
    prepared = _prepare(offer(_SECRET, _PROMPT, drawn, seed=-(2**63)), seed=-(2**63))
    assert prepared.remote and prepared.remote.first_tokens == [FirstToken(42)]
    assert prepared.sampling.seed == -(2**63)
    other = _prepare(offer(_SECRET, _PROMPT, drawn, seed=-(2**63)), seed=2**63 - 1)
    assert other.remote and not other.remote.first_tokens, (
        "used a token that was drawn with a different seed"
    )


_ENDS_BANNED = SamplingParams(temperature=0.5, seed=7, min_tokens=3)
_BANNED = {"sampling_digest": kv_params.sampling_digest(_ENDS_BANNED, [2])}
_LOGPROBS = [FirstToken(42, TokenLogprobs(-0.5, [42], [-0.5]))]
_DIFFERENT_SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another temperature": ({}, {"temperature": 0.6}),
    "another seed": ({}, {"seed": 8}),
    "greedy here": ({}, {"temperature": 0}),
    "its ends banned here": ({}, {"min_tokens": 1}),
    "other ends banned here": (_BANNED, {"min_tokens": 1, "stop_token_ids": [9]}),
    "a grammar here": ({}, {"guided_regex": "a*"}),
    "no logprobs": ({}, {"logprobs": 0}),
    "too few logprobs": ({"first_tokens": _LOGPROBS}, {"logprobs": 2}),
    "more choices here": ({}, {"n": 2}),
    "fewer choices here": ({"first_tokens": [FirstToken(42), FirstToken(43)]}, {}),
    "no token wanted": ({}, {"max_tokens": 0}),
}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", _DIFFERENT_SAMPLING)
def test_first_token_drawn_with_other_parameters_is_redrawn_with_the_pulled_kv(
    name, policy
):
    fields, members = _DIFFERENT_SAMPLING[name]
    prepared = _prepare(_signed_params(**fields), policy, **members)
    assert prepared.remote and prepared.remote.block_ids == [3, 4]
    assert prepared.remote.first_tokens == [] and prepared.kv_rejected is None
    assert prepared.sampling.seed == members.get("seed", 99), (
        "the request did not keep its own seed"
    )


def test_first_token_drawn_with_the_same_banned_end_tokens_is_used():
    remote = _prepare(_signed_params(**_BANNED), min_tokens=1).remote
    assert remote and remote.first_tokens == [FirstToken(42)]


@pytest.mark.parametrize(
    "members",
    [
        {"presence_penalty": 1},
        {"logit_bias": {"5": 0}},
        {"top_k": -1},
        {"max_tokens": 1},
    ],
)
def test_min_tokens_of_2_keeps_the_first_token(members):
    remote = _prepare(_signed_params(), **members).remote
    assert remote and remote.first_tokens == [FirstToken(42)]


@pytest.mark.parametrize("absent", [None, {}, {"do_remote_prefill": False}])
def test_request_without_a_reference_is_served_locally(absent):
    prepared = _prepare(absent)
    assert prepared.remote is None and prepared.kv_rejected is None


def _forge(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    params = _signed_params()
    change(params)
    return params


_LOGPROBS_OF_UNKNOWN_TOKEN = [FirstToken(42, TokenLogprobs(-0.5, [50], [-0.5]))]
_ROWS = [None, *[TokenLogprobs(-0.5, [1], [-0.5])] * 4]
_WRONG_REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another host": (_forge(lambda p: p.update(remote_host="10.9.9.9")), {}),
    "another block": (_forge(lambda p: p["remote_block_ids"].__setitem__(0, 1)), {}),
    "another first token": (_forge(lambda p: p["first_tokens"][0].update(id=1)), {}),
    "another secret": (_forge(lambda p: p.update(signature="00" * 32)), {}),
    "another prompt": (
        _signed_params(prompt_digest=kv_params.prompt_digest([5, 6, 7, 8, 1])),
        {},
    ),
    "another salt": (
        _signed_params(prompt_digest=kv_params.prompt_digest([5, 6, 7, 8, 9], b"a")),
        {},
    ),
    "another length": (_signed_params(remote_num_tokens=6), {}),
    "a token that this model lacks": (
        _signed_params(first_tokens=[FirstToken(50)]),
        {},
    ),
    "another that this model lacks": (
        _signed_params(first_tokens=_LOGPROBS_OF_UNKNOWN_TOKEN),
        {"logprobs": 1},
    ),
    "no logprobs of the prompt": (_signed_params(), {"prompt_logprobs": 0}),
    "too few logprobs of the prompt": (
        _signed_params(prompt_logprobs=_ROWS),
        {"prompt_logprobs": 2},
    ),
}


@pytest.mark.parametrize("name", _WRONG_REFERENCES)
def test_wrong_reference_is_recomputed_or_refused(name):
    offered, members = _WRONG_REFERENCES[name]
    prepared = _prepare(offered, **members)
    assert prepared.remote is None and prepared.kv_rejected
    # A rejected reference is released at its server if the reference is signed. A
    # forged reference may name any server, so it is not released.
    is_forged = kv_params.parse(offered) not in list(
        kv_params.verified_params(offered, _SECRET)
    )
    assert (prepared.kv_unused is None) == is_forged
    with pytest.raises(KVParamsRejected) as rejection:
        _prepare(offered, policy="fail", **members)
    param = rejection.value.param
    assert param and param.startswith("kv_transfer_params")


def test_authentic_references_of_a_refused_request_are_released():
    hooks = EitherLeg(_SECRET, "recompute")
    forged = _forge(lambda p: p.update(remote_host="10.9.9.9"))
    (message,) = hooks.release_messages([_signed_params(), forged, "nonsense"])
    assert isinstance(message, ReleaseRemote) and message.remote.block_ids == [3, 4]
    assert list(hooks.release_messages(None)) == []
    # Each check takes time, so the number is limited.
    too_many = [_signed_params()] * (MAX_PROMPTS + 1)
    assert len(hooks.release_messages(too_many)) == MAX_PROMPTS


@pytest.mark.parametrize("value", [True, False, None, "yes"])
def test_sender_may_keep_the_release_of_a_lease(value):
    lent = {**_signed_params(), "sender_releases": value}
    remote = _prepare(lent).remote
    assert remote and remote.sender_releases is (value is True)
    assert kv_params.sender_releases([lent, lent]) is (value is True)
    assert not kv_params.sender_releases([lent, _signed_params()])
    assert not any(
        kv_params.sender_releases(other) for other in (None, [], {}, "x", [None])
    )


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_malformed_reference_is_a_400_under_any_policy(policy):
    with pytest.raises(KVParamsRejected, match="remote_port"):
        _prepare(_forge(lambda p: p.update(remote_port="http")), policy=policy)
    with pytest.raises(KVParamsRejected, match="2 objects for 1 prompt"):
        _prepare([_signed_params(), _signed_params()], policy=policy)


def test_reference_too_deep_to_print_is_rejected_without_a_server_error():
    deep: list[Any] = []
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    offered = {**_signed_params(), "remote_engine_id": deep}
    with pytest.raises(
        KVParamsRejected, match=r"remote_engine_id must be `str`, got \[\[\["
    ):
        _prepare(offered)
    assert list(EitherLeg(_SECRET, "recompute").release_messages(offered)) == []


@pytest.mark.parametrize("uses_machine_secret", [False, True])
def test_server_without_a_secret_reports_it(uses_machine_secret):
    offered = offer(b"another machine's secret", _PROMPT, SamplingParams())
    reported = (
        _prepare(offered, uses_machine_secret=uses_machine_secret).kv_rejected or ""
    )
    assert "give all servers the same BATON_CLUSTER_SECRET" in reported
    assert reported.endswith("its own machine's file") == uses_machine_secret


_HINT = KVHint(
    host="10.0.0.9", port=5600, engine_id="d-1", incarnation="i", num_tokens=900
)


def _signed_hint(age_s: int = 0) -> dict[str, Any]:
    return sealed(replace(_HINT, issued_s=int(time.time()) - age_s), _SECRET)


@pytest.mark.parametrize(
    "leg", [{}, {"do_remote_decode": True}], ids=["alone", "prefill"]
)
def test_signed_hint_is_passed_on_with_either_leg(leg):
    prepared = _prepare({**leg, "hint": _signed_hint()}, max_tokens=1)
    assert (prepared.hint, prepared.retain_kv, prepared.remote) == (
        _HINT,
        bool(leg),
        None,
    )


@pytest.mark.parametrize(
    ("age_s", "changes", "reported"),
    [
        (0, {"port": 1}, r"hint\.signature does not match"),
        (0, {"host": "\ud800"}, r"hint\.signature does not match"),
        (0, {"signature": "00" * 32}, r"hint\.signature does not match"),
        (90, {}, r"hint\.issued_s is 9\d s old .* a copy of an old one, or the clock"),
        (-90, {}, r"hint\.issued_s is -\d\d s old"),
    ],
)
def test_unsigned_or_old_hint_is_refused(age_s, changes, reported):
    forged = {**_signed_hint(age_s), **changes}
    prepared = _prepare({"hint": forged}, max_tokens=1)
    assert prepared.hint is None and re.search(reported, prepared.kv_rejected or "")
    with pytest.raises(KVParamsRejected, match=reported):
        _prepare({"hint": forged}, "fail", max_tokens=1)
    with pytest.raises(KVParamsRejected, match=r"hint\.port must be .*got \"x\""):
        _prepare({"hint": {**forged, "port": "x"}}, max_tokens=1)
