"""The member `hint` of kv_transfer_params, which proxies write and sign: which engine may hold the
KV of a prompt's beginning. One that is wrong costs its reader one question."""

import hmac
from typing import Any

import msgspec

from protocol.messages import KVHint


def mac(hint: KVHint, secret: bytes) -> str:
    members = [getattr(hint, name) for name in KVHint.__struct_fields__]
    return hmac.digest(secret, f"baton hint {members}".encode(), "sha256").hex()


def signed_hint(hint: KVHint, secret: bytes) -> dict[str, Any]:
    """The member as it travels."""
    return {**msgspec.structs.asdict(hint), "signature": mac(hint, secret)}
