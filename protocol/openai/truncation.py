"""How long a prompt may be that is cut to fit: the same at a proxy and at its servers."""

USUAL_ANSWER_TOKENS = 1024  # kept free for an answer of unknown length, at most
_ANSWER_SHARE = 4  # one of so many parts of the context, at most


def max_prompt_tokens(max_model_len: int, token_limit: int | None) -> int:
    """The tokens that a prompt may have beside its answer; at least 1.

    Args:
        max_model_len: the context, in tokens.
        token_limit: tokens that the client allows for the answer; None if it named no limit.
    """
    reserved = token_limit
    if reserved is None:
        reserved = min(USUAL_ANSWER_TOKENS, max_model_len // _ANSWER_SHARE)
    return max(max_model_len - reserved, 1)
