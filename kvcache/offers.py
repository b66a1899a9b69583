"""Offers: prompts with KV that decode servers may pull before the KV is complete.

The readers of an offer are the decode servers that have subscribed to it.

    subscribe       a reader waits for a prompt, before or after `expect`
    expect          the engine has received the prompt
    grow, finish    the prompt's lease gets more blocks; readers are sent the new blocks
                    and, after `finish`, the handoff reference (kv_transfer_params)
    withdraw        the prompt will not be computed to its end; readers are sent
                    LeaseEnded, as when the lease ends

This module is pure: the current time is an argument, and readers are opaque objects.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcache.lease import LeaseTable
from protocol.handshake import LeaseEnded, Ok, Progress, Subscribe

# A subscription waits this long for its prompt, because a request body may take long to
# arrive. An ended prompt is remembered this long, so that a late subscription is
# refused at once.
REMEMBERED_S = 30.0
_MAX_REMEMBERED = 16384  # largest number of prompts that are awaited or remembered
# Largest number of readers of one prompt. A proxy tries only a few decode servers, one
# after another.
_MAX_READERS = 8

R = TypeVar("R")


@dataclass
class _Subscription(Generic[R]):
    reader: R
    prompt_digest: str
    num_announced: int  # number of blocks that were announced to the reader


@dataclass
class _Offer(Generic[R]):
    """The blocks of a prompt that are leased so far, and the prompt's subscriptions.

    Attributes:
        request_id: The engine's request id; empty if the prompt has not arrived or was
            withdrawn.
        block_size: Tokens per block.
        lease_id: Empty before the first blocks are leased.
        reference: The handoff reference; empty before the lease is sealed.
        is_given_up: The last reader has unsubscribed. The lease is aborted once it is
            sealed.
        has_ended: The lease has ended or the prompt was withdrawn, so no block may be
            read any more.
        subscriptions: The subscriptions to this offer, by nonce.
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
        # The end of the time for which a prompt that has not arrived is awaited, or an
        # ended prompt is remembered; by transfer id, oldest first.
        self._remembered_until: dict[str, float] = {}
        self._transfer_ids: dict[str, str] = {}  # by lease id
        # Transfer ids of offers that may have messages to send.
        self._changed: set[str] = set()

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
        """Registers that the engine has received a prompt.

        If a prompt with the same transfer id is being computed already, that prompt is
        withdrawn.
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
        """Number of leased blocks of the prompt.

        None if the offer is unknown, has no readers or has ended.
        """
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
        """Leases more blocks of a prompt. Their KV must be complete on every rank.

        Args:
            lease_id: The id for a new lease. Ignored if the prompt has a lease already,
                because all its blocks belong to one lease.
            seals: `block_ids` are the prompt's last blocks.

        Returns:
            The id of the prompt's lease. Empty if the lease has ended: `block_ids` then
            still belong to the caller.
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
        """Registers that a prompt is computed, and all its blocks are in one lease.

        If the prompt's last reader has unsubscribed, the lease is aborted at once. Does
        nothing if the prompt is unknown or was withdrawn.

        Args:
            lease_id: The lease that has all blocks of the prompt.
            block_ids: All blocks of the prompt.
            reference: The handoff reference, for the prompt's readers.
        """
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id:
            return
        # The ids differ if no block was leased before, or if an earlier lease of the
        # prompt has ended.
        if offer.lease_id != lease_id:
            self._set_lease(transfer_id, offer, lease_id)
        offer.block_ids = list(block_ids)
        offer.reference = reference
        if offer.is_given_up:
            self._table.abort(lease_id, now)
        self._changed.add(transfer_id)

    def withdraw(self, transfer_id: str, now: float) -> None:
        """Registers that a prompt will not be computed to its end.

        Aborts the prompt's lease. Does nothing if the prompt is complete already.
        """
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id or offer.reference:
            return
        offer.request_id = ""
        offer.has_ended = True
        if offer.lease_id:
            self._table.abort(offer.lease_id, now)
        self._changed.add(transfer_id)

    def on_lease_ended(self, lease_id: str) -> None:
        """Registers that a lease of the table has ended."""
        transfer_id = self._transfer_ids.pop(lease_id, "")
        offer = self._offers.get(transfer_id)
        if offer is not None and offer.lease_id == lease_id:
            offer.has_ended = True
            self._changed.add(transfer_id)

    def _set_lease(self, transfer_id: str, offer: _Offer[R], lease_id: str) -> None:
        offer.lease_id = lease_id
        self._transfer_ids[lease_id] = transfer_id

    # -- calls for readers

    def subscribe(self, request: Subscribe, reader: R, now: float) -> Ok | LeaseEnded:
        """Adds or renews a subscription, and renews the lease of the prompt.

        `take_messages` returns the subscription's messages.

        Returns:
            LeaseEnded if there are too many awaited or recently ended prompts, or too
            many readers of this prompt; otherwise Ok.
        """
        nonce = request.nonce
        offer = self._offers.get(request.transfer_id)
        if offer is None:
            if len(self._remembered_until) >= _MAX_REMEMBERED:
                reason = "the prefill server has too many awaited or ended prompts"
                return LeaseEnded(nonce=nonce, reason=reason)
            offer = self._offers[request.transfer_id] = _Offer()
            self._remembered_until[request.transfer_id] = now + REMEMBERED_S
        is_new = nonce not in offer.subscriptions
        if is_new and len(offer.subscriptions) >= _MAX_READERS:
            return LeaseEnded(nonce=nonce, reason="the prompt has too many readers")
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

    def unsubscribe(
        self, nonce: str, lease_or_transfer_id: str, now: float, *, keeps_offer: bool
    ) -> None:
        """Ends a subscription. If no subscription is left, gives up the offer.

        The lease of an offer that is given up is aborted once the lease is sealed.

        Args:
            lease_or_transfer_id: The id of the lease or the transfer id, whichever the
                reader has sent.
            keeps_offer: Keep the offer, because a different reader may subscribe.
        """
        transfer_id = self._transfer_ids.get(lease_or_transfer_id, lease_or_transfer_id)
        offer = self._offers.get(transfer_id)
        if offer is None:
            return
        offer.subscriptions.pop(nonce, None)
        offer.is_given_up = not (keeps_offer or offer.subscriptions)
        if offer.is_given_up and offer.reference:
            self._table.abort(offer.lease_id, now)

    def remove_reader(self, reader: R) -> None:
        """Removes a reader's subscriptions after its connection has closed.

        Unlike `unsubscribe`, this does not give up an offer: the reader may connect and
        subscribe again.
        """
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
        """Returns the messages to send to readers now, and drops expired prompts.

        Args:
            is_slow: Returns True for a reader with unsent earlier messages. Such a
                reader gets no message now; a later call returns one message with all
                blocks that the reader has missed.
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
            # While the prompt is still being computed, the offer is kept even if it has
            # ended, because `grow` and `finish` will look the offer up.
            if offer.has_ended and (offer.reference or not offer.request_id):
                self._offers[transfer_id] = _Offer(
                    has_ended=True, subscriptions=offer.subscriptions
                )
                self._remembered_until.setdefault(transfer_id, now + REMEMBERED_S)
        return messages + self._remove_expired(now)

    def _remove_expired(self, now: float) -> list[tuple[R, Progress | LeaseEnded]]:
        """Drops awaited and ended prompts after REMEMBERED_S.

        If there are more than _MAX_REMEMBERED prompts, the oldest are dropped earlier.

        Returns:
            LeaseEnded for each reader that still waits.
        """
        messages: list[tuple[R, Progress | LeaseEnded]] = []
        while self._remembered_until:
            transfer_id, until = next(iter(self._remembered_until.items()))
            if until > now and len(self._remembered_until) <= _MAX_REMEMBERED:
                break
            del self._remembered_until[transfer_id]
            offer = self._offers.pop(transfer_id)
            for nonce, subscription in offer.subscriptions.items():
                message = LeaseEnded(nonce=nonce, reason="the prompt did not arrive")
                messages.append((subscription.reader, message))
        return messages

    def _message_for(
        self, offer: _Offer[R], nonce: str, subscription: _Subscription[R]
    ) -> Progress | LeaseEnded | None:
        """The next message of a subscription; None if there is nothing new to send.

        A subscription is removed from the offer when its last message is returned.
        """
        is_different_prompt = (
            offer.request_id and subscription.prompt_digest != offer.prompt_digest
        )
        if is_different_prompt:
            del offer.subscriptions[nonce]
            reason = "the transfer id belongs to a different prompt"
            return LeaseEnded(nonce=nonce, reason=reason)
        if offer.has_ended:
            del offer.subscriptions[nonce]
            reason = "the lease has ended, or the prompt was withdrawn"
            return LeaseEnded(nonce=nonce, reason=reason)
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
