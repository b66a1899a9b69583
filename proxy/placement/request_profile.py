"""The properties of a request on which its placement depends."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

BLOCK_BYTES = 512  # bytes of a prompt's JSON text in one block of the prefix index
_MAX_HASHED_BYTES = 2**22  # about a million tokens; text beyond this is not hashed
_BYTES_PER_TOKEN = 4.0  # estimate for text
# A prompt that is estimated at more than this multiple of the longest context will be
# refused: its estimate is 4 bytes per token, and no text has 32 bytes per token.
_IMPLAUSIBLE_LENGTH_RATIO = 8
NUM_SIZE_CLASSES = 12  # from one class to the next, the length of prompts doubles


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """The prompt of one request, and how much it may generate.

    Attributes:
        tokens: length of the prompt; an estimate if the prompt is text.
        hashes: chained hashes of the prompt's blocks: each stands for its block and
            all blocks before it.
        block_tokens: tokens per block.
        max_output_tokens: tokens that the request may generate.
        text: JSON text of the prompt, from which the blocks were cut.
        cache_key: hash of the client's `prompt_cache_key`; None without one.
    """

    tokens: int
    hashes: Sequence[int] = ()
    block_tokens: float = 512
    max_output_tokens: int = 256
    text: bytes = field(default=b"", repr=False)
    cache_key: int | None = None

    @property
    def size_class(self) -> int:
        """The class of prompts of similar length, from 0 to NUM_SIZE_CLASSES - 1.

        ServerLoad.skippable_s estimates by size class which queued prompts a shorter
        prompt overtakes.
        """
        return min(max(self.tokens.bit_length() - 6, 0), NUM_SIZE_CLASSES - 1)


def profile_prompt(salt: bytes, text: bytes, max_output_tokens: int) -> RequestProfile:
    """Estimate the length of a prompt and hash its blocks.

    Args:
        salt: the model and the cache salt. Requests with different salts share no
            cached prefix.
        text: JSON text of the prompt, which may be a list of token ids.
    """
    is_token_ids = text[:2].strip(b"[ ").isdigit()
    tokens = text.count(b",") + 1.0 if is_token_ids else len(text) / _BYTES_PER_TOKEN
    chained_hash = hash(salt)
    hashes = []
    last_start = min(len(text), _MAX_HASHED_BYTES) - BLOCK_BYTES
    for start in range(0, last_start + 1, BLOCK_BYTES):
        chained_hash = hash((chained_hash, text[start : start + BLOCK_BYTES]))
        hashes.append(chained_hash)
    return RequestProfile(
        tokens=max(int(tokens), 1),
        hashes=hashes,
        block_tokens=tokens * BLOCK_BYTES / max(len(text), 1),
        max_output_tokens=max_output_tokens,
        text=text if len(text) <= _MAX_HASHED_BYTES else b"",
    )


def limit_to_context(profile: RequestProfile, max_tokens: int | None) -> RequestProfile:
    """Return the profile with at most `max_tokens` tokens, the longest context.

    The estimate from the number of bytes may be many times too high. If the prompt
    really is longer than the longest context, servers will refuse it. In both cases,
    the profile must not count more tokens than the longest context.

    Args:
        max_tokens: None if the longest context is not known.
    """
    if max_tokens is None or profile.tokens <= max_tokens:
        return profile
    block_tokens = profile.block_tokens * max_tokens / profile.tokens
    limited = replace(profile, tokens=max_tokens, block_tokens=block_tokens)
    if profile.tokens > _IMPLAUSIBLE_LENGTH_RATIO * max_tokens:
        return replace(limited, hashes=(), text=b"")
    return limited
