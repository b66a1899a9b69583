"""Cache salts: requests share cached KV only with requests of the same salt.

A salt comes from the request's `cache_salt`, from the API key that it came with
(--cache-salt-by-key), or from both. It is part of the root of an engine's prefix tree, of the
digest that a prompt's KV is lent under, of lookups at other engines, and of the proxy's placement.

Salts are HMACs under the cluster secret, so that no client can name the salt of another key, and no
salt reveals a key.
"""

import hashlib
import hmac

MAX_CHARS = 1024  # of a request's `cache_salt`
SALT_BYTES = 32  # of a derived salt; an unsalted request has an empty one
_LABEL = b"baton cache salt"


def derive(cache_salt: str | None, key_digest: bytes, secret: bytes) -> bytes:
    """Returns the salt of a request, SALT_BYTES long; empty if nothing salts it.

    Args:
        cache_salt: what the request asks for, if anything.
        key_digest: of the API key that the request came with; empty where keys do not salt.
        secret: of the cluster.
    """
    if not (cache_salt or key_digest):
        return b""
    text = (cache_salt or "").encode(errors="surrogatepass")
    # The key's digest has one of two lengths, so its length keeps the two parts apart.
    message = b"%b %d\0%b%b" % (_LABEL, len(key_digest), key_digest, text)
    return hmac.digest(secret, message, hashlib.sha256)


def is_valid(cache_salt: object) -> bool:
    """Whether a request may have this `cache_salt`."""
    return isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_CHARS
