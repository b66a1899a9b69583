"""A prefill and a decode engine in one process: real roles, leases, side channel, coordinator,
pull worker and KV pools; the model is a shadow whose KV holds the tokens it claims to hold, and
the transport is the in-memory agent, which can stall and fail on command. `RealPair` has a real
model on both sides.

Whatever goes wrong, the output must be the continuation of the request's own prompt.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core.batch import StepInput
from engine.core.connector import KVConnector
from engine.core.core import EngineCore
from engine.geometry import kv_groups
from engine.kv.borrower import Borrower
from engine.kv.lender import Lender
from engine.worker.memory import make_memory
from engine.worker.runner import ModelRunner
from kvcache.layout import KVLayout
from kvcache.lease_server import LeaseServer
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.move.peer_memory import describe
from kvcache.transfer.peer import LocalRank, MappedPath
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.worker import TransferWorker
from model.config import load_config
from model.parallel import Parallel
from protocol import kv_params
from protocol.handshake import DIGESTS, CompatRecord
from protocol.messages import AbortRequest, AddRequest, SamplingParams
from tests.ports import kept_ports
from tests.rigs.lending import Lending
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import Clock, compat, metadata, pulls_address, take_a_round
from tests.rigs.memory_placer import MemoryPlacer
from tests.rigs.shadow import (
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_home,
    make_core,
)

SECRET = b"in-process secret"
COMPAT = compat(model_fingerprint="shadow", num_layers=2, total_kv_heads=2, head_dim=4)
_names = itertools.count()


class PoolExecutor(ShadowExecutor):
    """The shadow's token ids live in every element of their slots, in the KV pool of the rank that
    keeps them."""

    def __init__(self, pools: list[KVPool], stripes: list[Stripe], depth: int) -> None:
        super().__init__(pools[0].layout.num_blocks, stripes[0].tokens_per_block, depth)
        self._ranks = list(zip(pools, stripes, strict=True))

    def run(self, step: StepInput) -> Any:
        slots = step.attention_batch(self.block_size).slot_mapping
        for pool, stripe in self._ranks:
            local = stripe.local_slots(slots).tolist()
            for slot, token in zip(local, step.token_ids.tolist(), strict=True):
                block, offset = divmod(slot, stripe.block_size)
                if block:
                    pool.canonical[block, :, :, :, offset, :] = token + 1.0
        return super().run(step)

    def context(self, step: StepInput, row: int) -> list[int]:
        at = np.arange(int(step.context_lens[row]))
        tokens = np.zeros(len(at), np.int64)
        table = step.block_tables[row].astype(np.int64)
        for pool, stripe in self._ranks:
            own = at[at // stripe.block_size % stripe.size == stripe.rank]
            blocks, offsets = table[own // stripe.tokens_per_block], own % stripe.block_size
            rows = torch.from_numpy(blocks), torch.from_numpy(offsets)
            values = pool.canonical.permute(0, 4, 1, 2, 3, 5)[rows].flatten(1).float().numpy()
            assert (values == values[:, :1]).all(), "parts of a slot belong to different tokens"
            tokens[own] = values[:, 0].astype(np.int64) - 1
        return tokens.tolist()


@dataclass
class Movers:
    """What moves bytes to the ranks of an engine, whichever way: it stalls and fails on command, of
    several ranks some at random."""

    agents: list[MemoryAgent]
    placers: list[MemoryPlacer]
    rng: random.Random

    @property
    def active(self) -> int:
        return sum(agent.active for agent in self.agents)

    def stall(self) -> None:
        for agent in self.rng.sample(self.agents, self.rng.randint(1, len(self.agents))):
            agent.stall()
        for placer in self.placers:
            placer.stalled = True

    def resume(self) -> None:
        for agent in self.agents:
            agent.resume()
        for placer in self.placers:
            placer.stalled = False

    def fail(self, count: int = 1) -> None:
        self.rng.choice(self.agents).fail(count)
        for placer in self.placers:
            placer.num_failing = count


@dataclass
class Side:
    """One engine of the pair."""

    core: EngineCore
    executor: PoolExecutor
    out: MemoryTransport
    agent: Movers

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
        "transfer_address": f"inproc://pulls-{next(_names)}",
        **changes,
    }
    return EngineConfig(**fields)


class Pair:
    """A prefill engine and a decode engine, driven by hand round by round.

    Args:
        dcp: how many ranks D has, which share the tokens of sequences; `told_dcp` as its
            coordinator believes.
        launch_bytes: D copies out of P's mapped memory, so much at a time; None: it reads.
        rng: decides which ranks stall and fail.
    """

    compat = COMPAT
    limits: ClassVar[dict[str, Any]] = {}  # other than make_core's

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
        dcp: int = 1,
        told_dcp: int | None = None,
        launch_bytes: int | None = None,
        rng: random.Random | None = None,
        verify: str = "off",
    ) -> None:
        self.depth, self._rng = depth, rng or random.Random(0)
        self._verify = verify
        self._ports = ExitStack()
        (self._port,) = self._ports.enter_context(kept_ports(1))  # P's, also after its restart
        self.now_s = 1000.0  # P's clock, moved by hand
        self.clock = Clock()  # the coordinator's
        self._prefill = p_block_size, p_order, lease_s, p_compat or self.compat
        self._gone: list[Side] = []  # whose memory a READ that hangs may still name
        self._start_prefill(*self._prefill)
        stripes = [Stripe(rank, dcp, d_block_size) for rank in range(dcp)]
        pools = [self.make_pool(d_block_size, d_order) for _ in stripes]
        self._start_pulls(pools, settings or PullSettings(), told_dcp or dcp, launch_bytes)
        role = Borrower(self.coordinator, policy, quarantine_timeout_s)
        self.d = self._side(pools, stripes, role, self._movers)

    def make_pool(self, block_size: int, order: str) -> KVPool:
        return KVPool(KVLayout(order, 40, 2, 2, 2, block_size, 4, "float32"))

    def make_executor(self, pools: list[KVPool], stripes: list[Stripe]) -> Any:
        return PoolExecutor(pools, stripes, self.depth)

    def _side(
        self, pools: list[KVPool], stripes: list[Stripe], role: KVConnector, movers: Movers
    ) -> Side:
        executor = self.make_executor(pools, stripes)
        core, _, out = make_core(
            num_blocks=pools[0].layout.num_blocks,
            block_size=stripes[0].tokens_per_block,
            role=role,
            executor=executor,
            **self.limits,
        )
        return Side(core, executor, out, movers)

    def _start_prefill(
        self, block_size: int, order: str, lease_s: float, own: CompatRecord
    ) -> None:
        pool, agent = self.make_pool(block_size, order), MemoryAgent("p")
        agent.register(pool.base_address, pool.nbytes)
        config = self.config = make_config(lease_s=lease_s, block_size=block_size)
        told = metadata(
            describe(pool, 0, agent.metadata()),
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            compat=own,
            digests=DIGESTS,
        )
        self._lending = Lending(pulls_address(), [pool], own) if self._verify != "off" else None
        digest = {"digest": self._lending.coordinator.digest} if self._lending else {}
        address = "127.0.0.1", self._port
        self.leases = LeaseServer(*address, told, SECRET, lambda: self.now_s, **digest)
        self.leases.start()
        role, movers = Lender(config, self.leases), Movers([agent], [], self._rng)
        self.p = self._side([pool], [Stripe(0, 1, block_size)], role, movers)

    def _start_pulls(
        self, pools: list[KVPool], settings: PullSettings, dcp: int, launch_bytes: int | None
    ) -> None:
        address, heads, tp = pulls_address(), self.compat.total_kv_heads, len(pools)
        self.coordinator = PullCoordinator(
            address,
            tp,
            self.compat,
            SECRET,
            settings,
            clock=self.clock,
            dcp=dcp,
            block_size=pools[0].layout.block_size,
            verify=self._verify,
        )
        agents = [MemoryAgent(f"d{rank}") for rank in range(tp)]
        placers = [MemoryPlacer(pool) for pool in pools] if launch_bytes else []
        mapped = [MappedPath(placer, launch_bytes=launch_bytes) for placer in placers]
        ranks = [
            LocalRank(
                rank,
                tp,
                heads,
                agents[rank],
                pool,
                dcp=tp,
                staging_bytes=2**20,
                mapped=mapped[rank] if mapped else None,
            )
            for rank, pool in enumerate(pools)
        ]
        links = [self.coordinator, *[address] * (tp - 1)]
        self.workers = list(map(TransferWorker, ranks, links))
        for worker in self.workers:
            worker.start()
        self._movers = Movers(agents, placers, self._rng)

    def restart_prefill(self) -> None:
        """P ends, and another one comes at its address."""
        self._end_prefill()
        self._gone.append(self.p)
        self._start_prefill(*self._prefill)

    def close(self) -> None:
        self.d.agent.resume()
        for worker in self.workers:
            worker.close()
        self._end_prefill()
        self._ports.close()

    def _end_prefill(self) -> None:
        self.leases.close()
        if self._lending:
            self._lending.close()
        for agent in self.p.agent.agents:
            agent.close()

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

    def both(
        self,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        order: str = "pd",
        p_sampling: SamplingParams | None = None,
        transfer_id: str = "",
        **members: Any,
    ) -> tuple[str, str]:
        """Asks P and D at once, or in this order with rounds between; returns their names of it."""
        number, told = next(_names), {"stop_token_ids", "num_choices", "sampling"}
        names, (host, port) = (f"p{number}", f"d{number}"), self.leases.address
        asked = {name: value for name, value in members.items() if name in told}
        asked |= {"sampling": p_sampling} if p_sampling else {}
        offer = kv_params.Offer(
            transfer_id=transfer_id or names[0],
            engine_id=self.config.engine_id,
            incarnation=self.config.incarnation,
            host=host,
            port=port,
        )
        remote = offer.to_remote(0, prompt)
        ours = add(names[0], prompt, 1, retain_kv=True, transfer_id=remote.transfer_id, **asked)
        theirs = add(names[1], prompt, max_tokens, remote=remote, **members)
        for side in order:
            if side == "p":
                self.p.core.round([ours])
            elif side == "d":
                self.d.core.round([theirs])
                take_a_round(self.coordinator)
            else:
                self.until(lambda: bool(self.p.out.terminals(names[0])))
        return names

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
                side.core.scheduler.check_integrity()
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


class RealPair(Pair):
    """Both engines run `model` in float32; requests are answered one at a time."""

    limits: ClassVar[dict[str, Any]] = {"max_model_len": 400, "max_num_batched_tokens": 150}

    def __init__(
        self, model: Path, *, p_block_size: int, d_block_size: int, **options: Any
    ) -> None:
        self._model = model
        config = self._config = load_config(model)
        self.groups, self.dealt = kv_groups(config)
        self.limits = {**self.limits, "groups": self.groups}
        self.compat = compat(
            num_layers=config.num_layers,
            total_kv_heads=config.kv_heads_total,
            num_components=config.kv_components,
            head_dim=config.kv_dim,
            rope=config.rope_canonical,
            kv_windows=self.groups.to_wire(),
        )
        super().__init__(p_block_size=p_block_size, d_block_size=d_block_size, **options)

    def make_pool(self, block_size: int, order: str) -> KVPool:
        config = self._config
        sizes = config.kv_heads_total, max(map(len, self.dealt)), config.kv_components
        blocks = 120 * self.groups.count
        layout = KVLayout(order, blocks, *sizes, block_size, config.kv_dim, "float32")
        return KVPool(layout, groups=self.groups)

    def make_executor(self, pools: list[KVPool], stripes: list[Stripe]) -> Any:
        (pool,) = pools
        config = make_config(model_dir=str(self._model), block_size=pool.layout.block_size)
        runner = ModelRunner(config, self._config, Parallel())
        runner.memory = make_memory(config, self._config, runner.model, pool)
        return SimpleNamespace(depth=0, blocks_under_way=set, launch=runner.launch)

    def prefill_and_decode(self, request: AddRequest) -> MemoryTransport:
        """What D sends with P's reference."""
        name = f"p{next(_names)}"
        self.p.core.round([replace(request, request_id=name, max_tokens=1, retain_kv=True)])
        self.until(lambda: len(self.p.out.terminals(name)) == request.num_choices)
        offered = self.p.out.terminals(name)[0].kv_transfer_params
        params = kv_params.parse(offered)
        params.verify(SECRET)
        digest = kv_params.sampling_digest(request.sampling, request.stop_token_ids)
        assert params.sampling_digest == digest
        return self.decode_alone(replace(request, remote=kv_params.to_remote_prefill(params)))

    def decode_alone(self, request: AddRequest) -> MemoryTransport:
        out = self.d.out = self.d.core.transport = MemoryTransport()
        name = f"d{next(_names)}"  # a pull's name is used once
        self.d.core.round([replace(request, request_id=name)])
        self.until(lambda: len(out.terminals(name)) == request.num_choices)
        assert all(end.error is None for end in out.terminals(name))
        out.deltas = [replace(delta, request_id=request.request_id) for delta in out.deltas]
        return out
