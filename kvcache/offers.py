"""Prompts whose KV is lent while they are computed: leased blocks and readers.

    subscribe ------------> waits for its prompt              (in either order)
    expect ---------------> the engine has the prompt
    grow, ..., finish ----> one lease that grows; readers get each part and, at the end,
                            the reference
    withdraw -------------> readers get LeaseEnded, as at the end of the lease

This module is pure: the clock is an argument, and a reader is any object of the caller.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcache.lease import LeaseTable
from protocol.handshake import LeaseEnded, Ok, Progress, Subscribe

# How long a subscription waits for its prompt, because a request body may take long to
# arrive; and how long an ended prompt is remembered, because a subscription may be
# late.
REMEMBERED_S = 30.0
_MAX_REMEMBERED = 16384  # prompts waited for or remembered
# Readers of one prompt. A proxy tries only a few decode servers, one after the other.
_MAX_READERS = 8

R = TypeVar("R")


@dataclass
class _Subscription(Generic[R]):
    reader: R
    prompt_digest: str
    num_announced: int  # blocks that were announced to the reader


@dataclass
class _Offer(Generic[R]):
    """The blocks of a prompt that are leased so far, and its subscriptions.

    Attributes:
        request_id: Of the engine; empty: the prompt has not arrived, or was withdrawn.
        block_size: Tokens per block.
        reference: The handoff reference, once the lease is sealed.
        is_given_up: The last reader has unsubscribed: the lease is aborted once it is
            sealed.
        has_ended: None of its blocks may be read any more.
        subscriptions: By nonce.
    """

    request_id: str = ""
    prompt_digest: str = ""
    lease_s: float = 0.0
    block_size: int = 0
    lease_id: str = ""
    block_ids: list[int] = field(default_factory=list)
    reference: bytes = b""
    is_given_up: bool = False
    has_ended: bool = False
    subscriptions: dict[str, _Subscription[R]] = field(default_factory=dict)


class Offers(Generic[R]):
    """All offers of one engine, by transfer id."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._offers: dict[str, _Offer[R]] = {}
        # Until when prompts are waited for, or remembered after their end; oldest
        # first.
        self._remembered_until: dict[str, float] = {}
        self._by_lease: dict[str, str] = {}
        self._changed: set[str] = set()  # transfer ids with messages to send

    # -- calls of the engine

    def expect(
        self,
        transfer_id: str,
        request_id: str,
        prompt_digest: str,
        lease_s: float,
        block_size: int,
        now: float,
    ) -> None:
        """Registers a prompt that has arrived.

        An earlier prompt of the same transfer id is withdrawn.
        """
        self.withdraw(transfer_id, now)
        offer = self._offers.get(transfer_id)
        was_remembered = self._remembered_until.pop(transfer_id, None)
        has_subscription = was_remembered and offer is not None and not offer.has_ended
        if offer is None or not has_subscription:
            offer = self._offers[transfer_id] = _Offer()
        offer.request_id = request_id
        offer.prompt_digest = prompt_digest
        offer.lease_s = lease_s
        offer.block_size = block_size
        self._changed.add(transfer_id)

    def num_leased_blocks(self, transfer_id: str) -> int | None:
        """Number of leased blocks of the prompt; None if it has no readers."""
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.subscriptions or offer.has_ended:
            return None
        return len(offer.block_ids)

    def leased_blocks(self, transfer_id: str) -> list[int]:
        """The blocks of the prompt leased so far; the lease may have ended."""
        offer = self._offers.get(transfer_id)
        return list(offer.block_ids) if offer else []

    def grow(
        self,
        transfer_id: str,
        lease_id: str,
        block_ids: Iterable[int],
        now: float,
        *,
        seals: bool = False,
    ) -> str:
        """Leases more blocks, which must be complete on every rank.

        Args:
            lease_id: Of a new lease, for the first blocks. Later blocks join that
                lease.
            seals: These are the last blocks.

        Returns:
            The lease's id; empty if the lease has ended. The blocks remain the caller's
            then.
        """
        offer = self._offers[transfer_id]
        if offer.has_ended:
            return ""
        if not offer.lease_id:
            self._table.grant(
                lease_id, offer.request_id, (), offer.lease_s, now, grows=True
            )
            self._set_lease(transfer_id, offer, lease_id)
        added = list(block_ids)
        if not self._table.grow(offer.lease_id, added, now, seals=seals):
            return ""
        offer.block_ids += added
        if not seals:  # the last blocks are announced together with the reference
            self._changed.add(transfer_id)
        return offer.lease_id

    def finish(
        self,
        transfer_id: str,
        lease_id: str,
        block_ids: Iterable[int],
        reference: bytes,
        now: float,
    ) -> None:
        """Registers that the prompt is computed and this lease has all its blocks.

        The lease ends at once if the prompt's last reader has unsubscribed.
        """
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id:
            return
        if offer.lease_id != lease_id:  # there is no lease yet, or it has ended
            self._set_lease(transfer_id, offer, lease_id)
        offer.block_ids = list(block_ids)
        offer.reference = reference
        if offer.is_given_up:
            self._table.abort(lease_id, now)
        self._changed.add(transfer_id)

    def withdraw(self, transfer_id: str, now: float) -> None:
        """Registers that the prompt will never be complete.

        Does nothing if the prompt is complete already.
        """
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id or offer.reference:
            return
        offer.request_id = ""
        offer.has_ended = True
        if offer.lease_id:
            self._table.abort(offer.lease_id, now)
        self._changed.add(transfer_id)

    def lease_ended(self, lease_id: str) -> None:
        """Registers the end of a lease of the table."""
        transfer_id = self._by_lease.pop(lease_id, "")
        offer = self._offers.get(transfer_id)
        if offer is not None and offer.lease_id == lease_id:
            offer.has_ended = True
            self._changed.add(transfer_id)

    def _set_lease(self, transfer_id: str, offer: _Offer[R], lease_id: str) -> None:
        offer.lease_id = lease_id
        self._by_lease[lease_id] = transfer_id

    # -- calls for readers

    def subscribe(self, request: Subscribe, reader: R, now: float) -> Ok | LeaseEnded:
        """Adds or renews a subscription; `take_messages` returns its messages."""
        nonce = request.nonce
        offer = self._offers.get(request.transfer_id)
        if offer is None:
            if len(self._remembered_until) >= _MAX_REMEMBERED:
                return LeaseEnded(nonce=nonce, reason="too many prompts are waited for")
            offer = self._offers[request.transfer_id] = _Offer()
            self._remembered_until[request.transfer_id] = now + REMEMBERED_S
        is_new = nonce not in offer.subscriptions
        if is_new and len(offer.subscriptions) >= _MAX_READERS:
            return LeaseEnded(nonce=nonce, reason="it has too many readers")
        if offer.lease_id:
            self._table.renew(offer.lease_id, now)
        offer.is_given_up = False
        offer.subscriptions[nonce] = _Subscription(
            reader=reader,
            prompt_digest=request.prompt_digest,
            num_announced=request.num_blocks,
        )
        self._changed.add(request.transfer_id)
        return Ok(nonce=nonce)

    def unsubscribe(self, nonce: str, name: str, now: float, *, lends: bool) -> None:
        """Ends a subscription.

        Args:
            name: The lease id; or the transfer id, if the reader has no lease id yet.
            lends: The prompt stays on offer, because another reader may subscribe.
        """
        offer = self._offers.get(self._by_lease.get(name, name))
        if offer is None:
            return
        offer.subscriptions.pop(nonce, None)
        offer.is_given_up = not (lends or offer.subscriptions)
        if offer.is_given_up and offer.reference:
            self._table.abort(offer.lease_id, now)

    def leave(self, reader: R) -> None:
        """Ends all subscriptions of a reader."""
        for offer in self._offers.values():
            nonces = [
                nonce
                for nonce, subscription in offer.subscriptions.items()
                if subscription.reader == reader
            ]
            for nonce in nonces:
                del offer.subscriptions[nonce]

    def take_messages(
        self, now: float, is_slow: Callable[[R], bool]
    ) -> list[tuple[R, Progress | LeaseEnded]]:
        """The messages to send to readers now.

        A slow reader gets its messages later, combined into one.
        """
        messages: list[tuple[R, Progress | LeaseEnded]] = []
        changed = self._changed
        self._changed = set()
        for transfer_id in changed:
            offer = self._offers.get(transfer_id)
            if offer is None:
                continue
            for nonce, subscription in list(offer.subscriptions.items()):
                if is_slow(subscription.reader):
                    self._changed.add(transfer_id)
                    continue
                message = self._message_for(offer, nonce, subscription)
                if message:
                    messages.append((subscription.reader, message))
            # The offer of a prompt that is still being computed stays, with
            # `has_ended`.
            if offer.has_ended and (offer.reference or not offer.request_id):
                self._offers[transfer_id] = _Offer(
                    has_ended=True, subscriptions=offer.subscriptions
                )
                self._remembered_until.setdefault(transfer_id, now + REMEMBERED_S)
        return messages + self._remove_expired(now)

    def _remove_expired(self, now: float) -> list[tuple[R, Progress | LeaseEnded]]:
        """Removes prompts after REMEMBERED_S, and the oldest beyond _MAX_REMEMBERED."""
        messages: list[tuple[R, Progress | LeaseEnded]] = []
        while self._remembered_until:
            transfer_id, until = next(iter(self._remembered_until.items()))
            if until > now and len(self._remembered_until) <= _MAX_REMEMBERED:
                break
            del self._remembered_until[transfer_id]
            offer = self._offers.pop(transfer_id)
            for nonce, subscription in offer.subscriptions.items():
                message = LeaseEnded(nonce=nonce, reason="unknown")
                messages.append((subscription.reader, message))
        return messages

    def _message_for(
        self, offer: _Offer[R], nonce: str, subscription: _Subscription[R]
    ) -> Progress | LeaseEnded | None:
        """The next message of a subscription, which ends with its last message."""
        is_other_prompt = (
            offer.request_id and subscription.prompt_digest != offer.prompt_digest
        )
        if is_other_prompt:
            del offer.subscriptions[nonce]
            return LeaseEnded(nonce=nonce, reason="it is of another prompt")
        if offer.has_ended:
            del offer.subscriptions[nonce]
            return LeaseEnded(nonce=nonce, reason="unknown or ended")
        first = subscription.num_announced
        if not offer.reference and len(offer.block_ids) <= first:
            return None
        subscription.num_announced = len(offer.block_ids)
        if offer.reference:
            del offer.subscriptions[nonce]
        return Progress(
            nonce=nonce,
            lease_id=offer.lease_id,
            lease_s=offer.lease_s,
            block_size=offer.block_size,
            first=first,
            block_ids=offer.block_ids[first:],
            reference=offer.reference,
        )
