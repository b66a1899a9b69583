"""A region: host memory with the KV of one model, which outlives engines.

To engines, a region looks like an engine without a model. It has one rank, and moves KV
with the components of an engine: a coordinator and a worker pull the KV that engines
offer, and a lease server leases KV to engines that look up their prompts. So a region
and an engine may differ in tensor parallelism, layout and block size, like two engines.

    engine --Demote--> LeaseServer --> Demotions --pull--> blocks --> PrefixIndex
    engine --Lookup--> LeaseServer --> LookupAnswerer <-------------------'
           <--reference------------------'

One thread calls all methods, and owns the allocator and the index.
"""

import secrets
import time
from collections.abc import Callable

from engine.kv.references import LookupAnswerer, ReferenceMaker
from engine.store.demotions import Demotions
from engine.store.memory import RegionMemory, RegionOptions, region_layout
from kvcache.blocks import BlockAllocator, BlockState
from kvcache.groups import without_null_blocks
from kvcache.lease_server import LeaseServer
from kvcache.prefix import PrefixIndex
from kvcache.transfer.agent import TransferAgent
from kvcache.transfer.pulls.messages import PullSettings
from protocol.handshake import (
    DIGEST_VERSION,
    PROTOCOL_VERSION,
    EngineMetadata,
    LookupResult,
)
from protocol.ipc.kv_store import STORE_PREFIX, RegionOpened, RegionSpec
from protocol.metrics import stat_key

# The next call of `poll` answers lookups beyond this number.
_MAX_LOOKUPS_PER_POLL = 16
# Maximum number of ids in an offer, per token that the region can hold. An offer has
# token ids and block ids. An engine with tiny blocks, many layer groups and ranks that
# share tokens has several block ids per token.
_MAX_IDS_PER_TOKEN = 8


class Region:
    """The KV of one model in host memory.

    Args:
        make_agent: makes the agent that reads the memory of engines. The argument is
            the prefix of the agent's name.
        wake: makes the owner of this region call `poll` soon. Any thread may call it.

    Raises:
        RegionTooSmall: the region cannot hold one sequence.
        MemoryError: the memory cannot be allocated.
    """

    def __init__(
        self,
        spec: RegionSpec,
        options: RegionOptions,
        secret: bytes,
        make_agent: Callable[[str], TransferAgent],
        wake: Callable[[], None],
        *,
        settings: PullSettings | None = None,
        pull_clock: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = region_layout(spec, options)
        self.spec = spec
        self.engine_id = f"{STORE_PREFIX}{secrets.token_hex(8)}"
        self.incarnation = secrets.token_hex(8)
        self._clock = clock
        self._wake = wake
        self.memory = RegionMemory(
            spec,
            layout,
            options,
            secret,
            make_agent(self.engine_id),
            wake,
            settings=settings,
            clock=pull_clock,
        )
        self._coordinator = self.memory.coordinator
        self.allocator = BlockAllocator(layout.num_blocks)
        self.prefix = PrefixIndex(self.allocator, spec.block_size, self.memory.groups)
        self._num_evictions = 0
        self._count_evictions()
        self.num_tokens = (
            self.allocator.capacity // self.memory.groups.count * spec.block_size
        )
        try:
            self._leases = self._make_lease_server(options, secret)
        except Exception:
            self.memory.close()
            raise
        references = ReferenceMaker(
            host=options.host,
            port=self._leases.address[1],
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            lease_s=options.lease_s,
            block_size=spec.block_size,
            tp=1,
            dcp=1,
            num_groups=self.memory.groups.count,
        )
        self._lookups = LookupAnswerer(
            self.allocator, self.prefix, self._leases, references
        )
        self.demotions = Demotions(self.allocator, self.prefix, self._coordinator)
        self._leases.start()

    def _make_lease_server(self, options: RegionOptions, secret: bytes) -> LeaseServer:
        max_tokens = self.allocator.num_blocks * self.spec.block_size
        metadata = EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            compat=self.spec.compat,
            tp_size=1,
            ranks=[self.memory.metadata],
            digests=DIGEST_VERSION,
        )
        return LeaseServer(
            options.host,
            options.side_channel_port,
            metadata,
            secret,
            self._clock,
            on_event=self._wake,
            start_digest=self._coordinator.digest,
            max_lookup_tokens=max_tokens,
            max_demoted_ids=_MAX_IDS_PER_TOKEN * max_tokens,
        )

    def _count_evictions(self) -> None:
        remove_node = self.allocator.on_evict

        def on_evict(block: int) -> None:
            self._num_evictions += 1
            if remove_node is not None:
                remove_node(block)

        self.allocator.on_evict = on_evict

    @property
    def port(self) -> int:
        """The port of the side channel."""
        return self._leases.address[1]

    @property
    def is_idle(self) -> bool:
        """Whether no KV is being moved into the region or out of it."""
        has_leases = self.allocator.counts()[BlockState.LEASED] > 0
        return self.demotions.is_idle and not has_leases

    def poll(self) -> None:
        """Handles the events and messages that the region's threads have queued."""
        for event in self._coordinator.drain():
            self.demotions.on_event(event)
        for ended in self._leases.drain_ended():
            self.allocator.end_lease(without_null_blocks(ended.block_ids))
        now_s = self._clock()
        while self._leases.demotions:
            self.demotions.add(self._leases.demotions.popleft(), now_s)
        for _ in range(_MAX_LOOKUPS_PER_POLL):
            if not self._leases.lookups:
                break
            lookup, reader = self._leases.lookups.popleft()
            remote = self._lookups.answer(lookup)
            result = LookupResult(nonce=lookup.nonce, remote=remote)
            self._leases.answer_lookup(reader, result)
        else:
            self._wake()
        self.demotions.begin_pulls(now_s)

    def opened(self, nonce: str) -> RegionOpened:
        """Returns the reply to an engine that opens this region."""
        return RegionOpened(
            nonce=nonce,
            port=self.port,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            block_size=self.spec.block_size,
            num_tokens=self.num_tokens,
            stats=self.stats(),
        )

    def stats(self) -> dict[str, float]:
        """Returns the region's values by series, as in protocol.metrics.

        Engines report these values.
        """
        counts = self.allocator.counts()
        values = {
            stat_key("baton_host_kv_blocks", state=state.name.lower()): counts[state]
            for state in BlockState
        }
        values["baton_host_kv_capacity_tokens"] = self.num_tokens
        values["baton_host_kv_evicted_blocks"] = self._num_evictions
        values["baton_host_kv_demoted_bytes"] = self.demotions.num_bytes
        for outcome, count in self.demotions.outcomes.items():
            values[stat_key("baton_host_kv_offers", outcome=outcome)] = count
        return {name: float(value) for name, value in values.items()}

    def check_integrity(self) -> None:
        """Raises IntegrityError if the counts of blocks do not add up."""
        self.allocator.check_integrity()
        self.prefix.check_integrity()
        self.demotions.check_integrity()

    def close(self) -> None:
        """Ends all leases and pulls. The memory is freed when the region object is
        garbage-collected."""
        self.demotions.cancel_waiting()
        self.memory.close()
        self._leases.close()
