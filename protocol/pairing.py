"""Decides which prefill and decode servers a proxy may pair, by digests of their KV
formats.
"""

import hashlib
from functools import lru_cache
from typing import Final

import msgspec

from protocol.handshake import CONVERTIBLE, CompatRecord


def kv_digest(compat: CompatRecord, converts: bool = False) -> str:
    """Returns a digest of a compatibility record, by which a proxy pairs servers.

    The digest does not depend on KV content. The digest has three parts, separated by
    dots. The first part covers the model. The second part covers the model, and the
    shape, RoPE parameters and attention windows of the KV. The third part covers the
    dtype and the scales.

    Args:
        converts: True if the engine can read KV of any dtype and scales. The third part
            of its digest is then `*`.
    """

    def digest(*fields: str) -> str:
        text = msgspec.json.encode([getattr(compat, field) for field in fields])
        return hashlib.sha256(text).hexdigest()[:12]

    form = [name for name in CompatRecord.__struct_fields__ if name not in CONVERTIBLE]
    if not compat.kv_windows:
        # Older versions have no layer groups. Leaving out this field makes the digest
        # equal to the digest that an older version computes.
        form = form[: form.index("kv_windows")]
    dtype_part = "*" if converts else digest(*CONVERTIBLE)
    return ".".join((digest("model_fingerprint"), digest(*form), dtype_part))


# The kv_digest of vLLM's servers, which check compatibility themselves.
FOREIGN: Final = "vllm"


@lru_cache(4096)
def may_pair(prefill_digest: str, decode_digest: str) -> bool:
    """Returns whether servers with these kv_digests are compatible.

    An empty digest means that the proxy has not received the server's digest yet. A
    server with an empty digest may pair with every server that is not FOREIGN.
    """
    if FOREIGN in (prefill_digest, decode_digest):
        return prefill_digest == decode_digest
    if not prefill_digest or not decode_digest:
        return True
    prefill_parts = prefill_digest.split(".")
    decode_parts = decode_digest.split(".")
    if len(prefill_parts) != len(decode_parts):
        return False
    pairs = zip(prefill_parts, decode_parts, strict=True)
    return all(reader in (lender, "*") for lender, reader in pairs)


def same_model(digest: str, other_digest: str) -> bool:
    """Returns whether two kv_digests have the same model.

    The result is also True if a digest is empty or FOREIGN, because neither of these
    digests names a model.
    """
    model, *form = digest.split(".")
    other_model, *other_form = other_digest.split(".")
    return model == other_model or not form or not other_form
