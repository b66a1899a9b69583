"""Decides for the decode leg of a request which references to remote KV are used.

A reference is used only if the cluster secret signed it and it belongs to this prompt.
The engine finds out everything else about it (lease, peer, bytes). Its first tokens are
used only if they were drawn as this request draws. Otherwise the KV is pulled and the
first tokens are drawn here.
"""

import time
from collections.abc import Sequence
from typing import NoReturn

from msgspec.structs import replace

from engine.http.api import ServerHooks
from protocol import kv_offers, kv_params
from protocol.errors import KVParamsRejected
from protocol.kv_offers import Offer
from protocol.kv_params import KVTransferParams
from protocol.messages import AddRequest, EngineInput, EngineReady, ReleaseRemote
from protocol.openai.sampling import GenerationRequest


class DecodeLeg(ServerHooks):
    """Verifies a request's references to KV, or its offer to read KV early.

    Args:
        secret: the cluster secret.
        policy: what to do with an unusable reference, `recompute` or `fail`.
        uses_machine_secret: whether the secret comes from this machine's file, because
            the options have none.
    """

    def __init__(
        self, secret: bytes, policy: str, *, uses_machine_secret: bool = False
    ) -> None:
        self._secret = secret
        self._policy = policy
        self._uses_machine_secret = uses_machine_secret

    def prepare(
        self, request: GenerationRequest, adds: list[AddRequest], ready: EngineReady
    ) -> list[AddRequest]:
        params = request.kv_transfer_params
        if kv_params.is_absent(params):
            return adds
        if offer := kv_offers.offer_of(params, self._secret, time.time()):
            # If the offer is refused here, the proxy still has the prefill server's
            # answer.
            return _with_offer(adds, offer)
        # A malformed reference is an error under any policy.
        references = kv_params.parse_list(params, len(adds))
        sender_releases = kv_params.sender_releases(params)
        return [
            self._with_reference(
                add, reference, sender_releases, request.seed, ready.vocab_size
            )
            for add, reference in zip(adds, references, strict=True)
        ]

    def _with_reference(
        self,
        add: AddRequest,
        reference: KVTransferParams,
        sender_releases: bool,
        seed: int | None,
        vocab_size: int,
    ) -> AddRequest:
        remote = None
        try:
            reference.verify(self._secret)
            remote = kv_params.to_remote_prefill(
                reference, sender_releases=sender_releases
            )
            _check_belongs(reference, add, vocab_size)
        except KVParamsRejected as error:
            message = error.message
            if self._uses_machine_secret and "BATON_CLUSTER_SECRET" in message:
                message += "; this server has none and uses its own machine's file"
            if self._policy == "recompute":
                return replace(add, kv_rejected=message, kv_unused=remote)
            raise KVParamsRejected(message, param=error.param) from None
        if not kv_params.are_first_tokens_of(reference, add, seed):
            return replace(add, remote=replace(remote, first_tokens=[]))
        sampling = replace(add.sampling, seed=int(reference.seed))
        return replace(add, remote=remote, sampling=sampling)

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """Return orders to release remote KV that will not be pulled.

        Without them, the KV would be held until its lease expires.
        """
        return [
            ReleaseRemote(kv_params.to_remote_prefill(reference))
            for reference in kv_params.signed(kv_transfer_params, self._secret)
        ]


def _with_offer(adds: list[AddRequest], offer: Offer) -> list[AddRequest]:
    """Return the requests, whose prompts another server computes at the same time."""
    if adds[0].num_prompt_logprobs is not None:
        _reject(
            "subscribe", "is of a request for logprobs of the prompt", "offer no KV"
        )
    remotes = (
        offer.to_remote(index, add.token_ids, add.cache_salt)
        for index, add in enumerate(adds)
    )
    return [
        replace(add, remote=remote) for add, remote in zip(adds, remotes, strict=True)
    ]


def _check_belongs(
    reference: KVTransferParams, add: AddRequest, vocab_size: int
) -> None:
    """Check that a reference belongs to this request's prompt and model.

    Raises:
        KVParamsRejected: the KV belongs to another prompt or model, or the reference
            lacks the logprobs of this prompt.
    """
    num_tokens = reference.remote_num_tokens
    ids = add.token_ids
    if len(add.resumed_choices) == 1:  # the stream has migrated to this server
        ids = [*ids, *add.resumed_choices[0].token_ids]
    if not len(add.token_ids) <= num_tokens <= len(ids):
        _reject(
            "remote_num_tokens", f"is {num_tokens}, the prompt has {len(add.token_ids)}"
        )
    if reference.prompt_digest != kv_params.prompt_digest(
        ids[:num_tokens], add.cache_salt
    ):
        _reject("prompt_digest", "is of another prompt or another cache salt")
    _check_logprobs(reference, add.num_prompt_logprobs)
    _check_vocabulary(reference, vocab_size)


def _check_logprobs(reference: KVTransferParams, num_wanted: int | None) -> None:
    rows = reference.prompt_logprobs
    if num_wanted is None:
        return
    if rows is None or any(row and len(row.top_ids) < num_wanted for row in rows):
        _reject(
            "prompt_logprobs",
            f"lacks the {num_wanted} of each token that the request asks for",
        )


def _check_vocabulary(reference: KVTransferParams, vocab_size: int) -> None:
    rows = [token.logprobs for token in reference.first_tokens]
    rows += reference.prompt_logprobs or []
    ids = [token.id for token in reference.first_tokens]
    for row in rows:
        if row:
            ids += row.top_ids
    largest = max(ids, default=0)
    if largest >= vocab_size:
        problem = f"have the id {largest} and this model {vocab_size} ids"
        _reject("first_tokens", problem, "serve the same model on both servers")


def _reject(
    field: str,
    problem: str,
    fix: str = "the router must send both servers the same prompt",
) -> NoReturn:
    name = f"kv_transfer_params.{field}"
    raise KVParamsRejected(f"{name} {problem}: {fix}", param=name)
