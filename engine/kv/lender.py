"""The half of an engine that lends: blocks pass from USED to LEASED, and a reference says how to
read them.

The lease server's thread owns the leases and answers borrowers without waiting for a step; this
half grants leases and, each round, gives the blocks of ended ones back to the allocator.
"""

from itertools import accumulate, islice
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.core.connector import KVConnector
from engine.core.sequence import Sequence
from kvcache.blocks import BlockState
from kvcache.groups import without_null_blocks
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.lease_client import new_id
from protocol import kv_params
from protocol.handshake import Lookup, LookupResult
from protocol.messages import FirstToken, RemotePrefill, call_of
from protocol.metrics import stat_key

_MAX_LOOKUPS = 4  # answered between two steps
# Of the pool, that lookups may keep from running sequences, and where who waits needs no more.
_MAX_LENT_SHARE = 0.5


class Lender(KVConnector):
    """Retains, leases, releases."""

    def __init__(self, config: EngineConfig, leases: LeaseServer) -> None:
        self._config = config
        self._leases = leases
        self._by_request: dict[
            str, str
        ] = {}  # lease ids of ended requests and of lookups
        self._named: dict[
            str, str
        ] = {}  # whose a transfer id is: two requests may come with one
        self._lookups = dict.fromkeys(("found", "none", "full"), 0)
        self._stands = False  # as of the scheduler, at the last look

    def expect(self, sequence: Sequence) -> None:
        """A prompt has come, which may be subscribed to."""
        if name := sequence.request.transfer_id:
            request, config = sequence.request, self._config
            digest = kv_params.prompt_digest(request.token_ids, request.cache_salt)
            size = config.block_size
            with self._leases.offers() as (offers, now):
                offers.expect(
                    name, sequence.request_id, digest, config.lease_s, size, now
                )
            self._named[name] = sequence.request_id

    def _name_of(self, sequence: Sequence) -> str:
        """Its transfer id; empty where it has none, or has lost it to a later request."""
        name = sequence.request.transfer_id or ""
        return name if self._named.get(name) == sequence.request_id else ""

    def on_computed(self, sequence: Sequence) -> None:
        """Leases what is full of the prompt to who listens. It stays so though the sequence be
        preempted: it finds these blocks in the prefix index then, so that it needs no others."""
        name, scheduler = self._name_of(sequence), self.core.scheduler
        if scheduler.prefix is None or sequence.num_computed >= len(sequence.token_ids):
            return  # as another one would, or on_finish does
        if scheduler.limits.groups.drops_blocks:
            return  # preempted, it would not find what its windows have passed
        with self._leases.offers() as (offers, _):
            first = offers.num_leased_blocks(name)
        num_full = sequence.num_computed // self._config.block_size
        if first is not None and first < num_full:
            self._grow(sequence, name, sequence.block_ids[first:num_full])

    def _grow(
        self, sequence: Sequence, name: str, blocks: list[int], *, seals: bool = False
    ) -> str:
        """The lease's id; empty: it has ended."""
        with self._leases.offers() as (offers, now):
            lease_id = offers.grow(name, new_id(), blocks, now, seals=seals)
        if lease_id:
            self.core.scheduler.allocator.lease(without_null_blocks(blocks))
            self._by_request[sequence.request_id] = lease_id
        return lease_id

    def on_end(self, sequence: Sequence) -> None:
        if name := self._name_of(sequence):
            del self._named[name]
            with self._leases.offers() as (offers, now):
                offers.withdraw(name, now)

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        if not (
            sequence.is_moving or (sequence.request.retain_kv and not sequence.choice)
        ):
            return None  # one choice answers for all
        is_whole = (
            sequence.is_moving and len(sequence.choices) == 1
        )  # else what all have in common
        num_tokens = sequence.num_computed if is_whole else sequence.num_prompt_tokens
        if (
            sequence.is_moving
            and not is_whole
            and self.core.scheduler.limits.groups.drops_blocks
        ):
            return None  # the windows of the prompt's end have passed
        table = self.core.scheduler.tables.of_prompt(sequence, num_tokens)
        name = self._name_of(sequence)
        with self._leases.offers() as (offers, _):
            leased = offers.leased_blocks(name)
        lease_id = (
            self._grow(sequence, name, table[len(leased) :], seals=True)
            if leased
            else ""
        )
        block_ids = [*leased, *table[len(leased) :]] if lease_id else table
        if not lease_id:  # or it has ended, and another reader may come
            self.core.scheduler.allocator.lease(without_null_blocks(table))
            lease_id = self._leases.grant(
                sequence.request_id, table, self._config.lease_s
            )
            self._by_request[sequence.request_id] = lease_id
        try:
            params = self._params(sequence, block_ids, lease_id, num_tokens)
        except Exception:
            self._leases.abort(lease_id)  # nobody will hear of it
            raise
        if name:
            reference = msgspec.json.encode(params)
            with self._leases.offers() as (offers, now):
                offers.finish(name, lease_id, block_ids, reference, now)
        return params

    def _params(
        self, sequence: Sequence, block_ids: list[int], lease_id: str, num_tokens: int
    ) -> dict[str, Any]:
        request, sampling = sequence.request, sequence.request.sampling
        digest = kv_params.sampling_digest(sampling, request.stop_token_ids)
        remote = self._reference(
            sequence.request_id,
            block_ids,
            lease_id,
            num_tokens,
            prompt_digest=kv_params.prompt_digest(
                sequence.token_ids[:num_tokens], request.cache_salt
            ),
            cached_tokens=sequence.num_skipped + sequence.num_transferred,
            transferred_tokens=sequence.num_transferred,
            first_tokens=[
                FirstToken(choice.token_ids[choice.first_output], choice.first_logprobs)
                for choice in sequence.choices
                if len(choice.token_ids) > choice.first_output
            ],
            prompt_logprobs=None if sequence.is_moving else sequence.prompt_logprobs,
        )
        return kv_params.build(
            self._config.cluster_secret, remote, digest, sampling.seed
        ).to_json()

    def _reference(
        self,
        name: str,
        block_ids: list[int],
        lease_id: str,
        num_tokens: int,
        **found: Any,
    ) -> RemotePrefill:
        """Blocks as readers see them: of ranks that share tokens each has its own."""
        config = self._config
        num_blocks = (
            -(-num_tokens // config.block_size)
            * self.core.scheduler.limits.groups.count
        )
        return RemotePrefill(
            host=config.side_channel_advertise,
            port=self._leases.address[1],
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            request_id=name,
            lease_id=lease_id,
            lease_s=config.lease_s,
            block_ids=[block for block in block_ids for _ in range(config.dcp)][
                :num_blocks
            ],
            block_size=config.block_size,
            num_tokens=num_tokens,
            tp_size=config.tp,
            **found,
        )

    def on_abort_unknown(self, request_id: str) -> None:
        """The client went away after the prompt was done: nobody will come for its KV."""
        if lease_id := self._by_request.get(request_id):
            self._leases.abort(lease_id)

    def take_back(self, remote: RemotePrefill) -> bool:
        """Ends the lease of a reference that is of no use; whether it is this engine's."""
        is_ours = remote.engine_id == self._config.engine_id
        return is_ours and (self._leases.abort(remote.lease_id) or True)

    def poll(self) -> None:
        for ended in self._leases.drain_ended():
            self.core.scheduler.allocator.end_lease(
                without_null_blocks(ended.block_ids)
            )
            if self._by_request.get(ended.request_id) == ended.lease_id:
                del self._by_request[ended.request_id]
        self._let_lent_go_on()
        for _ in range(_MAX_LOOKUPS):
            if not self._leases.lookups:
                return
            asked, reader = self._leases.lookups.popleft()
            self._leases.answer_lookup(
                reader, LookupResult(nonce=asked.nonce, remote=self._look_up(asked))
            )
        self.core.wake()  # for those that are left

    def _let_lent_go_on(self) -> None:
        """Where nobody fits beside what is lent of half a prompt, or of some of a call's, its rest
        goes first: what is lent comes home only then. If there are several such prompts they
        take turns, as one of them may be in another's way."""
        waiting, stood = self.core.scheduler.waiting, self._stands
        self._stands = self.core.scheduler.stands
        if not (stood and self._stands and self._by_request):
            return
        calls = {call_of(name) for name in self._by_request}
        if lent := [each for each in waiting if call_of(each.request_id) in calls]:
            waiting.remove(lent[-1])
            waiting.appendleft(lent[-1])

    def _look_up(self, asked: Lookup) -> RemotePrefill | None:
        """Leases the longest prefix that is here, whoever else uses its blocks."""
        scheduler = self.core.scheduler
        tables = scheduler.tables
        found: list[int] = []
        if scheduler.prefix is not None:
            found = scheduler.prefix.match(asked.token_ids, salt=asked.cache_salt)
        if tables.num_tokens(found) < asked.min_tokens:
            self._lookups["none"] += 1
            return None
        allocator = scheduler.allocator
        needed = [
            tables.num_blocks_for(s, len(s.token_ids))
            for s in islice(scheduler.waiting, 1)
        ]
        most = min(
            allocator.capacity * _MAX_LENT_SHARE, allocator.capacity - sum(needed)
        )
        room = most - allocator.counts()[BlockState.LEASED]
        taken = accumulate(
            allocator.state(block) is BlockState.CACHED for block in found
        )
        block_ids = [
            block for block, num in zip(found, taken, strict=True) if num <= room
        ]
        if scheduler.limits.groups.drops_blocks and len(block_ids) < len(found):
            block_ids = []  # of a shorter one the windows may be gone
        num_tokens = tables.num_tokens(block_ids)
        if not block_ids or num_tokens < asked.min_tokens:
            self._lookups["full"] += 1
            return None
        self._lookups["found"] += 1
        allocator.lease(without_null_blocks(block_ids))
        lease_id = self._leases.grant(asked.nonce, block_ids, self._config.lease_s)
        self._by_request[asked.nonce] = lease_id
        about = asked.nonce, block_ids, lease_id, num_tokens
        return self._reference(*about, cached_tokens=num_tokens, first_tokens=[])

    def stats(self) -> dict[str, float]:
        counters = self._leases.counters()
        ended = {
            stat_key("baton_leases", event=event): float(counters[event])
            for event in ("granted", "completed", "expired", "aborted")
        }
        found = self._lookups.items()
        return {
            **{
                stat_key("baton_kv_lookups_answered", outcome=o): float(n)
                for o, n in found
            },
            **ended,
            "baton_leases_held": float(len(self._by_request)),
            "baton_lease_renewals": float(counters["renewed"]),
            "baton_lease_gone": float(counters["gone"]),
        }

    def close(self) -> None:
        self._leases.close()
