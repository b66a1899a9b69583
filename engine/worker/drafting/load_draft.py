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
    """Loads the draft model that --speculate names, on the rank of `target`. Returns
    None if the option names none."""
    states = requested_state_model(target.config, target.model_config)
    if states is not None:
        return StateDraftRunner(target, states, report)
    draft = requested_draft_model(target.config, target.model_config)
    return None if draft is None else DraftRunner(target, draft, report)


def allocate_pools(
    runner: ModelRunner, draft: DraftRunner | None, num_blocks: int
) -> KVPool:
    """Allocates the pool of a rank, and that of its draft model behind it. Captures the
    steps of both as graphs. Returns the pool of the rank.

    Args:
        num_blocks: blocks of each pool, including the null block.
    """
    extra_bytes = 0 if draft is None else draft.layout(num_blocks).nbytes
    pool = runner.allocate(num_blocks, extra_bytes=extra_bytes).pool
    runner.capture_graphs()
    if draft is not None:
        draft.allocate(num_blocks, pool_memory=pool.extra)
        draft.capture_graphs()
    return pool


def draft_kv(draft: DraftRunner) -> DraftKV | None:
    """The properties that a peer's draft KV must share; None if no peer can read it:
    with --dcp, a block of the draft model has fewer tokens than a block of the engine.

    The fingerprint contains the type of the device, because a pull between a GPU and a
    CPU might cross a border of locked memory behind the engine's pool.
    """
    config = draft.config
    if draft.sizes(num_blocks=1).blocks_per_block > 1:
        return None
    kind = config.speculation.kind
    if kind == "mtp":
        # Peers compare the weights anyway, because they are those of the model.
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
    """Describes the KV of a draft model on a rank; None if peers cannot read it.

    Args:
        pool: the engine's pool, in front of the draft model's.
    """
    kv = draft_kv(draft) if draft is not None else None
    if draft is None or kv is None:
        return None
    return DraftRank.make(kv, draft.memory.pool.layout, pool, rank, draft.config.tp)
