"""The version of Baton."""

import hashlib

VERSION = "0.1.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """Returns a hash of the weights and this version.

    A request with a seed gets the same result again as long as the fingerprint is the
    same.
    """
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
