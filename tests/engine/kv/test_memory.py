"""What a decode rank takes of its GPU's memory beside the KV pool is left out of the pool."""

from types import SimpleNamespace
from typing import Any

import pytest

from decode_server.service import KVFactory
from engine.worker.rank import pool_size
from kvcache.groups import ONE_GROUP
from tests.rigs.engines import make_config

BLOCK_BYTES = 1 << 20
RUNNER: Any = SimpleNamespace(
    layout=lambda num_blocks: SimpleNamespace(block_bytes=BLOCK_BYTES), groups=ONE_GROUP
)
MODEL: Any = SimpleNamespace(max_position=256)


@pytest.mark.parametrize(
    "options, blocks",
    [
        ({"transfer": "auto"}, 300 - 64 - 4),
        ({"transfer": "nixl"}, 300 - 64 - 4),
        ({"transfer": "mapped"}, 300 - 4),  # stages nothing
    ],
)
def test_staging_memory_is_no_kv_memory(options, blocks, monkeypatch):
    monkeypatch.setattr("engine.worker.rank.kv_budget_bytes", lambda _: 300 * BLOCK_BYTES)
    config = make_config(
        device="cuda", block_size=16, max_num_seqs=64, staging_bytes=64 * BLOCK_BYTES, **options
    )
    assert pool_size(config, MODEL, RUNNER, KVFactory()).num_blocks == blocks
