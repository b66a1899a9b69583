"""Requests that compare servers with and without a drafter."""

from typing import Any, Final

from tests.rigs.client import MODEL, TIMEOUT_S
from tests.rigs.plain_http import http

_PROMPT = "Anna found a red ball. Ben found a red ball, too. Anna lost her red ball."
REQUESTS: Final[list[dict[str, Any]]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "presence_penalty": 0.5},
]


def answers(
    url: str, options: dict[str, Any], max_tokens: int
) -> tuple[list[str], int, int]:
    """Send a request. Return the texts of its answer, and the numbers of proposals that
    were accepted and rejected.

    Args:
        options: one of REQUESTS.
    """
    body = {"model": MODEL, "prompt": _PROMPT, "ignore_eos": True, **options}
    response = http.post(
        f"{url}/v1/completions",
        json={**body, "max_tokens": max_tokens},
        timeout=TIMEOUT_S,
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"]["completion_tokens_details"]
    return (
        [choice["text"] for choice in answer["choices"]],
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
    )
