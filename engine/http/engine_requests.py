"""What the engine is asked for one request: a prompt's token ids each, within all limits."""

import secrets

from starlette.types import Receive

from engine.http.api import Api
from engine.http.limits import (
    check_against_server,
    check_model,
    check_size,
    check_token_ids,
    prompt_param,
    token_limit,
)
from engine.http.middleware import cancelled_on_disconnect
from engine.http.text_encoder import text_digest
from engine.http.tools import guided_decodings
from protocol.messages import AddRequest, EngineReady
from protocol.openai.sampling import GenerationRequest
from protocol.process.logging import current_request_id


async def engine_requests(
    api: Api,
    parsed: GenerationRequest,
    behind: GenerationRequest | None,
    context: int | None,
    receive: Receive,
) -> list[AddRequest]:
    """One for each prompt.

    Args:
        behind: the client's own request, where `parsed` is its prefill leg.
        context: of the decode server that `behind` is for.

    Raises:
        BatonError: this server cannot do what is asked; says why.
        ClientDisconnected: the client went away while its grammar was tried.
    """
    check_model(parsed.model, api.model_names)
    ready = api.require_ready()
    check_against_server(parsed, ready.vocab_size, api.settings.max_num_seqs)
    if all_guided := guided_decodings(parsed):
        async with cancelled_on_disconnect(receive):
            await api.grammars.check(all_guided)
    prompts = await _tokenize(api, parsed, ready)
    asked, room = parsed, ready.max_model_len
    if behind is not None and context is not None:
        asked, room = behind, context
    default = api.generation_config.max_new_tokens
    lengths = [len(ids) + token_limit(asked, len(ids), room, default) for ids in prompts]
    check_size(parsed, lengths, room, api.settings.max_num_seqs)
    return api.hooks.prepare(parsed, _adds(api, parsed, prompts, ready), ready)


async def _tokenize(api: Api, parsed: GenerationRequest, ready: EngineReady) -> list[list[int]]:
    param = prompt_param(parsed)
    prompts = _handed_over(api, parsed)
    if prompts is None:
        prompts = await api.texts.tokenize(parsed, ready.max_model_len)
    for ids in prompts:
        check_token_ids(ids, ready.vocab_size, param)
    return prompts


def _handed_over(api: Api, parsed: GenerationRequest) -> list[list[int]] | None:
    """The ids that a prefill server made of this very text, if it told them."""
    told = api.hooks.tokenized(parsed.kv_transfer_params)
    if told is None or told[0] != text_digest(parsed, api.tokenizer):
        return None
    return [told[1]]


def _adds(
    api: Api, parsed: GenerationRequest, prompts: list[list[int]], ready: EngineReady
) -> list[AddRequest]:
    default = api.generation_config.max_new_tokens
    limits = [token_limit(parsed, len(ids), ready.max_model_len, default) for ids in prompts]
    sampling = parsed.sampling(parsed.seed if parsed.seed is not None else secrets.randbits(63))
    end_ids = [] if parsed.ignore_eos else list(api.tokenizer.eos_ids)
    digest = text_digest(parsed, api.tokenizer) if parsed.is_prefill else None
    # Unique even where a client uses one X-Request-Id twice, and short whatever it sent.
    unique = f"{(current_request_id() or '')[:64]}-{secrets.token_hex(6)}"
    return [
        AddRequest(
            request_id=f"{unique}-{index}",
            token_ids=ids,
            sampling=sampling,
            max_tokens=limits[index],
            stop_token_ids=[*end_ids, *(i for i in parsed.stop_token_ids if i not in end_ids)],
            num_choices=parsed.num_candidates,
            num_prompt_logprobs=parsed.num_prompt_logprobs,
            text_digest=digest,
            grammar_bytes=api.grammars.nbytes(sampling.grammar),
        )
        for index, ids in enumerate(prompts)
    ]
