"""Cache salts: requests share cached KV only with requests of the same salt.

A salt is derived from the `cache_salt` field of the request, from the API key of the
request (with --cache-salt-by-key), or from both. The salt is part of:

- the root of an engine's prefix tree;
- the prompt digest under which KV is leased;
- KV lookups at other engines;
- the placement of requests by the proxy.

A salt is an HMAC with the cluster secret as its key. Therefore no client can compute
the salt of another client's API key, and no salt reveals an API key.
"""

import hashlib
import hmac

MAX_CHARS = 1024  # maximum length of the request field `cache_salt`
SALT_BYTES = 32  # length of a non-empty salt; see `derive`
_LABEL = b"baton cache salt"


def derive(cache_salt: str | None, key_digest: bytes, secret: bytes) -> bytes:
    """Returns the salt of a request: SALT_BYTES bytes, or empty if the request has
    neither a `cache_salt` nor a `key_digest`.

    Args:
        cache_salt: The field of the request, or None.
        key_digest: Digest of the request's API key; empty without a key or without
            --cache-salt-by-key.
        secret: The cluster secret.
    """
    if not (cache_salt or key_digest):
        return b""
    text = (cache_salt or "").encode(errors="surrogatepass")
    # The message includes the length of the digest (0 or 32 bytes), so that different
    # pairs of digest and text never make equal messages.
    message = b"%b %d\0%b%b" % (_LABEL, len(key_digest), key_digest, text)
    return hmac.digest(secret, message, hashlib.sha256)


def is_valid(cache_salt: object) -> bool:
    """Returns whether a value other than null is valid in the field `cache_salt`."""
    return isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_CHARS
