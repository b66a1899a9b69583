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
    """Charge the API key for the tokens that a request may use.

    At the end of the `with` block, the charge is corrected to the tokens that were
    used. A request that is refused or answered with an error costs nothing. If the
    client disconnects before an answer begins, the first charge stays. The function
    also sets the headers and the token meter of `reply`.

    Args:
        num_prompt_tokens: the estimated number of prompt tokens. The final charge uses
            it, too, if the answer does not report the number.
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
