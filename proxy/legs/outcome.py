"""What the end of a leg means for its request."""

from protocol.errors import BatonError, ContextLengthExceeded, NoServerAvailable
from proxy.body import error_of
from proxy.errors import DecodeServerLost, DecodeServerTimeout
from proxy.upstream import Failure, Response
from proxy.upstream_call import LegFailed


def decode_error(failed: LegFailed) -> BatonError:
    """Return the error that a client receives for a failed decode leg."""
    match failed.failure:
        case Failure.LOST:
            return DecodeServerLost(f"the decode server was lost: {failed}")
        case Failure.TIMEOUT:
            return DecodeServerTimeout(f"the decode server did not answer: {failed}")
    return NoServerAvailable(f"no decode server could be had: {failed}")


def may_fit_elsewhere(answer: Response, own: int | None, longest: int | None) -> bool:
    """Return whether a request that a prefill server found too long may fit another.

    Args:
        own: context of the server that refused it, in tokens; None if not known.
        longest: the longest context of all servers, in tokens; None if not known.
    """
    if error_of(answer.body or b"") != ContextLengthExceeded.code:
        return False
    return own is not None and longest is not None and own < longest
