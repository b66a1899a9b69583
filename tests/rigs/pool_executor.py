"""Shadow executors (tests/rigs/shadow.py) that keep their token ids in KV pools."""

from typing import Any

import numpy as np
import torch

from engine.core.batch import StepInput
from kvcache.pool import KVPool
from kvcache.stripe import Stripe
from tests.rigs.shadow import ShadowExecutor


class PoolExecutor(ShadowExecutor):
    """A shadow executor that keeps its token ids in KV pools.

    Each element of a token's slot holds its token ID + 1, in the pool of the rank that
    stores the slot.
    """

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
        positions = np.arange(int(step.context_lens[row]))
        tokens = np.zeros(len(positions), np.int64)
        table = step.block_tables[row].astype(np.int64)
        for pool, stripe in self._ranks:
            ranks = positions // stripe.block_size % stripe.size
            local = positions[ranks == stripe.rank]
            blocks = torch.from_numpy(table[local // stripe.tokens_per_block])
            offsets = torch.from_numpy(local % stripe.block_size)
            slots = pool.canonical.permute(0, 4, 1, 2, 3, 5)[blocks, offsets]
            values = slots.flatten(1).float().numpy()
            is_uniform = (values == values[:, :1]).all()
            assert is_uniform, "parts of a slot belong to different tokens"
            tokens[local] = values[:, 0].astype(np.int64) - 1
        return tokens.tolist()


class PooledSlots:
    """A KV pool as a mapping from a slot (block, offset) to a number, which all parts
    of the slot hold.
    """

    def __init__(self, pool: KVPool) -> None:
        self._words = pool.canonical.view(torch.int64)

    def __setitem__(self, slot: tuple[int, int], value: int) -> None:
        block, offset = slot
        self._words[block, :, :, :, offset] = value

    def __getitem__(self, slot: tuple[int, int]) -> int:
        block, offset = slot
        numbers = self._words[block, :, :, :, offset].unique()
        assert len(numbers) == 1, "parts of a slot belong to different tokens"
        return int(numbers) or -1
