"""A prefill and a decode engine in one process: real roles, leases, side channel, coordinator,
pull worker and KV pools; the model is a shadow whose KV holds the tokens it claims to hold, and
the transport is the in-memory agent, which can stall and fail on command.

Whatever goes wrong, the output must be the continuation of the request's own prompt.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from msgspec.structs import replace

from decode_server.connector import DecodeConnector
from decode_server.failure import FailurePolicy
from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.core.core import EngineCore
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.link.memory_agent import MemoryAgent
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.session.lease_server import LeaseServer
from kvcache.transfer.worker.mapped_job import MappedPath
from kvcache.transfer.worker.worker import TransferWorker
from prefill_server.connector import PrefillConnector
from protocol import kv_params
from protocol.handshake import PROTOCOL_VERSION, CompatRecord, EngineMetadata, RankMetadata
from protocol.messages import AbortRequest, AddRequest, SamplingParams
from tests.ports import kept_ports
from tests.rigs.memory_pair import Clock, pulls_address, take_a_round
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_home,
    make_core,
)

SECRET = b"in-process secret"
COMPAT = CompatRecord(
    model_fingerprint="shadow",
    kv_dtype="float32",
    num_layers=2,
    total_kv_heads=2,
    num_components=2,
    head_dim=4,
    rope="{}",
)
_names = itertools.count()


class PoolExecutor(ShadowExecutor):
    """The shadow's token ids live in every element of the slot in a real KV pool."""

    def __init__(self, kv: KVPool, depth: int) -> None:
        super().__init__(kv.layout.num_blocks, kv.layout.block_size, depth)
        self.kv = kv
        self.before_step: Callable[[], None] = lambda: None

    def run(self, step: StepInput) -> Any:
        self.before_step()
        if step.copies:
            self.kv.copy_blocks(step.copies)
        batch = step.attention_batch(self.block_size)
        for slot, token in zip(batch.slot_mapping.tolist(), step.token_ids.tolist(), strict=True):
            block, offset = divmod(slot, self.block_size)
            self.kv.canonical[block, :, :, :, offset, :] = token + 1.0
        return super().run(step)

    def context(self, step: StepInput, row: int) -> list[int]:
        length = int(step.context_lens[row])
        table = torch.from_numpy(step.block_tables[row].astype(np.int64))
        # [tokens, everything else]
        values = (
            self.kv.canonical[table].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length].flatten(1)
        )
        assert bool((values == values[:, :1]).all()), "parts of a slot belong to different tokens"
        return [int(v) - 1 for v in values[:, 0].tolist()]


@dataclass
class Side:
    """One engine of the pair."""

    core: EngineCore
    executor: PoolExecutor
    out: MemoryTransport
    agent: MemoryAgent

    def blocks_home(self) -> bool:
        counts = self.core.scheduler.allocator.counts()
        return counts[0] + counts[2] == self.core.scheduler.allocator.capacity  # FREE, CACHED


def make_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "role": "prefill",
        "engine_id": f"engine-{next(_names)}",
        "incarnation": f"{next(_names):016x}",
        "model_dir": "",
        "cluster_secret": SECRET,
        "http_address": "",
        "control_address": "",
        "transfer_address": f"inproc://pulls-{next(_names)}",
        **changes,
    }
    return EngineConfig(**fields)


class Pair:
    """A prefill engine and a decode engine, driven by hand round by round."""

    compat = COMPAT
    limits: ClassVar[dict[str, int]] = {}  # other than make_core's

    def __init__(
        self,
        *,
        p_block_size: int = 4,
        d_block_size: int = 4,
        p_order: str = "BHLCND",
        d_order: str = "BHLCND",
        policy: str = "recompute",
        lease_s: float = 30.0,
        settings: PullSettings | None = None,
        p_compat: CompatRecord | None = None,
        depth: int = 0,
        quarantine_timeout_s: float = 30.0,
        stripe: Stripe | None = None,
    ) -> None:
        self.depth = depth
        self._stripe = stripe  # as if D's ranks shared tokens
        self._quarantine_timeout_s = quarantine_timeout_s
        self._ports = ExitStack()
        (self._port,) = self._ports.enter_context(kept_ports(1))  # P's, also after its restart
        self.now_s = 1000.0  # P's clock, moved by hand
        self.clock = Clock()  # the coordinator's
        self._prefill = p_block_size, p_order, lease_s, p_compat or self.compat
        self._gone: list[Side] = []  # whose memory a READ that hangs may still name
        self._start_prefill(*self._prefill)
        self._start_decode(d_block_size, d_order, policy, settings or PullSettings())

    def make_pool(self, block_size: int, order: str) -> KVPool:
        return KVPool(KVLayout(order, 40, 2, 2, 2, block_size, 4, "float32"))

    def make_executor(self, pool: KVPool) -> Any:
        return PoolExecutor(pool, self.depth)

    def make_mapped(self, pool: KVPool) -> MappedPath | None:
        return None

    def shown(self, pool: KVPool, **members: Any) -> RankMetadata:
        """What P tells of its rank: nothing that others on its host could open."""
        return RankMetadata(**members)

    def _side(self, pool: KVPool, role: Any, agent: MemoryAgent) -> Side:
        executor = self.make_executor(pool)
        core, _, out = make_core(
            num_blocks=pool.layout.num_blocks,
            block_size=pool.layout.block_size,
            role=role,
            executor=executor,
            **self.limits,
        )
        return Side(core, executor, out, agent)

    def _start_prefill(
        self,
        block_size: int,
        order: str,
        lease_s: float,
        compat: CompatRecord,
    ) -> None:
        pool, agent = self.make_pool(block_size, order), MemoryAgent("p")
        agent.register(pool.base_address, pool.nbytes)
        config = make_config(lease_s=lease_s, block_size=block_size)
        rank = self.shown(
            pool,
            rank=0,
            agent_metadata=agent.metadata(),
            base_address=pool.base_address,
            nbytes=pool.nbytes,
            device_id=0,
            device_kind="cpu",
            layout=pool.layout.to_record(),
        )
        metadata = EngineMetadata(
            protocol_version=PROTOCOL_VERSION,
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            compat=compat,
            tp_size=1,
            ranks=[rank],
        )
        address = "127.0.0.1", self._port
        self.leases = LeaseServer(*address, metadata, SECRET, clock=lambda: self.now_s)
        self.leases.start()
        self.p = self._side(pool, PrefillConnector(config, self.leases), agent)

    def _start_decode(
        self, block_size: int, order: str, policy: str, settings: PullSettings
    ) -> None:
        pool, agent = self.make_pool(block_size, order), MemoryAgent("d")
        address = pulls_address()
        self.coordinator = PullCoordinator(
            address,
            1,
            self.compat,
            SECRET,
            settings,
            clock=self.clock,
            stripe=self._stripe,
        )
        self.coordinator.start()
        self.worker = TransferWorker(
            0,
            1,
            self.compat.total_kv_heads,
            agent,
            pool,
            address,
            staging_bytes=2**20,
            mapped=self.make_mapped(pool),
        )
        self.worker.start()
        role = DecodeConnector(self.coordinator, FailurePolicy(policy), self._quarantine_timeout_s)
        self.d = self._side(pool, role, agent)

    def restart_prefill(self) -> None:
        """P ends, and another one comes at its address."""
        self.leases.close()
        self.p.agent.close()
        self._gone.append(self.p)
        self._start_prefill(*self._prefill)

    def close(self) -> None:
        self.coordinator.close()
        self.worker.close()
        self.leases.close()
        self.p.agent.close()
        self._ports.close()

    def prefill(self, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
        """Runs the prompt on P and returns what it would answer."""
        name = f"p{next(_names)}"
        self.p.core.round([add(name, prompt, 1, retain_kv=True, **members)])
        self.until(lambda: bool(self.p.out.terminals(name)))
        params = self.p.out.terminals(name)[0].kv_transfer_params
        assert params is not None
        return params

    def ask(
        self,
        prompt: Sequence[int],
        params: dict[str, Any],
        max_tokens: int = 6,
        sampling: SamplingParams | None = None,
        *,
        aborted: bool = False,
        redrawn: bool = False,
        **members: Any,
    ) -> str:
        """Gives D the request with its reference (`redrawn`: without first tokens), and an abort
        at once if told so; returns its name."""
        name = f"d{next(_names)}"
        parsed = kv_params.parse(params)
        parsed.verify(SECRET)
        lent = kv_params.sender_releases(params)
        remote = kv_params.to_remote_prefill(parsed, sender_releases=lent)
        request = AddRequest(
            request_id=name,
            token_ids=list(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            remote=replace(remote, first_tokens=[]) if redrawn else remote,
            **members,
        )
        self.d.core.round([request, AbortRequest(name)] if aborted else [request])
        return name

    def skip(self, seconds: float) -> None:
        """Pulls that take longer by the coordinator's clock take too long."""
        self.clock.skip(seconds)
        take_a_round(self.coordinator)

    def until(
        self,
        condition: Callable[[], bool],
        timeout_s: float = 60.0,
        sides: Sequence[Side] | None = None,
    ) -> None:
        """Rounds of both engines, or of these, until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            progressed = False
            for side in sides or (self.p, self.d):
                progressed |= side.core.round([])
                side.core.check_integrity()
            if not progressed:
                threading.Event().wait(0.002)  # the threads' turn

    def answer(self, name: str) -> list[int]:
        (tokens,) = self.answers(name, 1)
        return tokens

    def answers(self, name: str, num_choices: int) -> list[list[int]]:
        self.until(lambda: len(self.d.out.terminals(name)) == num_choices)
        assert all(end.error is None for end in self.d.out.terminals(name))
        return [self.d.out.tokens(name, choice) for choice in range(num_choices)]

    def usage(self, name: str) -> tuple[int, int, int]:
        usage = self.d.out.terminals(name)[0].usage
        assert usage is not None
        return usage.transferred, usage.recomputed, usage.skipped

    def settle(self) -> None:
        """Every block comes home on both sides."""
        self.until(lambda: self.p.blocks_home() and self.d.blocks_home())
        assert_all_blocks_home(self.p.core)
        assert_all_blocks_home(self.d.core)
