"""The decode server's HTTP side: which references to remote KV are believed.

A reference is used only if the cluster secret signed it and it belongs to this very prompt;
everything else about it (lease, peer, bytes) the engine finds out. Its first tokens are used only
if they were drawn as this request draws; otherwise the KV is pulled and they are drawn here.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from engine.http.api import ServerHooks
from protocol import kv_params
from protocol.errors import KVParamsRejected
from protocol.kv_params import FirstTokenBits, KVTransferParams
from protocol.messages import AddRequest, EngineInput, EngineReady, ReleaseRemote
from protocol.openai.sampling import GenerationRequest
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_WINDOW_S = 60.0


class RefusalAlarm:
    """Whether most references are refused, which an operator should hear of: answers stay right
    then, and cost as much as without prefill servers. Judges each minute of references at its end,
    which the first reference after it brings."""

    def __init__(self) -> None:
        self._began_s = -math.inf
        self._used = 0
        self._refused = Counter[str]()  # by the field at fault
        self._last: dict[str, str] = {}  # message by field

    def heard(self, refusal: KVParamsRejected | None, now_s: float) -> str | None:
        """Takes in a reference, refused or not. Returns what to warn of: at most once a minute."""
        warning = None
        if now_s - self._began_s >= _WINDOW_S:
            warning = self._verdict(now_s)
            self._began_s, self._used = now_s, 0
            self._refused.clear()
        if refusal is None:
            self._used += 1
        else:
            field = refusal.param or ""
            self._refused[field] += 1
            self._last[field] = refusal.message
        return warning

    def _verdict(self, now_s: float) -> str | None:
        num_refused = self._refused.total()
        if num_refused <= self._used:
            return None
        ((field, _),) = self._refused.most_common(1)
        return (
            f"prefill servers work in vain: {num_refused} of {num_refused + self._used} references "
            f"to their KV were refused in the last {now_s - self._began_s:.0f} s; "
            f"mostly: {self._last[field]}"
        )


@dataclasses.dataclass(frozen=True)
class DecodeHooks(ServerHooks):
    """Verifies kv_transfer_params.

    Args:
        secret: the cluster secret.
        policy: what an unusable reference leads to, `recompute` or `fail`.
    """

    secret: bytes
    policy: str
    alarm: RefusalAlarm = dataclasses.field(default_factory=RefusalAlarm)
    role: str = "decode"

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        offered = request.kv_transfer_params
        if kv_params.is_absent(offered):
            return adds
        try:
            references = kv_params.parse_list(offered, len(adds))
        except KVParamsRejected as error:
            self._heard(error)
            raise  # what is malformed is an error under any policy
        lent = kv_params.sender_releases(offered)
        return [
            self._with_reference(add, params, lent, request.seed, ready.vocab_size)
            for add, params in zip(adds, references, strict=True)
        ]

    def _heard(self, refusal: KVParamsRejected | None) -> None:
        if warning := self.alarm.heard(refusal, time.monotonic()):
            logger.warning("%s", warning)

    def _with_reference(
        self,
        add: AddRequest,
        params: KVTransferParams,
        lent: bool,
        seed: int | None,
        vocab_size: int,
    ) -> AddRequest:
        remote = None
        try:
            params.verify(self.secret)
            remote = kv_params.to_remote_prefill(params, sender_releases=lent)
            _check_belongs(params, add, vocab_size)
        except KVParamsRejected as error:
            self._heard(error)
            if self.policy == "recompute":
                return replace(add, kv_rejected=error.message, kv_unused=remote)
            raise
        self._heard(None)
        if not _are_first_tokens_of(params, add, seed):
            return replace(add, remote=replace(remote, first_tokens=[]))
        return replace(add, remote=remote, sampling=replace(add.sampling, seed=int(params.seed)))

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


def _check_belongs(params: KVTransferParams, add: AddRequest, vocab_size: int) -> None:
    """Raises KVParamsRejected where the KV is another prompt's or another model's, or what only a
    prefill finds out about this one is missing."""
    num_tokens = len(add.token_ids)
    if params.remote_num_tokens != num_tokens:
        _reject("remote_num_tokens", f"is {params.remote_num_tokens}, the prompt has {num_tokens}")
    if params.prompt_digest != kv_params.prompt_digest(add.token_ids):
        _reject("prompt_digest", "is of another prompt")
    wanted, rows = add.num_prompt_logprobs, params.prompt_logprobs
    if wanted is not None and (rows is None or any(r and len(r.top_ids) < wanted for r in rows)):
        _reject("prompt_logprobs", f"lacks the {wanted} of each token that the request asks for")
    told = [row for row in (*(t.logprobs for t in params.first_tokens), *(rows or ())) if row]
    ids = [token.id for token in params.first_tokens]
    largest = max(*ids, *(max(row.top_ids, default=0) for row in told), 0)
    if largest >= vocab_size:
        problem = f"have the id {largest} and this model {vocab_size} ids"
        _reject("first_tokens", problem, "serve the same model on both servers")


def _are_first_tokens_of(params: KVTransferParams, add: AddRequest, seed: int | None) -> bool:
    """Whether this request would draw the same first tokens here, and they tell all that it asks.

    Args:
        seed: the client's own, if any.
    """
    sampling, wanted = add.sampling, add.sampling.num_logprobs
    return (
        add.max_tokens > 0
        and len(params.first_tokens) == add.num_choices
        and params.sampling_digest == kv_params.sampling_digest(sampling, add.stop_token_ids)
        and (sampling.temperature <= 0 or seed in (None, int(params.seed)))
        and (wanted is None or all(_tells(token, wanted) for token in params.first_tokens))
    )


def _tells(token: FirstTokenBits, num_logprobs: int) -> bool:
    return token.logprobs is not None and len(token.logprobs.top_ids) >= num_logprobs


def _reject(
    field: str, problem: str, fix: str = "the router must ask both servers for the same prompt"
) -> NoReturn:
    name = f"kv_transfer_params.{field}"
    raise KVParamsRejected(f"{name} {problem}: {fix}", param=name)
