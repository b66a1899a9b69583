"""Prompts whose KV is lent while they are computed: the leased blocks, and their readers.

    subscribe ------------> waits for its prompt, for a while        (in either order)
    expect ---------------> the engine has the prompt
    grow, ..., tell_end ----> one lease that grows; readers get each part, then the reference
    withdraw, or the lease's end -> readers get Gone

Pure: the clock is an argument, and a reader is any object of the caller.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcache.lease import LeaseTable
from protocol.handshake import Gone, Ok, Progress, Subscribe

# A subscription waits so long for its prompt, as a body may be long; and the end of a prompt is
# remembered so long, as a subscription may be late.
KNOWN_S = 30.0
_MAX_KNOWN = 16384  # prompts waited for or remembered
_MAX_READERS = (
    8  # of one prompt: a proxy asks a few decode servers, one after the other
)

R = TypeVar("R")


@dataclass
class _Reader(Generic[R]):
    reader: R
    prompt_digest: str
    num_told: int  # blocks that it was told of


@dataclass
class _Offer(Generic[R]):
    request_id: str = (
        ""  # of the engine; empty: the prompt has not come, or was withdrawn
    )
    prompt_digest: str = ""
    lease_s: float = 0.0
    block_size: int = 0  # tokens
    lease_id: str = ""
    block_ids: list[int] = field(default_factory=list)
    reference: bytes = b""  # once the lease is sealed
    is_given_up: bool = (
        False  # by its last reader: the lease is aborted once it is sealed
    )
    has_ended: bool = False  # none of its blocks may be read any more
    readers: dict[str, _Reader[R]] = field(default_factory=dict)  # by nonce


class Offers(Generic[R]):
    """All such prompts of one engine, by transfer id."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._offers: dict[str, _Offer[R]] = {}
        self._known_until: dict[
            str, float
        ] = {}  # prompts waited for, or ended; oldest first
        self._by_lease: dict[str, str] = {}
        self._news: set[str] = set()

    # -- what the engine does

    def expect(
        self,
        transfer_id: str,
        request_id: str,
        prompt_digest: str,
        lease_s: float,
        block_size: int,
        now: float,
    ) -> None:
        """The prompt has come. An earlier one of the same transfer id is withdrawn."""
        self.withdraw(transfer_id, now)
        offer = self._offers.get(transfer_id)
        if (
            not self._known_until.pop(transfer_id, None)
            or offer is None
            or offer.has_ended
        ):
            offer = self._offers[transfer_id] = _Offer()  # no subscription waits for it
        offer.request_id, offer.prompt_digest = request_id, prompt_digest
        offer.lease_s, offer.block_size = lease_s, block_size
        self._news.add(transfer_id)

    def wanted(self, transfer_id: str) -> int | None:
        """Number of leased blocks of the prompt; None: it has no readers."""
        offer = self._offers.get(transfer_id)
        return (
            len(offer.block_ids)
            if offer and offer.readers and not offer.has_ended
            else None
        )

    def leased(self, transfer_id: str) -> list[int]:
        """The blocks leased so far of a half computed prompt; the lease may have ended."""
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
        """Leases more blocks, which are complete on every rank. The first ones get a lease of the
        given id, later ones join it. Returns the lease's id; empty: it has ended, and the blocks
        stay the caller's."""
        offer = self._offers[transfer_id]
        if offer.has_ended:
            return ""
        if not offer.lease_id:
            self._table.grant(
                lease_id, offer.request_id, (), offer.lease_s, now, grows=True
            )
            self._name(transfer_id, offer, lease_id)
        more = list(block_ids)
        if not self._table.grow(offer.lease_id, more, now, seals=seals):
            return ""
        offer.block_ids += more
        if not seals:  # else they are announced with the reference
            self._news.add(transfer_id)
        return offer.lease_id

    def tell_end(
        self,
        transfer_id: str,
        lease_id: str,
        block_ids: Iterable[int],
        reference: bytes,
        now: float,
    ) -> None:
        """The prompt is computed, and all of its blocks are under this lease. It ends at once if
        its last reader has given it up."""
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id:
            return
        if offer.lease_id != lease_id:  # none yet, or one that has ended
            self._name(transfer_id, offer, lease_id)
        offer.block_ids, offer.reference = list(block_ids), reference
        if offer.is_given_up:
            self._table.abort(lease_id, now)
        self._news.add(transfer_id)

    def withdraw(self, transfer_id: str, now: float) -> None:
        """The prompt will never be complete. Does nothing if it is."""
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id or offer.reference:
            return
        offer.request_id, offer.has_ended = "", True
        if offer.lease_id:
            self._table.abort(offer.lease_id, now)
        self._news.add(transfer_id)

    def lease_ended(self, lease_id: str) -> None:
        transfer_id = self._by_lease.pop(lease_id, "")
        offer = self._offers.get(transfer_id)
        if offer is not None and offer.lease_id == lease_id:
            offer.has_ended = True
            self._news.add(transfer_id)

    def _name(self, transfer_id: str, offer: _Offer[R], lease_id: str) -> None:
        offer.lease_id = lease_id
        self._by_lease[lease_id] = transfer_id

    # -- what readers do

    def subscribe(self, asked: Subscribe, reader: R, now: float) -> Ok | Gone:
        """Adds a reader or renews it; `take` returns its news."""
        offer = self._offers.get(asked.transfer_id)
        if offer is None:
            if len(self._known_until) >= _MAX_KNOWN:
                return Gone(nonce=asked.nonce, reason="too many prompts are waited for")
            offer = self._offers[asked.transfer_id] = _Offer()
            self._known_until[asked.transfer_id] = now + KNOWN_S
        if asked.nonce not in offer.readers and len(offer.readers) >= _MAX_READERS:
            return Gone(nonce=asked.nonce, reason="it has too many readers")
        if offer.lease_id:
            self._table.renew(offer.lease_id, now)
        offer.is_given_up = False
        offer.readers[asked.nonce] = _Reader(
            reader, asked.prompt_digest, asked.num_blocks
        )
        self._news.add(asked.transfer_id)
        return Ok(nonce=asked.nonce)

    def unsubscribe(self, nonce: str, name: str, now: float, *, lends: bool) -> None:
        """
        Args:
            name: lease id; or transfer id, from a reader that knows no lease yet.
            lends: another reader may subscribe.
        """
        offer = self._offers.get(self._by_lease.get(name, name))
        if offer is None:
            return
        offer.readers.pop(nonce, None)
        offer.is_given_up = not (lends or offer.readers)
        if offer.is_given_up and offer.reference:
            self._table.abort(offer.lease_id, now)

    def leave(self, reader: R) -> None:
        """Ends all subscriptions of a reader."""
        for offer in self._offers.values():
            for nonce in [
                n for n, one in offer.readers.items() if one.reader == reader
            ]:
                del offer.readers[nonce]

    def take(
        self, now: float, is_slow: Callable[[R], bool]
    ) -> list[tuple[R, Progress | Gone]]:
        """The messages to send now. A slow reader gets its news later, in one message."""
        replies: list[tuple[R, Progress | Gone]] = []
        news, self._news = self._news, set()
        for transfer_id in news:
            offer = self._offers.get(transfer_id)
            if offer is None:
                continue
            for nonce, reader in list(offer.readers.items()):
                if is_slow(reader.reader):
                    self._news.add(transfer_id)
                elif reply := self._news_for(offer, nonce, reader):
                    replies.append((reader.reader, reply))
            # The offer of a prompt that is still computed stays, with `has_ended`.
            if offer.has_ended and (offer.reference or not offer.request_id):
                self._offers[transfer_id] = _Offer(
                    has_ended=True, readers=offer.readers
                )
                self._known_until.setdefault(transfer_id, now + KNOWN_S)
        return replies + self._expired(now)

    def _expired(self, now: float) -> list[tuple[R, Progress | Gone]]:
        """Forgets prompts after KNOWN_S, and the oldest ones beyond the bound."""
        replies: list[tuple[R, Progress | Gone]] = []
        while self._known_until:
            transfer_id, until = next(iter(self._known_until.items()))
            if until > now and len(self._known_until) <= _MAX_KNOWN:
                break
            del self._known_until[transfer_id]
            for nonce, reader in self._offers.pop(transfer_id).readers.items():
                replies.append((reader.reader, Gone(nonce=nonce, reason="unknown")))
        return replies

    def _news_for(
        self, offer: _Offer[R], nonce: str, reader: _Reader[R]
    ) -> Progress | Gone | None:
        is_other = offer.request_id and reader.prompt_digest != offer.prompt_digest
        if offer.has_ended or is_other:
            del offer.readers[nonce]
            reason = "it is of another prompt" if is_other else "unknown or ended"
            return Gone(nonce=nonce, reason=reason)
        first = reader.num_told
        if not offer.reference and len(offer.block_ids) <= first:
            return None
        reader.num_told = len(offer.block_ids)
        if offer.reference:
            del offer.readers[nonce]
        return Progress(
            nonce=nonce,
            lease_id=offer.lease_id,
            lease_s=offer.lease_s,
            block_size=offer.block_size,
            first=first,
            block_ids=offer.block_ids[first:],
            reference=offer.reference,
        )
