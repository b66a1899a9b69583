"""The decode server's HTTP side: which references to remote KV are believed.

A reference is used only if the cluster secret signed it and it belongs to this very prompt and
this way of sampling; everything else about it (lease, peer, bytes) the engine finds out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from decode_server.failure import FailurePolicy
from engine.http_hooks import ServerHooks
from protocol import kv_params
from protocol.errors import KVParamsRejected
from protocol.kv_params import KVTransferParams
from protocol.messages import (
    EngineInput,
    ReleaseRemote,
    SamplingParams,
)
from protocol.openai import GenerationRequest


@dataclasses.dataclass(frozen=True)
class DecodeHooks(ServerHooks):
    """Verifies kv_transfer_params; see FailurePolicy for what a bad reference leads to.

    Args:
        secret: the cluster secret.
        policy: whether an unusable reference means recompute or an error.
    """

    secret: bytes
    policy: FailurePolicy
    role: str = "decode"

    def prepare(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        stop_token_ids: Sequence[int] = (),
    ) -> Sequence[Mapping[str, Any]]:
        offered = request.kv_transfer_params
        if kv_params.is_absent(offered):
            return [{} for _ in prompts]
        params = kv_params.parse_list(offered, len(prompts))  # malformed is an error in any case
        lent = kv_params.sender_releases(offered)
        return [
            self._prepare_one(one, lent, prompt, request, sampling, stop_token_ids)
            for one, prompt in zip(params, prompts, strict=True)
        ]

    def _prepare_one(
        self,
        params: KVTransferParams,
        lent: bool,
        prompt: list[int],
        request: GenerationRequest,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
    ) -> Mapping[str, Any]:
        remote = None
        try:
            params.verify(self.secret)
            remote = kv_params.to_remote_prefill(params, sender_releases=lent)
            _check_belongs(params, prompt, request, sampling, stop_token_ids)
        except KVParamsRejected as error:
            if self.policy.recomputes(error):
                return {"kv_rejected": error.message, "kv_unused": remote}
            raise
        return {
            "remote": remote,
            "sampling": msgspec.structs.replace(sampling, seed=params.seed),
        }

    def tokenized(self, kv_transfer_params: object) -> tuple[str, list[int]] | None:
        offered = kv_transfer_params
        if not isinstance(offered, dict) or offered.get("text_digest") is None:
            return None  # as of every prompt that came as ids: the rest needs no look
        for params in kv_params.signed(offered, self.secret):
            return params.tokenized()
        return None  # `prepare` tells what is wrong with it

    def refused(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """A refused request's KV goes home now, not when its lease expires."""
        ours = kv_params.signed(kv_transfer_params, self.secret)
        return [ReleaseRemote(kv_params.to_remote_prefill(params)) for params in ours]


def _check_belongs(
    params: KVTransferParams,
    prompt: list[int],
    request: GenerationRequest,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
) -> None:
    """Raises KVParamsRejected when the KV or the first token is of another request."""
    if params.remote_num_tokens != len(prompt):
        _reject("remote_num_tokens", f"is {params.remote_num_tokens}, the prompt has {len(prompt)}")
    if params.prompt_digest != kv_params.prompt_digest(prompt):
        _reject("prompt_digest", "is of another prompt")
    if params.sampling_digest != kv_params.sampling_digest(sampling, stop_token_ids):
        _reject("sampling_digest", "is of other sampling parameters")
    if request.seed is not None and request.seed != params.seed:
        _reject("seed", f"is {params.seed}, the request's is {request.seed}")
    wanted = sampling.num_logprobs
    if wanted is not None and any(_lacks_logprobs(t.logprobs, wanted) for t in params.first_tokens):
        _reject("first_tokens", f"lack the {wanted} logprobs that the request asks for")


def _lacks_logprobs(logprobs: Any, wanted: int) -> bool:
    return logprobs is None or len(logprobs.top_ids) < wanted


def _reject(field: str, problem: str) -> None:
    name = f"kv_transfer_params.{field}"
    raise KVParamsRejected(f"{name} {problem}: prefill this request anew", param=name)
