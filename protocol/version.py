"""The version of Baton."""

import hashlib

VERSION = "0.1.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """Returns a hash of the model and of Baton's version.

    A request with a seed produces the same result again if the fingerprint is the same.
    """
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
