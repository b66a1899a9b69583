"""A shadow of a draft model, like the shadow of a model in tests/rigs/shadow.py.

Its KV pool holds token ids, so wrong draft KV leads to wrong proposals.
"""

from collections.abc import Callable, Sequence

from engine.core.batch import StepFailed, StepInput
from engine.speculation.draft_kv import DraftPoolSizes
from engine.speculation.model_drafter import DraftLimits, ModelDrafter
from kvcache.groups import ONE_GROUP, KVGroups
from tests.rigs.shadow import VOCAB, ShadowExecutor, next_token


def draft_token(context: Sequence[int], choice: int = 0) -> int:
    """Return the token that the draft model draws after a context.

    In two of three cases, the shadow of the engine's model draws the same token.
    """
    token = next_token(context, choice)
    return token if sum(context) % 3 else (token + 1) % VOCAB


def draft_output(context: Sequence[int], count: int, choice: int = 0) -> list[int]:
    """Return the next `count` tokens of the draft model."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(draft_token(tokens, choice))
    return tokens[len(context) :]


class DraftShadowExecutor(ShadowExecutor):
    """Executes steps of the draft model.

    Attributes:
        num_launches_left: number of launches that succeed. All later launches fail.
    """

    num_launches_left = 1 << 30

    def launch(self, step: StepInput):  # type: ignore[no-untyped-def]
        assert step.is_draft
        if not self.num_launches_left:
            raise StepFailed("out of memory")
        self.num_launches_left -= 1
        return super().launch(step)

    def _draw(self, step: StepInput, index: int) -> int:
        context = self.context(step, int(step.sampled_sequences[index]))
        return draft_token(context, step.sampling[index].choice_index)


def make_drafter(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    blocks_per_block: int = 1,
    max_proposals: int = 4,
    max_seqs: int = 8,
    max_len: int = 64,
    max_step_tokens: int = 16,
    max_graph_rows: int = 0,
    depth: int = 0,
    groups: KVGroups = ONE_GROUP,
    clock: Callable[[], float] = lambda: 0.0,
    vocab_size: int = VOCAB,
    target_vocab_size: int = VOCAB,
) -> tuple[ModelDrafter, DraftShadowExecutor]:
    """Return a drafter with a shadow model, and the executor of its steps.

    Args:
        block_size: number of tokens in a block of the engine's block tables.
        vocab_size: vocabulary of the draft model.
    """
    sizes = DraftPoolSizes.make(
        num_blocks=num_blocks,
        tokens_per_block=block_size,
        blocks_per_block=blocks_per_block,
        max_proposals=max_proposals,
        max_seqs=max_seqs,
    )
    limits = DraftLimits(
        sizes=sizes,
        groups=groups,
        max_proposals=max_proposals,
        max_len=max_len,
        max_step_tokens=max_step_tokens,
        max_graph_rows=max_graph_rows,
        vocab_size=vocab_size,
        target_vocab_size=target_vocab_size,
        max_catch_up_s=1.0,
    )
    executor = DraftShadowExecutor(
        sizes.num_draft_blocks, block_size // blocks_per_block, depth
    )
    return ModelDrafter(executor, limits, clock), executor
