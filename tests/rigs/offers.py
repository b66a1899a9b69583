"""The signed reference to a prompt's KV that a prefill server would return."""

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
    """Return a signed reference to the KV of a prompt.

    The blocks have 4 tokens, and consecutive IDs that begin at 3. The first generated
    token is 42.

    Args:
        changes: values of fields of the reference, in place of the usual ones.
    """
    num_blocks = -(-len(token_ids) // 4)
    fields: dict[str, Any] = {
        "remote_engine_id": "prefill-1",
        "remote_request_id": "request/1 ü",
        "remote_block_ids": [*range(3, 3 + num_blocks)],
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "lease_id": "ab" * 16,
        "lease_s": 30.0,
        "incarnation": "cd" * 8,
        "remote_num_tokens": len(token_ids),
        "remote_block_size": 4,
        "remote_cached_tokens": 0,
        "prompt_digest": prompt_digest(token_ids),
        "sampling_digest": sampling_digest(sampling or SamplingParams()),
        "seed": 7,
        "first_tokens": [FirstToken(42)],
    }
    fields |= changes
    digest = fields.pop("sampling_digest")
    seed = fields.pop("seed")
    reference = RemotePrefill(
        **{name.removeprefix("remote_"): value for name, value in fields.items()}
    )
    return build(secret, reference, digest, seed).to_json()
