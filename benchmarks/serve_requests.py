"""The requests of benchmarks.serve: seeded prompts, request bodies, arrival times."""

import argparse
import itertools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")

# In many vocabularies, the ids below this one are special tokens.
FIRST_TOKEN_ID = 32
# Each word is about one token of an English vocabulary.
WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "is_member"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _PERSON, "minItems": 1000}


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process, in seconds from the first arrival.

    Args:
        rate: arrivals per second.
    """
    rng = random.Random(f"arrivals {seed}")
    gaps = (rng.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def draw_prompt(
    vocab: Sequence[_T], length: int, seed: int, index: int, *, shared: int = 0
) -> list[_T]:
    """Return prompt number `index`: `length` token ids or words of `vocab`.

    The first `shared` token ids or words are the same in every prompt of the seed.
    """
    shared_rng = random.Random(f"shared {seed}")
    prompt_rng = random.Random(f"prompt {seed} {index}")
    prefix = shared_rng.choices(vocab, k=shared)
    return prefix + prompt_rng.choices(vocab, k=length - shared)


def request_body(options: argparse.Namespace, index: int) -> dict[str, Any]:
    """Return the body of request `index`. Warm-up requests have negative indices."""
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    uses_words = options.prompt == "words"
    token_ids = range(FIRST_TOKEN_ID, options.vocab_size)
    prompt: Any = draw_prompt(
        WORDS if uses_words else token_ids,
        options.input_len,
        options.seed,
        index,
        shared=options.shared_len,
    )
    if uses_words:
        prompt = " ".join(prompt)
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if not options.no_ignore_eos:
        body["ignore_eos"] = True
    if options.schema:
        body["structured_outputs"] = {"json": SCHEMA}
    if options.is_baton:
        # A token that completes no character has no text. Its id shows that the token
        # arrived.
        body["return_token_ids"] = True
    return body
