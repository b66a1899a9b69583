"""A prefill server's signed reference to a prompt's KV, for tests that offer one."""

from collections.abc import Sequence
from typing import Any

from protocol.kv_params import build, prompt_digest, sampling_digest
from protocol.messages import FirstToken, RemotePrefill, SamplingParams


def offer(
    secret: bytes,
    token_ids: Sequence[int],
    sampling: SamplingParams | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Of a prompt in blocks of 4 tokens, from block 3 on, whose first token is 42."""
    fields: dict[str, Any] = {
        "remote_engine_id": "prefill-1", "remote_request_id": "request/1 ü",
        "remote_block_ids": [*range(3, 3 + -(-len(token_ids) // 4))], "remote_host": "127.0.0.1",
        "remote_port": 5600, "tp_size": 1, "lease_id": "ab" * 16, "lease_s": 30.0,
        "incarnation": "cd" * 8, "remote_num_tokens": len(token_ids), "remote_block_size": 4,
        "remote_cached_tokens": 0, "prompt_digest": prompt_digest(token_ids),
        "sampling_digest": sampling_digest(sampling or SamplingParams()), "seed": 7,
        "first_tokens": [FirstToken(42)],
    }  # fmt: skip
    found = {
        name.removeprefix("remote_"): value
        for name, value in (fields | changes).items()
    }
    drawn = found.pop("sampling_digest"), found.pop("seed")
    return build(secret, RemotePrefill(**found), *drawn).to_json()
