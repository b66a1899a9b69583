"""Which references to remote KV a decode server believes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from decode_server.failure import FailurePolicy
from decode_server.server import DecodeHooks
from protocol import kv_params
from protocol.errors import KVParamsRejected
from protocol.messages import FirstToken, ReleaseRemote, SamplingParams
from protocol.openai import GenerationRequest, parse_completion

_SECRET = b"the cluster's secret"
_PROMPT = [5, 6, 7, 8, 9]


def _params(**changes: Any) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0.5, seed=7)
    fields: dict[str, Any] = {
        "remote_engine_id": "prefill-1",
        "remote_request_id": "r",
        "remote_block_ids": [3, 4],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "lease_id": "ab" * 16,
        "lease_s": 30.0,
        "incarnation": "cd" * 8,
        "remote_num_tokens": 5,
        "remote_block_size": 4,
        "remote_cached_tokens": 0,
        "prompt_digest": kv_params.prompt_digest(_PROMPT),
        "sampling_digest": kv_params.sampling_digest(sampling),
        "seed": 7,
        "first_tokens": [FirstToken(42)],
    }
    return kv_params.build(_SECRET, **{**fields, **changes}).to_json()


def _request(offered: object, **members: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": _PROMPT, "temperature": 0.5, "kv_transfer_params": offered}
    return parse_completion({**body, **members})


def _prepare(offered: object, policy: str = "recompute", **members: Any) -> dict[str, Any]:
    request = _request(offered, **members)
    seed = 99 if request.seed is None else request.seed
    hooks = DecodeHooks(_SECRET, FailurePolicy(policy))
    (extra,) = hooks.prepare(request, [_PROMPT], request.sampling(seed))
    return dict(extra)


def test_a_signed_reference_of_this_request_is_used_with_its_seed() -> None:
    extra = _prepare(_params())
    assert extra["remote"].block_ids == [3, 4]
    assert extra["remote"].first_tokens == [FirstToken(42)]
    assert extra["sampling"].seed == 7, "without a seed of its own the request takes the prefill's"
    assert "kv_rejected" not in extra


@pytest.mark.parametrize("absent", [None, {}, {"do_remote_prefill": False}])
def test_no_reference_means_a_request_of_ones_own(absent: object) -> None:
    assert _prepare(absent) == {}


def _forge(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    params = _params()
    change(params)
    return params


_WRONG = {
    "another host": (_forge(lambda p: p.update(remote_host="10.9.9.9")), {}),
    "another block": (_forge(lambda p: p["remote_block_ids"].__setitem__(0, 1)), {}),
    "another first token": (_forge(lambda p: p["first_tokens"][0].update(id=1)), {}),
    "another secret": (_forge(lambda p: p.update(signature="00" * 32)), {}),
    "another prompt": (_params(prompt_digest=kv_params.prompt_digest([5, 6, 7, 8, 1])), {}),
    "another length": (_params(remote_num_tokens=6), {}),
    "another temperature": (_params(), {"temperature": 0.6}),
    "another seed": (_params(), {"seed": 8}),
    "too few logprobs": (_params(), {"logprobs": 2}),
}


def _signed(offered: object) -> list[kv_params.KVTransferParams]:
    return list(kv_params.signed(offered, _SECRET))


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_reference_is_computed_here_or_refused(name: str) -> None:
    offered, members = _WRONG[name]
    extra = _prepare(offered, **members)
    assert "remote" not in extra and extra["kv_rejected"]
    # Who signed it can be told that it is of no use; a forged one names nobody to be told.
    is_forged = isinstance(offered, dict) and kv_params.parse(offered) not in _signed(offered)
    assert (extra["kv_unused"] is None) == is_forged
    with pytest.raises(KVParamsRejected) as refused:
        _prepare(offered, policy="fail", **members)
    assert refused.value.param and refused.value.param.startswith("kv_transfer_params")


def test_the_authentic_references_of_a_refused_request_are_released() -> None:
    hooks = DecodeHooks(_SECRET, FailurePolicy("recompute"))
    forged = _forge(lambda p: p.update(remote_host="10.9.9.9"))
    (message,) = hooks.refused([_params(), forged, "nonsense"])
    assert isinstance(message, ReleaseRemote) and message.remote.block_ids == [3, 4]
    assert list(hooks.refused(None)) == []


@pytest.mark.parametrize("said", [True, False, None, "yes"])
def test_a_lease_is_the_senders_to_end_where_they_say_so(said: object) -> None:
    lent = {**_params(), "sender_releases": said}
    assert _prepare(lent)["remote"].sender_releases is (said is True)
    assert kv_params.sender_releases([lent, lent]) is (said is True)
    assert not kv_params.sender_releases([lent, _params()])
    assert not any(kv_params.sender_releases(other) for other in (None, [], {}, "x", [None]))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_malformed_reference_is_a_400_under_any_policy(policy: str) -> None:
    with pytest.raises(KVParamsRejected, match="remote_port"):
        _prepare(_forge(lambda p: p.update(remote_port="http")), policy=policy)
    with pytest.raises(KVParamsRejected, match="2 objects for 1 prompt"):
        _prepare([_params(), _params()], policy=policy)


def test_a_reference_too_deep_to_be_shown_is_rejected_and_no_failure_of_the_server() -> None:
    deep: list[Any] = []
    for _ in range(2 * sys.getrecursionlimit()):
        deep = [deep]
    offered = {**_params(), "remote_engine_id": deep}
    with pytest.raises(KVParamsRejected, match=r"remote_engine_id must be text .*, got \[\[\["):
        _prepare(offered)
    assert list(DecodeHooks(_SECRET, FailurePolicy("recompute")).refused(offered)) == []
