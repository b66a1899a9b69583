"""Hand-written requests in the form in which Claude Code sends them."""

import copy
import json
from pathlib import Path
from typing import Any

_REQUESTS = json.loads((Path(__file__).parent / "agent_requests.json").read_text())


def agent_request(name: str, **members: Any) -> dict[str, Any]:
    """Return a request, which the caller may change.

    Args:
        name: first_turn, second_turn, count_tokens, title or quota.
        members: further members of the body. They override those of the stored request.
    """
    body: dict[str, Any] = copy.deepcopy(_REQUESTS[name])
    return {**body, **members}
