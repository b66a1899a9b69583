"""The length to which prompts are truncated, equal on proxies and servers.

If the length of the answer is unknown, a reserve is kept for the answer.
"""

USUAL_ANSWER_TOKENS = 1024  # maximum reserve
_ANSWER_SHARE = 4  # the reserve is at most the context divided by this number


def max_prompt_tokens(max_model_len: int, token_limit: int | None) -> int:
    """Returns the maximum number of prompt tokens, which is at least 1.

    Args:
        max_model_len: Length of the context in tokens.
        token_limit: The client's limit of output tokens, or None.
    """
    reserved = token_limit
    if reserved is None:
        reserved = min(USUAL_ANSWER_TOKENS, max_model_len // _ANSWER_SHARE)
    return max(max_model_len - reserved, 1)
