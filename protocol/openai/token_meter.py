"""Counts the tokens of a relayed response, for API keys with a token limit.

If the response has a `usage`, its numbers are used. Otherwise the tokens that Baton's
failover frames list are counted (protocol/resume.py). Without frames, each event counts
as one token. This is an estimate, because an event may have no token or several.
"""

import msgspec

from protocol.resume import num_tokens_of


class _Usage(msgspec.Struct):
    """The usage in a response.

    Completions and chats have the first two members, and /v1/responses has
    `input_tokens` and `output_tokens`. /v1/messages has all members except the first
    two. Its three counts of input tokens add up to the prompt.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def num_prompt_tokens(self) -> int | None:
        if self.input_tokens is None:
            return self.prompt_tokens
        num_created = self.cache_creation_input_tokens or 0
        num_read = self.cache_read_input_tokens or 0
        return self.input_tokens + num_created + num_read


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """The members that TokenMeter reads in a response or an event.

    Attributes:
        response: The response in an event of /v1/responses. In the last event, it has a
            usage.
        count: Number of tokens in a response of /tokenize.
        input_tokens: Number of tokens in a response of /v1/messages/count_tokens.
    """

    usage: _Usage | None = None
    response: _Response | None = None
    count: int | None = None
    input_tokens: int | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_USAGE = b'"usage":'
_DATA = b"data:"


class TokenMeter:
    """The token counts of one response so far.

    Attributes:
        num_prompt_tokens: The number that the server has reported; None: not reported.
        has_begun: Whether a part of the response has shown that the request uses
            tokens.
    """

    def __init__(self) -> None:
        self.reset()

    @property
    def num_generated_tokens(self) -> int:
        if self._num_reported_tokens is not None:
            return self._num_reported_tokens
        return self._num_framed_tokens or self._num_events

    def reset(self) -> None:
        """Resets the counts. The proxy calls this when a different server starts the
        response from the beginning.
        """
        self.num_prompt_tokens: int | None = None
        self.has_begun = False
        # Number of generated tokens that the server has reported in a usage.
        self._num_reported_tokens: int | None = None
        # Number of generated tokens in the failover frames of the stream.
        self._num_framed_tokens = 0
        self._num_events = 0

    def on_response(self, body: bytes) -> None:
        """Reads the usage of a response that is not a stream."""
        self._read(body)

    def on_frame(self, text: bytes) -> None:
        """Counts the tokens that a failover frame lists."""
        self.has_begun = True
        self._num_framed_tokens += num_tokens_of(text)

    def on_events(self, events: bytes) -> None:
        """Counts complete events, and reads the usage of each event with a usage."""
        self.has_begun = True
        for line in events.splitlines():
            if line.startswith(_DATA):
                self._num_events += 1
                if _USAGE in line:
                    self._read(line[len(_DATA) :])

    def _read(self, text: bytes) -> None:
        try:
            answer = _decode_answer(text)
        except (msgspec.MsgspecError, RecursionError):
            return  # `[DONE]`, or a response of an unknown kind
        count = answer.input_tokens if answer.count is None else answer.count
        self.has_begun |= count is not None or bool(answer.usage)
        usage = answer.usage or (answer.response and answer.response.usage)
        if count is not None:
            self.num_prompt_tokens = count
            self._num_reported_tokens = 0
        elif usage:
            self.num_prompt_tokens = usage.num_prompt_tokens
            self._num_reported_tokens = (
                usage.completion_tokens or usage.output_tokens or 0
            )
