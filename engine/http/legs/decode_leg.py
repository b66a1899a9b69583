"""Decides which references to remote KV the decode leg of a request uses.

A reference is used only if it is signed with the cluster secret and belongs to the
request's prompt. The engine checks everything else when it pulls the KV: the lease, the
peer and the bytes. A reference may also contain the first tokens of the answer. These
tokens are used only if they were sampled with the parameters of this request.
Otherwise this server pulls the KV and samples the first tokens itself.
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
    """Verifies a request's references to KV, or its offer of KV.

    An offer refers to KV that another server is still computing. This server's engine
    pulls the KV while the other server computes it.

    Args:
        secret: the cluster secret.
        policy: --kv-load-failure-policy: `recompute` the prompt if a reference is
            unusable, or `fail` the request.
        uses_machine_secret: whether the secret was read from a file of this machine,
            because no option sets it.
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
            # An error of `_with_offer` does not fail the client's request: the proxy
            # can repeat the request with the KV reference that the prefill server's
            # response contains.
            return _with_offer(adds, offer)
        # A malformed reference is an error, even if the policy is `recompute`.
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
        """Return `add` with the reference, or with the reason not to use the reference.

        Args:
            sender_releases: whether the sender of the request ends the lease itself.
            seed: the seed in the client's request; None if the client sent none.

        Raises:
            KVParamsRejected: the reference is unusable, and the policy is `fail`.
        """
        remote = None
        try:
            reference.verify(self._secret)
            remote = kv_params.to_remote_prefill(
                reference, sender_releases=sender_releases
            )
            _check_reference(reference, add, vocab_size)
        except KVParamsRejected as error:
            message = error.message
            if self._uses_machine_secret and "BATON_CLUSTER_SECRET" in message:
                fact = (
                    "this server was given no secret and uses the one in its own "
                    "machine's file"
                )
                message = f"{message.removesuffix('.')}; {fact}"
            if self._policy == "recompute":
                return replace(add, kv_rejected=message, kv_unused=remote)
            raise KVParamsRejected(message, param=error.param) from None
        if not kv_params.can_use_first_tokens(reference, add, seed):
            return replace(add, remote=replace(remote, first_tokens=[]))
        sampling = replace(add.sampling, seed=int(reference.seed))
        return replace(add, remote=remote, sampling=sampling)

    def release_messages(self, kv_transfer_params: object) -> Sequence[EngineInput]:
        """Return messages to the engine that release KV of another server.

        This server will not pull the KV. Without these messages, the other server would
        hold the KV until its lease expires.
        """
        return [
            ReleaseRemote(kv_params.to_remote_prefill(reference))
            for reference in kv_params.verified_params(kv_transfer_params, self._secret)
        ]


def _with_offer(adds: list[AddRequest], offer: Offer) -> list[AddRequest]:
    """Return `adds` with an offer of KV that another server is still computing.

    Raises:
        KVParamsRejected: the request asks for logprobs of the prompt, which an offer
            does not contain.
    """
    if adds[0].num_prompt_logprobs is not None:
        _reject(
            "subscribe",
            "cannot be used with logprobs of the prompt",
            "the router must wait for the prefill server's response",
        )
    remotes = (
        offer.to_remote(index, add.token_ids, add.cache_salt)
        for index, add in enumerate(adds)
    )
    return [
        replace(add, remote=remote) for add, remote in zip(adds, remotes, strict=True)
    ]


def _check_reference(
    reference: KVTransferParams, add: AddRequest, vocab_size: int
) -> None:
    """Check that a reference belongs to this request's prompt and model.

    Raises:
        KVParamsRejected: the KV belongs to another prompt or model, or the reference
            lacks logprobs of the prompt that the request needs.
    """
    num_tokens = reference.remote_num_tokens
    ids = add.token_ids
    if len(add.resumed_choices) == 1:  # the stream has migrated to this server
        ids = [*ids, *add.resumed_choices[0].token_ids]
    if not len(add.token_ids) <= num_tokens <= len(ids):
        _reject(
            "remote_num_tokens",
            f"is {num_tokens}, but the prompt has {len(add.token_ids)} tokens",
        )
    if reference.prompt_digest != kv_params.prompt_digest(
        ids[:num_tokens], add.cache_salt
    ):
        _reject("prompt_digest", "belongs to another prompt or another cache salt")
    _check_logprobs(reference, add.num_prompt_logprobs)
    _check_vocabulary(reference, vocab_size)


def _check_logprobs(reference: KVTransferParams, num_top: int | None) -> None:
    """Check that a reference has `num_top` top logprobs for each token of the prompt.

    `num_top` is None if the request needs no logprobs of the prompt.
    """
    if num_top is None:
        return
    entries = reference.prompt_logprobs
    if entries is None or any(
        entry and len(entry.top_ids) < num_top for entry in entries
    ):
        _reject(
            "prompt_logprobs",
            f"lacks some of the {num_top} logprobs per token that the request needs",
        )


def _check_vocabulary(reference: KVTransferParams, vocab_size: int) -> None:
    """Check that all token ids in a reference exist in this model's vocabulary."""
    entries = [token.logprobs for token in reference.first_tokens]
    entries += reference.prompt_logprobs or []
    ids = [token.id for token in reference.first_tokens]
    for entry in entries:
        if entry:
            ids += entry.top_ids
    largest = max(ids, default=0)
    if largest >= vocab_size:
        problem = (
            f"or prompt_logprobs contains token id {largest}, but this model has only "
            f"{vocab_size} token ids"
        )
        _reject("first_tokens", problem, "serve the same model on both servers")


def _reject(
    field: str,
    problem: str,
    fix: str = "the router must send both servers the same prompt",
) -> NoReturn:
    """Raise KVParamsRejected for a member of kv_transfer_params."""
    name = f"kv_transfer_params.{field}"
    raise KVParamsRejected(f"{name} {problem}: {fix}", param=name)
