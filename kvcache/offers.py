"""Prompts whose KV is told of while they are computed: what is there, and to whom to say so.

    subscribe ------------> waits for its prompt, for a while        (in either order)
    expect ---------------> the engine has the prompt
    grow, ..., tell_end ----> one lease that grows; readers hear of each part, then the reference
    withdraw, or the lease's end -> readers hear that it is gone

Pure: readers are whatever the caller knows them by, the clock is an argument.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcache.lease import LeaseTable
from protocol.handshake import Gone, Ok, Progress, Subscribe

# For which a subscription waits for its prompt, as a body may be long; and for which it is known
# that a prompt has ended, as a subscription may be late.
KNOWN_S = 30.0
_MAX_KNOWN = 16384  # of such prompts
_MAX_READERS = 8  # of one prompt: a proxy asks a few decode servers, one after the other

R = TypeVar("R")


@dataclass
class _Reader(Generic[R]):
    reader: R
    prompt_digest: str
    num_told: int  # blocks


@dataclass
class _Offer(Generic[R]):
    request_id: str = ""  # of the engine; none: the prompt has not come, or is given up
    prompt_digest: str = ""
    lease_s: float = 0.0
    block_size: int = 0  # tokens
    lease_id: str = ""
    block_ids: list[int] = field(default_factory=list)
    reference: bytes = b""  # once it is sealed
    is_given_up: bool = False  # by its last reader: nobody comes for what is not leased yet
    has_ended: bool = False  # nothing of it may be read any more
    readers: dict[str, _Reader[R]] = field(default_factory=dict)  # by nonce


class Offers(Generic[R]):
    """All such prompts of one engine, by transfer id."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._offers: dict[str, _Offer[R]] = {}
        self._known_until: dict[str, float] = {}  # prompts waited for, or ended; oldest first
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
        """The prompt has come. Another one that had this name before is nobody's any more."""
        self.withdraw(transfer_id, now)
        offer = self._offers.get(transfer_id)
        if not self._known_until.pop(transfer_id, None) or offer is None or offer.has_ended:
            offer = self._offers[transfer_id] = _Offer()  # it is not waited for
        offer.request_id, offer.prompt_digest = request_id, prompt_digest
        offer.lease_s, offer.block_size = lease_s, block_size
        self._news.add(transfer_id)

    def wanted(self, transfer_id: str) -> int | None:
        """How many blocks of the prompt are leased; None: nobody listens."""
        offer = self._offers.get(transfer_id)
        return len(offer.block_ids) if offer and offer.readers and not offer.has_ended else None

    def leased(self, transfer_id: str) -> list[int]:
        """The blocks that were leased of a half computed prompt; the lease may have ended."""
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
        """These blocks are complete on every rank. The first ones come under a lease of this new
        id, later ones under the same. The lease's id; empty: that has ended, and the blocks stay
        the caller's."""
        offer = self._offers[transfer_id]
        if offer.has_ended:
            return ""
        if not offer.lease_id:
            self._table.grant(lease_id, offer.request_id, (), offer.lease_s, now, grows=True)
            self._name(transfer_id, offer, lease_id)
        more = list(block_ids)
        if not self._table.grow(offer.lease_id, more, now, seals=seals):
            return ""
        offer.block_ids += more
        if not seals:  # else it is told with the reference
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
        """The prompt is computed, and all of its blocks are under this lease, which ends at once
        where readers have come and given it up."""
        offer = self._offers.get(transfer_id)
        if offer is None or not offer.request_id:
            return
        if offer.lease_id != lease_id:  # which may have ended, and then is no name any more
            self._name(transfer_id, offer, lease_id)
        offer.block_ids, offer.reference = list(block_ids), reference
        if offer.is_given_up:
            self._table.abort(lease_id, now)
        self._news.add(transfer_id)

    def withdraw(self, transfer_id: str, now: float) -> None:
        """The prompt will never be complete; of one that is, nothing changes."""
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
        """A sign of life; what there is to tell, `take` returns."""
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
        offer.readers[asked.nonce] = _Reader(reader, asked.prompt_digest, asked.num_blocks)
        self._news.add(asked.transfer_id)
        return Ok(nonce=asked.nonce)

    def unsubscribe(self, nonce: str, name: str, now: float, *, lends: bool) -> None:
        """
        Args:
            name: the lease's; or the prompt's, of a reader who has not heard of a lease yet.
            lends: another one may subscribe.
        """
        offer = self._offers.get(self._by_lease.get(name, name))
        if offer is None:
            return
        offer.readers.pop(nonce, None)
        offer.is_given_up = not (lends or offer.readers)
        if offer.is_given_up and offer.reference:
            self._table.abort(offer.lease_id, now)

    def leave(self, reader: R) -> None:
        """All subscriptions of one."""
        for offer in self._offers.values():
            for nonce in [n for n, one in offer.readers.items() if one.reader == reader]:
                del offer.readers[nonce]

    def take(self, now: float, is_slow: Callable[[R], bool]) -> list[tuple[R, Progress | Gone]]:
        """What is to be told. Who is slow hears later, all of it at once."""
        found: list[tuple[R, Progress | Gone]] = []
        news, self._news = self._news, set()
        for transfer_id in news:
            offer = self._offers.get(transfer_id)
            if offer is None:
                continue
            for nonce, reader in list(offer.readers.items()):
                if is_slow(reader.reader):
                    self._news.add(transfer_id)
                elif reply := self._news_for(offer, nonce, reader):
                    found.append((reader.reader, reply))
            # Of a prompt that is still computed the end of its lease is remembered.
            if offer.has_ended and (offer.reference or not offer.request_id):
                self._offers[transfer_id] = _Offer(has_ended=True, readers=offer.readers)
                self._known_until.setdefault(transfer_id, now + KNOWN_S)
        return found + self._expired(now)

    def _expired(self, now: float) -> list[tuple[R, Progress | Gone]]:
        """Forgets the oldest, beside whom there may be no more than there is room for."""
        found: list[tuple[R, Progress | Gone]] = []
        while self._known_until:
            transfer_id, until = next(iter(self._known_until.items()))
            if until > now and len(self._known_until) <= _MAX_KNOWN:
                break
            del self._known_until[transfer_id]
            for nonce, reader in self._offers.pop(transfer_id).readers.items():
                found.append((reader.reader, Gone(nonce=nonce, reason="unknown")))
        return found

    def _news_for(self, offer: _Offer[R], nonce: str, reader: _Reader[R]) -> Progress | Gone | None:
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
