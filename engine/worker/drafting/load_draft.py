"""Loads the draft model of a rank; allocates its KV pool and describes it for peers."""

from collections.abc import Callable

from engine.speculation.draft_model import requested_draft_model
from engine.speculation.states.state_model import requested_state_model
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting.state_runner import StateDraftRunner
from engine.worker.runner import ModelRunner
from kvcache.pool import KVPool
from kvcache.transfer.draft import DraftRank
from model.sizes import fingerprint
from protocol.handshake import DraftKV


def load_draft(
    target: ModelRunner, report: Callable[[str], None]
) -> DraftRunner | None:
    """Loads the draft model, MTP layer or EAGLE-3 drafter that --speculate names, on
    the rank of `target`. Returns None if this server needs none of them."""
    states = requested_state_model(target.config, target.model_config)
    if states is not None:
        return StateDraftRunner(target, states, report)
    draft = requested_draft_model(target.config, target.model_config)
    return None if draft is None else DraftRunner(target, draft, report)


def allocate_pools(
    runner: ModelRunner, draft: DraftRunner | None, num_blocks: int
) -> KVPool:
    """Allocates the KV pool of a rank and, behind it in the same memory, the pool of
    the draft model. Captures the steps of both models as CUDA graphs. Returns the KV
    pool of the engine's model.

    Args:
        num_blocks: blocks of the pool of the engine's model, including the null block.
    """
    extra_bytes = 0 if draft is None else draft.layout(num_blocks).nbytes
    pool = runner.allocate(num_blocks, extra_bytes=extra_bytes).pool
    runner.capture_graphs()
    if draft is not None:
        draft.allocate(num_blocks, pool_memory=pool.extra)
        draft.capture_graphs()
    return pool


def draft_kv(draft: DraftRunner) -> DraftKV | None:
    """The properties that a peer's draft KV must share with that of `draft`. None with
    --dcp: no peer can then read the draft KV, because a block of the draft model has
    fewer tokens than a block of the engine.

    The fingerprint contains the type of the device, so that no draft KV is pulled
    between a GPU and a CPU. Behind the engine's pool, such a copy might cross the
    border between two pieces of locked memory (LockedMemory).
    """
    config = draft.config
    if draft.sizes(num_blocks=1).blocks_per_block > 1:
        return None
    kind = config.speculation.kind
    if kind == "mtp":
        # The weights of the MTP layer belong to the engine's model, whose fingerprint
        # peers compare anyway.
        digest = fingerprint(draft.model_config, "", load_format="dummy")
    else:
        digest = fingerprint(
            draft.model_config,
            config.model_dir,
            load_format=config.load_format,
            seed=config.seed,
        )
    names = (kind, draft.device.type, draft.layout(1).dtype, digest)
    return DraftKV(
        fingerprint="-".join(names), total_kv_heads=draft.model_config.kv_heads_total
    )


def draft_rank(draft: DraftRunner | None, pool: KVPool, rank: int) -> DraftRank | None:
    """Describes the KV of a draft model on a rank. Returns None if there is no draft
    model, or if peers cannot read its KV.

    Args:
        pool: the pool of the engine's model. The draft model's pool follows it in
            memory.
    """
    kv = draft_kv(draft) if draft is not None else None
    if draft is None or kv is None:
        return None
    return DraftRank.make(kv, draft.memory.pool.layout, pool, rank, draft.config.tp)
