"""Which Baton this is."""

import hashlib

VERSION = "0.1.0"


def system_fingerprint(model_fingerprint: str) -> str:
    """What a seed's results depend on besides the request: the weights and this version."""
    digest = hashlib.sha256(f"{VERSION} {model_fingerprint}".encode()).hexdigest()
    return f"fp_{digest[:16]}"
