"""Which web pages may call these servers from a browser: none, unless named by --cors-origin."""

from collections.abc import Sequence
from typing import Any


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of starlette's CORSMiddleware; the origin "*" stands for any."""
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["*"],
        "expose_headers": ["x-request-id", "x-baton-kv"],
        "max_age": 600,  # seconds that a browser may remember the answer for
    }
