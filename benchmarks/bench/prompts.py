"""Makes request bodies with random prompts that share the prefixes of the workload.

Every endpoint of a run gets the same tokens, except in later turns of a conversation.
As with a real client, the prompt of a later turn contains the endpoint's own answers to
the earlier turns.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.bench.workload import Segment, Workload, segments

# In many vocabularies, the ids below this one are special tokens.
FIRST_TOKEN_ID = 32
# In an English vocabulary, each of these words is about one token.
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

TokenArray = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class Answer:
    """The answer of an endpoint to one turn.

    Attributes:
        token_ids: empty if the endpoint does not return token ids.
    """

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class BodyOptions:
    """The options for the content of request bodies.

    Attributes:
        is_chat: whether requests go to /v1/chat/completions.
        uses_words: True if prompts consist of words, False if of token ids.
        vocab_size: random token ids are below this number.
        has_schema: whether answers have to follow a JSON schema.
        retention: value of the field `prompt_cache_retention`; None: no such field.
    """

    is_chat: bool = False
    uses_words: bool = False
    vocab_size: int = 256
    temperature: float = 0.0
    seed: int = 0
    ignores_eos: bool = True
    has_schema: bool = False
    retention: str | None = None


class PromptMaker:
    """Makes the request bodies of a workload.

    The random tokens of a shared block are drawn only once.
    """

    def __init__(self, workload: Workload, options: BodyOptions) -> None:
        self._workload = workload
        self._options = options
        self._shared: dict[tuple[object, ...], TokenArray] = {}
        # The prompts of first turns are drawn here, before the measurement starts.
        self._first_tokens = [
            self._array(index, 0, []) for index in range(len(workload.sessions))
        ]

    def tokens(
        self, session_index: int, turn_index: int, answers: Sequence[Answer]
    ) -> list[int]:
        """Return the token ids of a prompt. If prompts consist of words, return the
        indices of its words in WORDS.

        Args:
            answers: the endpoint's answers to the earlier turns. An answer without
                token ids is replaced by random token ids.
        """
        array = self._array(session_index, turn_index, answers)
        tokens: list[int] = array.tolist()
        return tokens

    def _array(
        self, session_index: int, turn_index: int, answers: Sequence[Answer]
    ) -> TokenArray:
        parts = []
        for segment in segments(self._workload, session_index, turn_index):
            key, _ = segment
            if key[0] == "answer":
                answer = answers[int(str(key[2]))]
                if answer.token_ids:
                    parts.append(np.asarray(answer.token_ids, dtype=np.int32))
                    continue
            parts.append(self._draw(segment))
        return np.concatenate(parts)

    def _draw(self, segment: Segment) -> TokenArray:
        """Return random tokens for a segment of a prompt."""
        key, length = segment
        is_shared = key[0] == "block"
        drawn = self._shared.get(key) if is_shared else None
        if drawn is None or len(drawn) < length:
            block_tokens = self._workload.block_tokens
            drawn = self._random(
                key, max(length, block_tokens) if is_shared else length
            )
            if is_shared:
                self._shared[key] = drawn
        return drawn[:length]

    def _random(self, key: tuple[object, ...], length: int) -> TokenArray:
        seed = zlib.crc32(f"{self._options.seed} {key}".encode())
        rng = np.random.default_rng(seed)
        if self._options.uses_words:
            return rng.integers(0, len(WORDS), length, dtype=np.int32)
        vocab_size = self._options.vocab_size
        return rng.integers(FIRST_TOKEN_ID, vocab_size, length, dtype=np.int32)

    def body(
        self,
        session_index: int,
        turn_index: int,
        answers: Sequence[Answer],
        *,
        model: str,
        returns_token_ids: bool,
    ) -> dict[str, Any]:
        """Return the body of one request.

        Args:
            returns_token_ids: whether the endpoint can return token ids. A token that
                completes no character has no text, so only its id shows its arrival.
        """
        turn = self._workload.sessions[session_index].turns[turn_index]
        body = self._common_fields(model, turn.output_tokens, returns_token_ids)
        if self._options.is_chat:
            body["messages"] = self._messages(session_index, turn_index, answers)
        elif self._options.uses_words:
            body["prompt"] = self._text(session_index, turn_index, answers)
        elif turn_index:
            body["prompt"] = self.tokens(session_index, turn_index, answers)
        else:
            body["prompt"] = self._first_tokens[session_index].tolist()
        return body

    def warmup_body(
        self, number: int, *, model: str, returns_token_ids: bool
    ) -> dict[str, Any]:
        """Return the body of a warm-up request.

        It has the lengths of the first request of the workload, but its prompt shares
        no prefix with other requests.
        """
        turn = self._workload.sessions[0].turns[0]
        body = self._common_fields(model, turn.output_tokens, returns_token_ids)
        numbers: list[int]
        numbers = self._random(("warm-up", number), turn.input_tokens).tolist()
        words = " ".join(WORDS[number % len(WORDS)] for number in numbers)
        if self._options.is_chat:
            body["messages"] = [{"role": "user", "content": words}]
        elif self._options.uses_words:
            body["prompt"] = words
        else:
            body["prompt"] = numbers
        return body

    def _common_fields(
        self, model: str, output_tokens: int, returns_token_ids: bool
    ) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignores_eos:
            body["ignore_eos"] = True
        if options.has_schema:
            body["structured_outputs"] = {"json": SCHEMA}
        if options.retention is not None:
            body["prompt_cache_retention"] = options.retention
        if returns_token_ids:
            body["return_token_ids"] = True
        return body

    def _messages(
        self, session_index: int, turn_index: int, answers: Sequence[Answer]
    ) -> list[dict[str, str]]:
        messages = []
        for index in range(turn_index + 1):
            words = self._turn_words(session_index, index)
            messages.append({"role": "user", "content": words})
            if index < turn_index:
                messages.append({"role": "assistant", "content": answers[index].text})
        return messages

    def _text(
        self, session_index: int, turn_index: int, answers: Sequence[Answer]
    ) -> str:
        parts = []
        for index in range(turn_index + 1):
            parts.append(self._turn_words(session_index, index))
            if index < turn_index:
                parts.append(answers[index].text)
        return " ".join(parts)

    def _turn_words(self, session_index: int, turn_index: int) -> str:
        """Return the user's words in one turn of a conversation."""
        parts = segments(self._workload, session_index, turn_index)
        # Skip the segments of earlier turns, which end with the latest answer.
        keys = [key[0] for key, _ in parts]
        start = 0
        if "answer" in keys:
            start = len(keys) - keys[::-1].index("answer")
        numbers = [number for part in parts[start:] for number in self._draw(part)]
        return " ".join(WORDS[number] for number in numbers)
