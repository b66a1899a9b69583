"""What placement and admission have to know of a request, estimated from its text."""

from dataclasses import replace

from proxy.placement import Ask as Ask

BLOCK_BYTES = (
    512  # prefixes are remembered in pieces of so many bytes of a prompt's JSON
)
_MAX_BYTES = 2**22  # bytes of a prompt that are hashed: about a million tokens
_BYTES_PER_TOKEN = 4.0  # of English text, about
# No text has 32 bytes a token. A prompt that would need so many will be refused.
_MAX_CONTEXTS = 8


def ask_of(salt: bytes, text: bytes, answer: int) -> Ask:
    """Return the estimated size of a request and the hashes of its prefixes.

    Args:
        salt: differs between requests that share no cached prefix, such as those of
            different models or cache salts.
        text: JSON text of the prompt, which may consist of token ids.
        answer: tokens that are likely to be generated.
    """
    is_tokens = text[:2].strip(b"[ ").isdigit()
    tokens = text.count(b",") + 1.0 if is_tokens else len(text) / _BYTES_PER_TOKEN
    chained, hashes = hash(salt), []
    for start in range(0, min(len(text), _MAX_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chained = hash((chained, text[start : start + BLOCK_BYTES]))
        hashes.append(chained)
    block_tokens = tokens * BLOCK_BYTES / max(len(text), 1)
    text = text if len(text) <= _MAX_BYTES else b""
    return Ask(max(int(tokens), 1), hashes, block_tokens, answer, text=text)


def within_context(ask: Ask, max_tokens: int | None) -> Ask:
    """Return the request with its estimate bounded by the longest context of all servers.

    An estimate by bytes may be many times too high, and a prompt that really is longer
    will be refused. Neither may count as more.

    Args:
        max_tokens: the longest context, in tokens; None if it is not known.
    """
    if max_tokens is None or ask.tokens <= max_tokens:
        return ask
    bounded = replace(
        ask, tokens=max_tokens, block_tokens=ask.block_tokens * max_tokens / ask.tokens
    )
    if ask.tokens > _MAX_CONTEXTS * max_tokens:
        return replace(bounded, hashes=(), text=b"")
    return bounded
