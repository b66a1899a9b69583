"""The lender component of an engine: leases KV blocks to other engines.

A leased block that no sequence uses has the state LEASED. A signed reference contains
all data that a reader needs to read leased blocks. The lease server stores the leases.
Its thread answers borrowers without waiting for a step. The lender grants leases on the
core's thread. In each round of the core, it returns the blocks of ended leases to the
allocator.
"""

from collections.abc import Callable
from collections.abc import Sequence as Sequenceable
from itertools import islice
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.core.connector import CoreServices, KVConnector
from engine.core.sequence import Sequence
from engine.kv.references import LookupAnswerer, ReferenceMaker
from kvcache.groups import without_null_blocks
from kvcache.lease import EndedLease
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.lease_client import new_id
from protocol import kv_params
from protocol.handshake import Lookup, LookupResult
from protocol.messages import FirstToken, RemotePrefill, TokenLogprobs, http_request_id
from protocol.metrics import stat_key

_MAX_LOOKUPS_PER_ROUND = 4


class Lender(KVConnector):
    """Leases the KV of prompts to other engines, and ends these leases.

    Attributes:
        references: makes the references to leased blocks; set by `bind`.
        on_lease_ended: called with each lease that has ended.
    """

    references: ReferenceMaker

    def __init__(self, config: EngineConfig, leases: LeaseServer) -> None:
        self._config = config
        self._leases = leases
        self.on_lease_ended: Callable[[EndedLease], None] = lambda ended: None
        # Ids of the leases that have not ended, by request id, or by the nonce of a
        # lookup.
        self._lease_ids: dict[str, str] = {}
        # Request ids by transfer id. If two requests use the same transfer id, the id
        # belongs to the later request.
        self._offering_requests: dict[str, str] = {}
        # Whether the scheduler was deadlocked at the last call of `poll`.
        self._was_deadlocked = False

    def bind(self, core: CoreServices) -> None:
        super().bind(core)
        config = self._config
        self.references = ReferenceMaker(
            host=config.side_channel_advertise,
            port=self._leases.address[1],
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            lease_s=config.lease_s,
            block_size=config.block_size,
            tp=config.tp,
            dcp=config.dcp,
            num_groups=core.scheduler.limits.groups.count,
        )
        self._lookups = LookupAnswerer(
            core.scheduler.allocator,
            core.scheduler.prefix,
            self._leases,
            self.references,
            self._num_drafted,
        )

    def _num_drafted(self, token_ids: Sequenceable[int], table: list[int]) -> int:
        return self.core.speculator.num_drafted(token_ids, table)

    def offer_prompt(self, sequence: Sequence) -> None:
        """Announces a new prompt, so that borrowers can subscribe to it. Does nothing
        if the request has no transfer id.
        """
        transfer_id = sequence.request.transfer_id
        if not transfer_id:
            return
        request = sequence.request
        config = self._config
        digest = kv_params.prompt_digest(request.token_ids, request.cache_salt)
        with self._leases.offers() as (offers, now):
            offers.expect(
                transfer_id,
                sequence.request_id,
                digest,
                config.lease_s,
                config.block_size,
                now,
            )
        self._offering_requests[transfer_id] = sequence.request_id

    def _transfer_id(self, sequence: Sequence) -> str:
        """The transfer id of a sequence. Empty if the request has no transfer id, or if
        the id now belongs to a later request."""
        transfer_id = sequence.request.transfer_id or ""
        request_id = self._offering_requests.get(transfer_id)
        return transfer_id if request_id == sequence.request_id else ""

    def on_computed(self, sequence: Sequence) -> None:
        """Leases the prompt's blocks that are full and not yet leased, if a borrower
        has subscribed to the prompt.

        The blocks stay leased if the sequence is preempted. When the sequence is
        admitted again, it finds these blocks in the prefix index, so it needs no other
        blocks for their tokens.
        """
        transfer_id = self._transfer_id(sequence)
        scheduler = self.core.scheduler
        if scheduler.prefix is None:
            return
        if sequence.num_computed >= len(sequence.token_ids):
            return  # the prompt is complete: on_finish leases the rest
        if scheduler.limits.groups.drops_blocks:
            # After a preemption, the prefix index may lack blocks before the sequence's
            # windows. The sequence would then need other blocks in addition to the
            # leased blocks. So nothing is leased before the prompt is complete.
            return
        with self._leases.offers() as (offers, _):
            first_block = offers.num_leased_blocks(transfer_id)
        num_full = sequence.num_computed // self._config.block_size
        if first_block is not None and first_block < num_full:
            block_ids = sequence.block_ids[first_block:num_full]
            self._grow_lease(sequence, transfer_id, block_ids)

    def _grow_lease(
        self,
        sequence: Sequence,
        transfer_id: str,
        block_ids: list[int],
        *,
        seals: bool = False,
    ) -> str:
        """Adds blocks to the lease of an offer; the first blocks create the lease.
        Returns the id of the lease; empty if the lease has ended.

        Args:
            seals: whether the blocks complete the prompt.
        """
        with self._leases.offers() as (offers, now):
            lease_id = offers.grow(transfer_id, new_id(), block_ids, now, seals=seals)
        if lease_id:
            self.core.scheduler.allocator.lease(without_null_blocks(block_ids))
            self._lease_ids[sequence.request_id] = lease_id
        return lease_id

    def on_end(self, sequence: Sequence) -> None:
        transfer_id = self._transfer_id(sequence)
        if transfer_id:
            del self._offering_requests[transfer_id]
            with self._leases.offers() as (offers, now):
                offers.withdraw(transfer_id, now)

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        choices = sequence.choices
        is_migrating = choices.migrating is sequence
        is_retained = sequence.request.retain_kv and choices.parent is sequence
        if not (is_migrating or is_retained):
            return None  # no KV is requested, or choice 0 leases it for all choices
        # A migrated request with one choice also leases the KV of its outputs. Several
        # choices have only the prompt in common.
        includes_outputs = is_migrating and len(choices) == 1
        num_tokens = sequence.num_prompt_tokens
        if includes_outputs:
            num_tokens = sequence.num_computed
        has_windows = self.core.scheduler.limits.groups.drops_blocks
        if is_migrating and not includes_outputs and has_windows:
            return None  # blocks at the end of the prompt may have been released
        table = self.core.scheduler.tables.leased_table(sequence, num_tokens)
        transfer_id = self._transfer_id(sequence)
        block_ids, lease_id = self._lease_table(sequence, transfer_id, table)
        try:
            params = self._kv_transfer_params(sequence, block_ids, lease_id, num_tokens)
        except Exception:
            self._leases.abort(lease_id)  # no reader gets a reference to this lease
            raise
        if transfer_id:
            reference = msgspec.json.encode(params)
            with self._leases.offers() as (offers, now):
                offers.finish(transfer_id, lease_id, block_ids, reference, now)
        return params

    def _lease_table(
        self, sequence: Sequence, transfer_id: str, table: list[int]
    ) -> tuple[list[int], str]:
        """Leases all blocks of a table. Adds them to the lease of the offer if that is
        possible, and otherwise grants a new lease. Returns the leased blocks and the id
        of the lease."""
        with self._leases.offers() as (offers, _):
            leased = offers.leased_blocks(transfer_id)
        if leased:
            rest = table[len(leased) :]
            lease_id = self._grow_lease(sequence, transfer_id, rest, seals=True)
            if lease_id:
                return [*leased, *rest], lease_id
        # No lease can grow, so a new lease is granted. This is useful even if the
        # offer's lease has ended, because a second reader may still pull the KV.
        self.core.scheduler.allocator.lease(without_null_blocks(table))
        lease_id = self._leases.grant(sequence.request_id, table, self._config.lease_s)
        self._lease_ids[sequence.request_id] = lease_id
        return table, lease_id

    def _kv_transfer_params(
        self, sequence: Sequence, block_ids: list[int], lease_id: str, num_tokens: int
    ) -> dict[str, Any]:
        """Returns the kv_transfer_params of the response, with a signed reference."""
        request = sequence.request
        sampling = request.sampling
        accounting = sequence.accounting
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        is_migrating = sequence.choices.migrating is sequence
        if sequence.prompt_logprobs is not None and not is_migrating:
            prompt_logprobs = sequence.prompt_logprobs.values
        remote = self.references.make(
            sequence.request_id,
            block_ids,
            lease_id,
            num_tokens,
            prompt_digest=kv_params.prompt_digest(
                sequence.token_ids[:num_tokens], request.cache_salt
            ),
            cached_tokens=accounting.num_skipped + accounting.num_transferred,
            transferred_tokens=accounting.num_transferred,
            drafted_tokens=self._num_drafted(
                sequence.token_ids[:num_tokens], sequence.block_ids
            ),
            first_tokens=[
                FirstToken(
                    choice.token_ids[choice.first_output],
                    choice.sampling.first_logprobs,
                )
                for choice in sequence.choices
                if len(choice.token_ids) > choice.first_output
            ],
            prompt_logprobs=prompt_logprobs,
        )
        digest = kv_params.sampling_digest(sampling, request.stop_token_ids)
        params = kv_params.build(
            self._config.cluster_secret, remote, digest, sampling.seed
        )
        return params.to_json()

    def on_abort_unknown(self, request_id: str) -> None:
        """Ends the lease on a finished prompt after its client has disconnected."""
        if lease_id := self._lease_ids.get(request_id):
            self._leases.abort(lease_id)

    def end_local_lease(self, remote: RemotePrefill) -> bool:
        """Ends the lease of an unused reference if this engine made the reference.
        Returns whether this engine made it."""
        if remote.engine_id != self._config.engine_id:
            return False
        self._leases.abort(remote.lease_id)
        return True

    def poll(self) -> None:
        for ended in self._leases.drain_ended():
            self.core.scheduler.allocator.end_lease(
                without_null_blocks(ended.block_ids)
            )
            if self._lease_ids.get(ended.request_id) == ended.lease_id:
                del self._lease_ids[ended.request_id]
            self.on_lease_ended(ended)
        self._advance_leased_prompts()
        for _ in range(_MAX_LOOKUPS_PER_ROUND):
            if not self._leases.lookups:
                return
            lookup, reader = self._leases.lookups.popleft()
            result = LookupResult(nonce=lookup.nonce, remote=self._look_up(lookup))
            self._leases.answer_lookup(reader, result)
        self.core.wake()  # so that the next call of `poll` answers more lookups

    def _advance_leased_prompts(self) -> None:
        """Moves a waiting prompt to the head of the queue, if leases keep every waiting
        request from running, and a lease can end only after this prompt is computed.

        Such a lease is on blocks that the prompt filled before a preemption, or on
        blocks of another prompt of the same HTTP request. If the queue has several such
        prompts, each round moves the last of them to the head, so that all are tried.
        """
        was_deadlocked = self._was_deadlocked
        self._was_deadlocked = self.core.scheduler.is_deadlocked
        if not (was_deadlocked and self._was_deadlocked and self._lease_ids):
            return
        waiting = self.core.scheduler.waiting
        leasing_http_ids = {http_request_id(name) for name in self._lease_ids}
        for sequence in reversed(waiting):
            if http_request_id(sequence.request_id) in leasing_http_ids:
                waiting.remove(sequence)
                waiting.appendleft(sequence)
                return

    def _look_up(self, lookup: Lookup) -> RemotePrefill | None:
        """Leases the longest cached prefix of a prompt; see LookupAnswerer. Leaves
        enough blocks for the first waiting request."""
        scheduler = self.core.scheduler
        num_needed = 0
        for sequence in islice(scheduler.waiting, 1):
            num_needed = scheduler.tables.num_blocks_for(
                sequence, len(sequence.token_ids)
            )
        remote = self._lookups.answer(lookup, num_needed)
        if remote is not None:
            self._lease_ids[lookup.nonce] = remote.lease_id
        return remote

    def stats(self) -> dict[str, float]:
        counters = self._leases.counters()
        values = {
            "baton_leases_held": float(len(self._lease_ids)),
            "baton_lease_renewals": float(counters["renewed"]),
            "baton_lease_gone": float(counters["gone"]),
        }
        values |= self._lookups.stats()
        for event in ("granted", "completed", "expired", "aborted"):
            values[stat_key("baton_leases", event=event)] = float(counters[event])
        return values

    def close(self) -> None:
        self._leases.close()
