"""The length to which prompts are truncated if they are to fit the context.

Proxies and servers compute it in the same way. The client's limit on output tokens is
reserved for the answer. Without such a limit, a part of the context is reserved.
"""

_MAX_RESERVED_TOKENS = 1024
_RESERVE_DIVISOR = 4  # at most a quarter of the context is reserved


def max_prompt_tokens(max_model_len: int, token_limit: int | None) -> int:
    """Returns the maximum number of prompt tokens, which is at least 1.

    Args:
        max_model_len: Length of the context in tokens.
        token_limit: The client's limit on output tokens, or None.
    """
    reserved = token_limit
    if reserved is None:
        reserved = min(_MAX_RESERVED_TOKENS, max_model_len // _RESERVE_DIVISOR)
    return max(max_model_len - reserved, 1)
