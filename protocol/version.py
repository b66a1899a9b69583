"""The version of Baton."""

import hashlib

VERSION = "0.2.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """Returns a hash of the model and of Baton's version.

    If the fingerprint has changed, a repeated request with the same seed may have a
    different result.
    """
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
