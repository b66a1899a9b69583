"""The decode server's HTTP side: which references to remote KV, and which hints, are believed.

A reference is used only if the cluster secret signed it and it belongs to this very prompt;
everything else about it (lease, peer, bytes) the engine finds out. Its first tokens are used only
if they were drawn as this request draws; otherwise the KV is pulled and they are drawn here.
"""

import time
from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from engine.serve import run_server
from prefill_server.server import PrefillLeg
from protocol import kv_params
from protocol.errors import KVParamsRejected
from protocol.kv_params import KVTransferParams, Offer
from protocol.messages import AddRequest, EngineInput, EngineReady, ReleaseRemote
from protocol.openai.sampling import GenerationRequest
from protocol.settings.settings import EngineSettings, parse


def serve(cls: type[EngineSettings], argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Runs a server of either role until it is told to end; returns the exit status."""
    settings = parse(cls, argv, prog=prog)
    policy, is_of_machine = settings.kv_load_failure_policy, settings.cluster_secret is None
    is_reachable = settings.advertised_host is not None
    legs = lambda key: Legs(key, policy, is_of_machine, is_reachable=is_reachable)  # noqa: E731
    return run_server(settings, legs)


class Legs(PrefillLeg):
    """Takes either leg of a request, by what its kv_transfer_params ask for, and verifies these.

    Args:
        secret: the cluster secret.
        policy: what an unusable reference leads to, `recompute` or `fail`.
        is_of_machine: the secret is that of this machine's own file, as no other was given.
    """

    def __init__(
        self, secret: bytes, policy: str, is_of_machine: bool = False, *, is_reachable: bool = True
    ) -> None:
        super().__init__(is_reachable=is_reachable)
        self._secret, self._policy, self._is_of_machine = secret, policy, is_of_machine

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        offered = request.kv_transfer_params
        is_prefill = isinstance(offered, dict) and kv_params.is_prefill_request(offered)
        prepare = super().prepare if is_prefill else self._prepare_decode
        return self._hinted(offered, prepare(request, adds, ready))

    def _prepare_decode(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        offered = request.kv_transfer_params
        if kv_params.is_absent(offered):
            return adds
        if offer := kv_params.offer_of(offered, self._secret, time.time()):
            # Whoever made it still has the prefill server's answer, if it is refused here.
            return _with_offer(adds, offer)
        # What is malformed is an error under any policy.
        references = kv_params.parse_list(offered, len(adds))
        lent = kv_params.sender_releases(offered)
        return [
            self._with_reference(add, params, lent, request.seed, ready.vocab_size)
            for add, params in zip(adds, references, strict=True)
        ]

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
            params.verify(self._secret)
            remote = kv_params.to_remote_prefill(params, sender_releases=lent)
            _check_belongs(params, add, vocab_size)
        except KVParamsRejected as error:
            told = error.message
            if self._is_of_machine and "BATON_CLUSTER_SECRET" in told:
                told += "; this server was given none, and has its own machine's file instead"
            if self._policy == "recompute":
                return replace(add, kv_rejected=told, kv_unused=remote)
            raise KVParamsRejected(told, param=error.param) from None
        if not kv_params.are_first_tokens_of(params, add, seed):
            return replace(add, remote=replace(remote, first_tokens=[]))
        return replace(add, remote=remote, sampling=replace(add.sampling, seed=int(params.seed)))

    def _hinted(self, offered: object, adds: list[AddRequest]) -> list[AddRequest]:
        try:
            hint = kv_params.hint_of(offered, self._secret, time.time())
        except KVParamsRejected as error:
            is_malformed = not (error.param or "").endswith(("signature", "issued_s"))
            if self._policy == "fail" or is_malformed:
                raise
            return [replace(add, kv_rejected=error.message) for add in adds]
        return [replace(add, hint=hint) for add in adds] if hint else adds

    def refused(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """KV that nobody comes for goes home now, here or there, not when its lease expires."""
        ours = kv_params.signed(kv_transfer_params, self._secret)
        remotes = map(kv_params.to_remote_prefill, ours)
        return [*super().refused(kv_transfer_params), *map(ReleaseRemote, remotes)]


def _with_offer(adds: list[AddRequest], offer: Offer) -> list[AddRequest]:
    """Their prompts are computed elsewhere at the same time."""
    if adds[0].num_prompt_logprobs is not None:
        _reject("subscribe", "is of a request for logprobs of the prompt", "offer no KV")
    remotes = (
        offer.to_remote(index, add.token_ids, add.cache_salt) for index, add in enumerate(adds)
    )
    return [replace(add, remote=remote) for add, remote in zip(adds, remotes, strict=True)]


def _check_belongs(params: KVTransferParams, add: AddRequest, vocab_size: int) -> None:
    """Raises KVParamsRejected where the KV is another prompt's or another model's, or what only a
    prefill finds out about this one is missing."""
    num_tokens, ids = params.remote_num_tokens, add.token_ids
    if len(add.known) == 1:  # of a stream that was moved here
        ids = [*ids, *add.known[0].token_ids]
    if not len(add.token_ids) <= num_tokens <= len(ids):
        _reject("remote_num_tokens", f"is {num_tokens}, the prompt has {len(add.token_ids)}")
    if params.prompt_digest != kv_params.prompt_digest(ids[:num_tokens], add.cache_salt):
        _reject("prompt_digest", "is of another prompt or another cache salt")
    wanted, rows = add.num_prompt_logprobs, params.prompt_logprobs
    if wanted is not None and (rows is None or any(r and len(r.top_ids) < wanted for r in rows)):
        _reject("prompt_logprobs", f"lacks the {wanted} of each token that the request asks for")
    told = [row for row in (*(t.logprobs for t in params.first_tokens), *(rows or ())) if row]
    ids = [token.id for token in params.first_tokens]
    largest = max(*ids, *(max(row.top_ids, default=0) for row in told), 0)
    if largest >= vocab_size:
        problem = f"have the id {largest} and this model {vocab_size} ids"
        _reject("first_tokens", problem, "serve the same model on both servers")


def _reject(
    field: str, problem: str, fix: str = "the router must ask both servers for the same prompt"
) -> NoReturn:
    name = f"kv_transfer_params.{field}"
    raise KVParamsRejected(f"{name} {problem}: {fix}", param=name)
