"""One rank's draft model (engine/speculation/draft_model.py): its weights, its KV pool
and its steps.

The draft model runs in the process, on the device and on the stream of the model that
the engine serves. Its steps are ordinary steps that draw tokens without logprobs,
penalties or masks. engine/speculation/draft_kv.py describes its pool.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from engine.core.batch import Executor
from engine.core.logits_processing import LogitShaper
from engine.geometry import layout_of
from engine.speculation.draft_kv import DraftPoolSizes
from engine.speculation.draft_model import (
    DraftModelSpec,
    naming_draft_model,
)
from engine.speculation.drafter import Drafter
from engine.speculation.model_drafter import DraftLimits, ModelDrafter
from engine.worker.load import LoadModel, load
from engine.worker.memory import MemoryTooSmall
from engine.worker.runner import ModelRunner
from kvcache.groups import ONE_GROUP
from kvcache.layout import KVLayout
from model.parallel import Parallel

logger = logging.getLogger("baton.engine")

# Target duration for the prompt tokens that the draft model computes in one round, if
# the engine has no target duration for steps.
_MAX_CATCH_UP_S = 0.025


class DraftRunner(ModelRunner):
    """The draft model of one rank. The constructor loads the weights, and sets
    `target.draft` to this object.

    Args:
        target: the runner of the model that the engine serves.
        report: called with descriptions of the progress.
        load_weights: loads the draft model to the device.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: DraftModelSpec,
        report: Callable[[str], None] = lambda text: None,
        load_weights: LoadModel = load,
    ) -> None:
        # The heads of the draft model are divided among all ranks, even with --dcp,
        # which divides the tokens of the engine's model among some of the ranks.
        target_parallel = target.model.parallel
        parallel = Parallel(
            target_parallel.rank, target_parallel.size, target_parallel.group
        )
        with _naming_memory(draft.name), naming_draft_model(draft.name):
            super().__init__(
                draft.config,
                draft.model_config,
                parallel,
                lambda text: report(f"draft model: {text}"),
                device=target.device,
                load_weights=load_weights,
            )
        # All layers keep the KV of all tokens, even layers with a window, so there is
        # only one KV group.
        self.groups = ONE_GROUP
        # Draws of the draft model have no penalties, so the shaper needs no state rows.
        self.shaper = LogitShaper(draft.model_config.vocab_size, 0, self.device)
        self.step_watch = target.step_watch
        self._draft = draft
        self._target = target
        target.draft = self

    def sizes(self, num_blocks: int) -> DraftPoolSizes:
        """The sizes of the draft model's pool, in blocks.

        Args:
            num_blocks: blocks of the engine's pool, including the null block.
        """
        return DraftPoolSizes.make(
            num_blocks=num_blocks,
            tokens_per_block=self.config.block_size * self._draft.blocks_per_block,
            blocks_per_block=self._draft.blocks_per_block,
            max_proposals=self._draft.max_proposals,
            max_seqs=self.config.max_num_seqs,
        )

    def layout(self, num_blocks: int) -> KVLayout:
        """The layout of this rank's draft pool.

        Args:
            num_blocks: blocks of the engine's pool, including the null block.
        """
        num_draft_blocks = self.sizes(num_blocks).num_draft_blocks
        layout = layout_of(self.config, self.model_config, num_draft_blocks)
        return replace(layout, num_layers=self.model_config.num_layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of draft KV for each block of the engine's pool."""
        return self.layout(2).nbytes - self.layout(1).nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch blocks."""
        return self.layout(1).nbytes - self.bytes_per_block

    def make_drafter(self, executor: Executor) -> Drafter:
        """Makes the drafter of the engine. Called once, on rank 0, after the graphs of
        the draft model have been captured.

        Args:
            executor: runs steps on all ranks.
        """
        return ModelDrafter(executor, self.limits())

    def limits(self) -> DraftLimits:
        """The limits of the steps of the draft model."""
        config = self.config
        num_blocks = self._target.memory.pool.layout.num_blocks
        target = config.step_target
        return DraftLimits(
            sizes=self.sizes(num_blocks),
            groups=self._target.groups,
            max_proposals=self._draft.max_proposals,
            max_len=self._draft.max_len,
            max_step_tokens=config.max_num_batched_tokens,
            max_graph_rows=config.max_step_rows if self.graphs is not None else 0,
            vocab_size=self.model_config.vocab_size,
            target_vocab_size=self._target.model_config.vocab_size,
            max_catch_up_s=target.seconds / 2 if target else _MAX_CATCH_UP_S,
        )


@contextmanager
def _naming_memory(name: str) -> Iterator[None]:
    """Adds the name of the draft model to the messages of MemoryTooSmall."""
    try:
        yield
    except MemoryTooSmall as error:
        raise MemoryTooSmall(f"--speculate {name}: {error}") from error
