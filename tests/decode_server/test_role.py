"""A prefill and a decode engine in one process: real roles, leases, side channel, coordinator,
pull worker and KV pools; the model is a shadow whose KV holds the tokens it claims to hold, and
the transport is the in-memory agent, which can stall and fail on command.

Whatever goes wrong, the output must be the continuation of the request's own prompt.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from decode_server.failure import FailurePolicy
from decode_server.role import DecodeRole, QuarantineOverflow
from engine.batch import StepInput
from engine.config import EngineConfig
from engine.core import EngineCore
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.coordinator import PullCoordinator
from kvcache.transfer.memory_agent import MemoryAgent
from kvcache.transfer.pull import PullSettings
from kvcache.transfer.pull_worker import PullWorker
from kvcache.transfer.side_channel import LeaseServer
from prefill_server.role import PrefillRole
from protocol import kv_params
from protocol.handshake import PROTOCOL_VERSION, CompatRecord, EngineMetadata, RankMetadata
from protocol.messages import AbortRequest, AddRequest, FirstToken, ReleaseRemote, SamplingParams
from tests.engine.shadow import (
    VOCAB,
    MemoryTransport,
    ShadowExecutor,
    add,
    assert_all_blocks_home,
    expected_output,
    make_core,
)

_SECRET = b"in-process secret"
_COMPAT = CompatRecord(
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


def _config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "role": "prefill",
        "engine_id": f"engine-{next(_names)}",
        "incarnation": f"{next(_names):016x}",
        "model_dir": "",
        "cluster_secret": _SECRET,
        "input_address": "",
        "output_address": "",
        "control_address": "",
        "transfer_address": f"inproc://pulls-{next(_names)}",
        **changes,
    }
    return EngineConfig(**fields)


def _pool(block_size: int, order: str, num_blocks: int) -> KVPool:
    return KVPool(KVLayout(order, num_blocks, 2, 2, 2, block_size, 4, "float32"))


def _side(pool: KVPool, role: Any, agent: MemoryAgent, depth: int) -> Side:
    executor = PoolExecutor(pool, depth)
    core, _, out = make_core(
        num_blocks=pool.layout.num_blocks,
        block_size=pool.layout.block_size,
        role=role,
        executor=executor,
    )
    return Side(core, executor, out, agent)


class Pair:
    """A prefill engine and a decode engine, driven by hand round by round."""

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
        p_compat: CompatRecord = _COMPAT,
        depth: int = 0,
    ) -> None:
        self.depth = depth
        self.now_s = 1000.0  # P's clock, moved by hand
        self._start_prefill(p_block_size, p_order, lease_s, p_compat)
        self._start_decode(d_block_size, d_order, policy, settings or PullSettings())

    def _start_prefill(
        self, block_size: int, order: str, lease_s: float, compat: CompatRecord
    ) -> None:
        pool, agent = _pool(block_size, order, 40), MemoryAgent("p")
        agent.register(pool.base_address, pool.nbytes)
        config = _config(lease_s=lease_s, block_size=block_size)
        rank = RankMetadata(
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
        self.leases = LeaseServer("127.0.0.1", 0, metadata, _SECRET, clock=lambda: self.now_s)
        self.leases.start()
        self.p = _side(pool, PrefillRole(config, self.leases), agent, self.depth)

    def _start_decode(
        self, block_size: int, order: str, policy: str, settings: PullSettings
    ) -> None:
        pool, agent = _pool(block_size, order, 40), MemoryAgent("d")
        self.coordinator = PullCoordinator("tcp://127.0.0.1:0", 1, _COMPAT, _SECRET, settings)
        self.coordinator.start()
        address = self.coordinator.worker_address
        self.worker = PullWorker(0, 1, 2, agent, pool, address, staging_bytes=2**20)
        self.worker.start()
        role = DecodeRole(self.coordinator, FailurePolicy(policy))
        self.d = _side(pool, role, agent, self.depth)

    def close(self) -> None:
        self.coordinator.close()
        self.worker.close()
        self.leases.close()
        self.p.agent.close()

    def prefill(self, prompt: Sequence[int], **members: Any) -> dict[str, Any]:
        """Runs the prompt on P and returns what it would answer."""
        name = f"p{next(_names)}"
        self.p.core.round([add(name, prompt, 1, retain_kv=True, **members)])
        self.until(lambda: bool(self.p.out.terminals(name)))
        params = self.p.out.terminals(name)[0].kv_transfer_params
        assert params is not None
        return params

    def ask(
        self, prompt: Sequence[int], params: dict[str, Any], max_tokens: int = 6, **members: Any
    ) -> str:
        """Gives D the request with its reference; returns its name."""
        name = f"d{next(_names)}"
        parsed = kv_params.parse(params)
        parsed.verify(_SECRET)
        request = AddRequest(
            request_id=name,
            token_ids=list(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            remote=kv_params.to_remote_prefill(parsed),
            **members,
        )
        self.d.core.round([request])
        return name

    def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Rounds of both engines until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            progressed = self.p.core.round([]) | self.d.core.round([])
            self.p.core.check_integrity()
            self.d.core.check_integrity()
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


@pytest.fixture(params=[0, 1], ids=["synchronous", "ahead"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(depth=request.param, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


MakePair = Callable[..., Pair]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13, 14])
def test_pulled_kv_continues_the_prompt(make_pair: MakePair, length: int) -> None:
    pair, prompt = make_pair(), PROMPT[:length]
    name = pair.ask(prompt, pair.prefill(prompt))
    assert pair.answer(name) == expected_output(prompt, 6)
    assert pair.usage(name) == (length, 0, 0)
    pair.settle()


@pytest.mark.parametrize(
    ("p_block", "d_block", "p_order", "d_order"),
    [(4, 8, "BHLCND", "BHLCND"), (8, 3, "LCBNHD", "BHLCND"), (6, 4, "BHLCND", "LBCNHD")],
)
def test_unequal_geometries_are_bridged(
    make_pair: MakePair, p_block: int, d_block: int, p_order: str, d_order: str
) -> None:
    pair = make_pair(p_block_size=p_block, d_block_size=d_block, p_order=p_order, d_order=d_order)
    for prompt in (PROMPT, [*PROMPT[:9], 40, 41, 42]):
        name = pair.ask(prompt, pair.prefill(prompt))
        assert pair.answer(name) == expected_output(prompt, 6)
    pair.settle()


def test_the_first_token_is_sent_before_any_byte_has_moved(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.d.agent.stall()
    name = pair.ask(PROMPT, pair.prefill(PROMPT))
    pair.until(lambda: pair.d.out.tokens(name) == expected_output(PROMPT, 1))
    assert not pair.d.out.terminals(name)
    pair.d.agent.resume()
    assert pair.answer(name) == expected_output(PROMPT, 6)
    pair.settle()


def test_a_stalled_pull_does_not_hold_up_the_running_batch(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.d.agent.stall()
    stalled = pair.ask(PROMPT, pair.prefill(PROMPT))
    pair.until(lambda: len(pair.d.out.tokens(stalled)) == 1)
    pair.d.core.round([add("local", [1, 2, 3], 20)])
    pair.until(lambda: bool(pair.d.out.terminals("local")))
    assert pair.d.out.tokens("local") == expected_output([1, 2, 3], 20)
    assert len(pair.d.out.tokens(stalled)) == 1
    pair.d.agent.resume()
    assert pair.answer(stalled) == expected_output(PROMPT, 6)


def test_cached_blocks_are_not_pulled_and_a_full_hit_reads_nothing(make_pair: MakePair) -> None:
    pair = make_pair()
    first = pair.ask(PROMPT, pair.prefill(PROMPT))
    assert pair.answer(first) == expected_output(PROMPT, 6)
    again = pair.ask(PROMPT, pair.prefill(PROMPT))
    assert pair.answer(again) == expected_output(PROMPT, 6)
    assert pair.usage(again) == (2, 0, 12)
    whole = PROMPT[:12]
    pair.d.agent.stall()
    full = pair.ask(whole, pair.prefill(whole))
    assert pair.answer(full) == expected_output(whole, 6)
    assert pair.usage(full) == (0, 0, 12)
    pair.d.agent.resume()
    pair.settle()


def test_an_expired_lease_is_noticed_by_the_fence(make_pair: MakePair) -> None:
    pair = make_pair()
    params = pair.prefill(PROMPT)
    pair.d.agent.stall()
    name = pair.ask(PROMPT, params)
    pair.until(lambda: pair.d.agent.active > 0)
    pair.now_s += 1e6  # P gives the blocks away and others write to them
    pair.until(pair.p.blocks_home)
    for first in range(3):
        pair.p.core.round([add(f"other{first}", [first] * 40, 1)])
        pair.until(lambda first=first: bool(pair.p.out.terminals(f"other{first}")))
    pair.d.agent.resume()
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.usage(name) == (0, 14, 0)
    pair.settle()


def test_a_failed_read_is_recomputed(make_pair: MakePair) -> None:
    pair = make_pair()
    params = pair.prefill(PROMPT)
    pair.d.agent.fail(1)
    name = pair.ask(PROMPT, params)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    assert pair.usage(name)[0] == 0
    pair.settle()


def test_a_read_that_does_not_end_quarantines_its_blocks_until_it_does(
    make_pair: MakePair,
) -> None:
    pair = make_pair(settings=PullSettings(pull_timeout_s=0.2, drain_grace_s=0.05))
    params = pair.prefill(PROMPT)
    pair.d.agent.stall()
    name = pair.ask(PROMPT, params)
    assert pair.answer(name) == expected_output(PROMPT, 6)
    counts = pair.d.core.scheduler.allocator.counts()
    assert counts[5] == 4, "four blocks may still be written to by the READ"
    pair.d.agent.resume()
    pair.settle()


def test_an_engine_gives_up_when_half_its_pool_is_quarantined(make_pair: MakePair) -> None:
    pair = make_pair(settings=PullSettings(pull_timeout_s=0.1, drain_grace_s=0.01))
    pair.d.agent.stall()
    with pytest.raises(QuarantineOverflow, match=r"of 39 KV blocks are quarantined"):
        for first in range(8):
            prompt = [first, *PROMPT, 7]  # full blocks: read directly, not through staging
            pair.answer(pair.ask(prompt, pair.prefill(prompt), max_tokens=2))
    pair.d.agent.resume()


def test_the_fail_policy_ends_with_the_error_and_no_block_lost(make_pair: MakePair) -> None:
    pair = make_pair(policy="fail")
    params = pair.prefill(PROMPT)
    pair.d.agent.fail(1)
    name = pair.ask(PROMPT, params)
    pair.until(lambda: bool(pair.d.out.terminals(name)))
    (end,) = pair.d.out.terminals(name)
    assert end.error is not None and end.error.code == "transfer_failed"
    pair.settle()


@pytest.mark.parametrize("stalled", [False, True])
def test_an_abort_at_any_time_brings_every_block_home(make_pair: MakePair, stalled: bool) -> None:
    pair = make_pair()
    for rounds in range(6):
        params = pair.prefill(PROMPT)
        if stalled:
            pair.d.agent.stall()
        name = pair.ask(PROMPT, params, max_tokens=20)
        for _ in range(rounds):
            pair.d.core.round([])
            threading.Event().wait(0.002)
        pair.d.core.round([AbortRequest(name)])
        assert pair.d.out.terminals(name)[0].finish_reason == "abort"
        pair.d.agent.resume()
        pair.settle()


def test_a_request_that_ends_with_its_first_token_gives_the_lease_back(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    name = pair.ask(PROMPT, pair.prefill(PROMPT), max_tokens=1)
    assert pair.answer(name) == expected_output(PROMPT, 1)
    assert pair.usage(name) == (0, 0, 0)
    pair.settle()


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_first_token_of_another_model_is_not_used(make_pair: MakePair, max_tokens: int) -> None:
    pair = make_pair(p_compat=msgspec.structs.replace(_COMPAT, model_fingerprint="another"))
    params = kv_params.parse(pair.prefill(PROMPT))
    wrong = FirstToken((expected_output(PROMPT, 1)[0] + 1) % VOCAB)
    forged = dataclasses.replace(params, first_tokens=(wrong,)).sign(_SECRET).to_json()
    name = pair.ask(PROMPT, forged, max_tokens)
    assert pair.answer(name) == expected_output(PROMPT, max_tokens)
    assert pair.usage(name) == (0, 14, 0)
    pair.settle()


def test_a_refused_requests_lease_goes_home_at_once(make_pair: MakePair) -> None:
    pair = make_pair()
    params = kv_params.parse(pair.prefill(PROMPT))
    pair.d.core.round([ReleaseRemote(kv_params.to_remote_prefill(params))])
    pair.settle()
    assert pair.leases.counters()["aborted"] == 1


def test_many_requests_with_faults_all_get_their_own_text(make_pair: MakePair) -> None:
    pair = make_pair(p_block_size=8, settings=PullSettings(pull_timeout_s=0.3, drain_grace_s=0.05))
    asked: dict[str, list[int]] = {}
    for index in range(24):
        prompt = [*PROMPT[: index % 9], *range(index, index + 5)]
        params = pair.prefill(prompt)
        if index % 5 == 1:
            pair.d.agent.fail(1)
        if index % 7 == 3:
            pair.d.agent.stall()
        if index % 7 == 5:
            pair.d.agent.resume()
        if index % 11 == 6:
            pair.now_s += 1e6
        asked[pair.ask(prompt, params)] = prompt
    pair.d.agent.resume()
    for name, prompt in asked.items():
        assert pair.answer(name) == expected_output(prompt, 6)
    pair.settle()
