"""The version of Baton."""

import hashlib

VERSION = "0.1.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """Returns a hash of the model and of Baton's version.

    If a request with a seed is repeated, the result is the same unless the fingerprint
    has changed.
    """
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
