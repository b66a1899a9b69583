"""The version of Baton."""

import hashlib

VERSION = "0.1.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """Returns a hash of the model and of Baton's version.

    While the fingerprint is unchanged, a repeated request with the same seed has the
    same result.
    """
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
