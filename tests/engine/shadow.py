"""A stand-in for the model whose KV cache holds what it claims to hold.

Each slot of the shadow pool remembers the token written to it. The next token is a hash of the
whole context as read back through the block table, so any mistake with blocks, positions, prefix
hits or preemption changes the output, which `expected_output` computes without any cache.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from engine.batch import StepInput, StepOutput, step_from_bytes, step_to_bytes
from engine.core import EngineCore
from engine.role import KVRole
from engine.scheduler import Scheduler, SchedulerLimits
from kvcache.blocks import BlockAllocator, BlockState
from kvcache.prefix import PrefixIndex
from protocol.messages import AddRequest, EngineInput, SamplingParams, TokenDelta

VOCAB = 50


def next_token(context: Sequence[int]) -> int:
    data = np.asarray(context, dtype=np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class ShadowExecutor:
    """Executes steps over a pool of token ids; -1 is a slot never written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.num_steps = 0
        self.max_tokens_in_step = 0

    def execute(self, step: StepInput) -> StepOutput:
        step = step_from_bytes(step_to_bytes(step))  # as every other rank sees it
        self.num_steps += 1
        self.max_tokens_in_step = max(self.max_tokens_in_step, len(step.token_ids))
        batch = step.attention_batch(self.block_size)
        assert not (batch.slot_mapping < self.block_size).any(), "wrote to the null block"
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), (
            "slot written twice"
        )
        self.pool.reshape(-1)[batch.slot_mapping] = step.token_ids
        tokens = [next_token(self.context(step, row)) for row in step.sample_rows.tolist()]
        return StepOutput(tokens, [None] * len(tokens))

    def context(self, step: StepInput, row: int) -> list[int]:
        length = int(step.context_lens[row])
        num_blocks = -(-length // self.block_size)
        slots = self.pool[step.block_tables[row, :num_blocks]].reshape(-1)[:length]
        assert (slots >= 0).all(), "read a slot that was never written"
        result: list[int] = slots.tolist()
        return result


class MemoryTransport:
    """Collects what the core sends."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.stats: dict[str, float] = {}
        self.num_wakes = 0

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        return [], True

    def wake(self) -> None:
        self.num_wakes += 1

    def send(self, deltas: list[TokenDelta]) -> None:
        self.deltas += deltas

    def send_stats(self, values: dict[str, float]) -> None:
        self.stats = values

    def tokens(self, request_id: str) -> list[int]:
        return [t for d in self.deltas if d.request_id == request_id for t in d.token_ids]

    def terminals(self, request_id: str) -> list[TokenDelta]:
        mine = [d for d in self.deltas if d.request_id == request_id]
        return [d for d in mine if d.finish_reason is not None or d.error is not None]


class LocalRole(KVRole):
    """A role that never leases and never pulls."""


def make_core(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    role: KVRole | None = None,
) -> tuple[EngineCore, ShadowExecutor, MemoryTransport]:
    allocator = BlockAllocator(num_blocks)
    prefix = PrefixIndex(allocator, block_size) if prefix_caching else None
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    executor = ShadowExecutor(num_blocks, block_size)
    transport = MemoryTransport()
    core = EngineCore(
        Scheduler(limits, allocator, prefix), executor, role or LocalRole(), transport
    )
    return core, executor, transport


def add(request_id: str, prompt: Sequence[int], max_tokens: int, **members: object) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=list(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        **members,  # type: ignore[arg-type]
    )


def run_until_idle(core: EngineCore, max_rounds: int = 2000) -> None:
    """Rounds until nothing progresses. A core that never settles fails here."""
    for _ in range(max_rounds):
        if not core.round([]):
            return
        core.check_integrity()
    raise AssertionError("the core never came to rest")


def assert_all_blocks_home(core: EngineCore) -> None:
    counts = core.scheduler.allocator.counts()
    core.check_integrity()
    home = counts[BlockState.FREE] + counts[BlockState.CACHED]
    assert home == core.scheduler.allocator.capacity, counts
