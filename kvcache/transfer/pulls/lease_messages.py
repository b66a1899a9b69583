"""The messages about a lease that a pull sends to the prefill server (P).

A nonce is `<verb>-<attempt id>`. P's reply repeats the nonce: the attempt id identifies
the pull, and the verb identifies the message that P has answered.
"""

from kvcache.verify.scope import Scope
from protocol.handshake import AbortLease, Complete, GetDigest, Renew, Subscribe
from protocol.messages import RemotePrefill

_MIN_RENEW_S = 0.02  # shortest time between two renewals
_MAX_SUBSCRIBE_S = 1.0  # longest time between two Subscribe messages of a pull


def renew_interval_s(
    remote: RemotePrefill, configured_s: float | None, grows: bool
) -> float:
    """Seconds between two renewals, at least _MIN_RENEW_S.

    Args:
        configured_s: the configured interval; None: a third of `lease_s`.
        grows: P still computes the prompt, so Subscribe messages renew the lease.
    """
    interval_s = configured_s or remote.lease_s / 3
    if grows:
        interval_s = min(interval_s, _MAX_SUBSCRIBE_S)
    return max(interval_s, _MIN_RENEW_S)


def renew_lease(remote: RemotePrefill, attempt_id: str) -> Renew:
    """Returns the message that renews the lease."""
    return Renew(
        nonce=f"renew-{attempt_id}",
        incarnation=remote.incarnation,
        lease_id=remote.lease_id,
    )


def subscribe(remote: RemotePrefill, attempt_id: str, num_blocks: int) -> Subscribe:
    """Returns the message that requests the blocks of a prompt that P still computes.

    Args:
        num_blocks: number of the prompt's blocks that P has announced so far.
    """
    assert remote.transfer_id is not None
    return Subscribe(
        nonce=f"subscribe-{attempt_id}",
        incarnation=remote.incarnation,
        transfer_id=remote.transfer_id,
        prompt_digest=remote.prompt_digest,
        num_blocks=num_blocks,
    )


def complete_lease(remote: RemotePrefill, attempt_id: str) -> Complete:
    """Returns the message that ends the lease, to be sent after the last READ.

    P's answer is the fence of the pull: it confirms that the lease was still held when
    P received this message.
    """
    return Complete(
        nonce=f"complete-{attempt_id}",
        attempt_id=attempt_id,
        incarnation=remote.incarnation,
        lease_id=remote.lease_id,
    )


def abort_lease(
    remote: RemotePrefill, attempt_id: str, *, keep_lease: bool
) -> AbortLease:
    """Returns the message that gives up the lease and the subscription.

    P's answer is ignored.

    Args:
        keep_lease: give up only the subscription, so that a different engine may
            subscribe.
    """
    verb = "lend" if keep_lease else "abort"
    lease_id = "" if keep_lease else remote.lease_id
    return AbortLease(
        nonce=f"{verb}-{attempt_id}",
        incarnation=remote.incarnation,
        lease_id=lease_id or remote.transfer_id or "",
    )


def request_digest(remote: RemotePrefill, nonce: str, scope: Scope) -> GetDigest:
    """Returns the message that requests P's digest of the KV in `scope`."""
    return GetDigest(
        nonce=nonce,
        incarnation=remote.incarnation,
        lease_id=remote.lease_id,
        token_start=scope.start,
        token_stop=scope.stop,
        samples=scope.is_sample,
        min_resume_tokens=scope.min_resume_tokens,
    )
