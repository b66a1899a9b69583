"""An engine of the in-process rig (engines.py) that runs a real model."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.geometry import kv_groups
from engine.speculation.drafter import Drafter
from engine.speculation.speculator import Speculator
from engine.worker.draft_runner import DraftRunner
from engine.worker.drafting.load_draft import draft_rank, load_draft
from engine.worker.memory import make_memory
from engine.worker.runner import ModelRunner
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from kvcache.transfer.draft import DraftRank
from model.config import load_config
from model.parallel import Parallel
from protocol.handshake import CompatRecord
from tests.rigs.drafters import VerifyEverything
from tests.rigs.engines import Engine, make_config
from tests.rigs.memory_pair import compat


class RealEngine(Engine):
    """An engine that runs `model` in float32.

    Args:
        speculate: value of --speculate for a drafter that reads states of the model;
            None: there is no drafter.

    Attributes:
        draft: the runner of this drafter; None if there is no drafter.
    """

    draft: DraftRunner | None = None

    def __init__(
        self, model: Path, *, speculate: str | None = None, **options: Any
    ) -> None:
        self._folder = model
        self._speculate = speculate
        self._model = load_config(model)
        self.groups, self._layer_groups = kv_groups(self._model)
        record = compat(
            num_layers=self._model.num_layers,
            total_kv_heads=self._model.kv_heads_total,
            num_components=self._model.kv_components,
            head_dim=self._model.kv_dim,
            rope=self._model.rope_canonical,
            kv_windows=self.groups.to_wire(),
        )
        super().__init__(
            compat=record,
            num_blocks=120 * self.groups.count,
            groups=self.groups,
            max_model_len=400,
            **{"max_num_batched_tokens": 150, **options},
        )

    def make_pool(
        self, num_blocks: int, order: str, size: int, compat: CompatRecord
    ) -> KVPool:
        layout = KVLayout(
            order,
            num_blocks,
            compat.total_kv_heads,
            max(map(len, self._layer_groups)),
            compat.num_components,
            size,
            compat.head_dim,
            compat.kv_dtype,
        )
        config = make_config(
            model_dir=str(self._folder),
            block_size=size,
            role="decode" if self._speculate else "prefill",
            speculate=self._speculate,
        )
        self._runner = ModelRunner(config, self._model, Parallel())
        self.draft = load_draft(self._runner, lambda progress: None)
        extra_bytes = 0 if self.draft is None else self.draft.layout(num_blocks).nbytes
        pool = KVPool(layout, groups=self.groups, extra_bytes=extra_bytes)
        self._runner.memory = make_memory(config, self._model, self._runner.model, pool)
        if self.draft is not None:
            self.draft.allocate(num_blocks, pool_memory=pool.extra)
            self.draft.memory.pool.tensor.fill_(float("nan"))
        return pool

    def make_draft_ranks(self) -> list[DraftRank]:
        (pool,) = self.pools
        draft = draft_rank(self.draft, pool, 0)
        return [draft] if draft is not None else []

    def make_executor(self, stripes: list[Stripe], depth: int) -> Any:
        draft = self.draft
        runner = self._runner
        if draft is None:
            return SimpleNamespace(depth=0, launch=runner.launch)
        return SimpleNamespace(
            depth=0,
            launch=lambda step: (draft if step.is_draft else runner).launch(step),
        )

    def use_drafter(self, drafter: Drafter) -> None:
        """Use a drafter, and let steps verify all its proposals."""
        limits = dataclasses.replace(self.core.scheduler.limits, max_proposals=16)
        speculator = Speculator(limits, [drafter], policy=VerifyEverything())
        self.core.speculator = speculator
        self.core._steps._states = speculator
