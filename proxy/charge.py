"""Charges an API key before its request runs, and settles the charge afterwards."""

import contextlib
from collections.abc import Iterator

from protocol.errors import BatonError
from protocol.http.access import AccessGrant
from protocol.openai.token_meter import TokenMeter
from proxy.relay import Reply


@contextlib.contextmanager
def charged(
    grant: AccessGrant, reply: Reply, num_prompt_tokens: int, num_reserved: int = 0
) -> Iterator[None]:
    """Charge the key for the tokens that a request may use; correct this at the end.

    An error costs nothing. If the client leaves before an answer begins, the first
    charge stays. Also sets the headers and the token meter of `reply`.

    Args:
        num_prompt_tokens: an estimate, which also counts in the end if the answer does
            not report the number.
        num_reserved: tokens to reserve for the answer: its token limit or a default.

    Raises:
        RateLimited: the key has too little left.
    """
    grant.charge(num_prompt_tokens + num_reserved)
    reply.headers = grant.headers
    if grant.counts_tokens:
        reply.meter = TokenMeter()
    is_refused = False
    try:
        yield
    except BatonError:
        is_refused = reply.status is None
        raise
    finally:
        meter = reply.meter
        if is_refused or (reply.status or 0) >= 400:
            grant.settle(0)
        elif meter is not None and meter.has_begun:
            num_prompt = meter.num_prompt_tokens
            if num_prompt is None:
                num_prompt = num_prompt_tokens
            grant.settle(num_prompt + meter.num_generated_tokens)
