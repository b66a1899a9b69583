"""Cache salts: requests share cached KV only with requests of the same salt.

A salt is derived from the `cache_salt` field of the request, from the API key of the
request (with --cache-salt-by-key), or from both. The salt is part of:

- the root of an engine's prefix tree;
- the digest that a prompt's KV is leased under;
- KV lookups at other engines;
- the placement of requests by the proxy.

Salts are HMACs under the cluster secret. Therefore no client can compute the salt of
another key, and no salt reveals a key.
"""

import hashlib
import hmac

MAX_CHARS = 1024  # of the request field `cache_salt`
SALT_BYTES = 32  # of a derived salt; the salt of an unsalted request is empty
_LABEL = b"baton cache salt"


def derive(cache_salt: str | None, key_digest: bytes, secret: bytes) -> bytes:
    """Returns the salt of a request: SALT_BYTES bytes, or empty for an unsalted
    request.

    Args:
        cache_salt: The request's field, if it has one.
        key_digest: Digest of the request's API key; empty if keys do not salt.
        secret: The cluster secret.
    """
    if not (cache_salt or key_digest):
        return b""
    text = (cache_salt or "").encode(errors="surrogatepass")
    # The digest is empty or 32 bytes long. Its length separates it from the text.
    message = b"%b %d\0%b%b" % (_LABEL, len(key_digest), key_digest, text)
    return hmac.digest(secret, message, hashlib.sha256)


def is_valid(cache_salt: object) -> bool:
    """Returns whether `cache_salt` is a valid value of the request field."""
    return isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_CHARS
