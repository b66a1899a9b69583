"""Counts the tokens of an answer while the proxy passes it on, for keys whose tokens are limited.

The server's own `usage` decides where the answer has one. A stream without it is counted by its
frames (protocol/resume.py), which name every token, or else by its events, of at least one each.
"""

import msgspec

from protocol.resume import num_tokens_of


class _Usage(msgspec.Struct):
    """As completions and chats have it, or as responses do."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """What is read of an answer, of an event, or of an answer of /tokenize."""

    usage: _Usage | None = None
    response: _Response | None = None
    count: int | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_USAGE = b'"usage":'
_DATA = b"data:"


class TokenMeter:
    """What one answer has taken so far.

    Attributes:
        num_prompt_tokens: as the server reported it; None until then.
        is_known: the answer has come so far that it tells what it takes.
    """

    def __init__(self) -> None:
        self.restart()

    @property
    def num_generated_tokens(self) -> int:
        if self._num_reported is not None:
            return self._num_reported
        return self._num_framed or self._num_events

    def restart(self) -> None:
        """Another server begins the answer anew; its client has nothing of it."""
        self.num_prompt_tokens: int | None = None
        self.is_known = False
        self._num_reported: int | None = None  # generated tokens, by the server
        self._num_framed = 0
        self._num_events = 0

    def on_whole(self, body: bytes) -> None:
        """Reads an answer that is no stream."""
        self._read(body)

    def on_frame(self, text: bytes) -> None:
        """Counts the tokens that a frame's text names."""
        self.is_known = True
        self._num_framed += num_tokens_of(text)

    def on_events(self, events: bytes) -> None:
        """Counts whole events, and reads the usage of those that have one."""
        self.is_known = True
        for line in events.splitlines():
            if line.startswith(_DATA):
                self._num_events += 1
                if _USAGE in line:
                    self._read(line[len(_DATA) :])

    def _read(self, text: bytes) -> None:
        try:
            answer = _decode_answer(text)
        except (msgspec.MsgspecError, RecursionError):
            return  # another server's own kind of answer, or `[DONE]`
        self.is_known |= answer.count is not None or bool(answer.usage)
        usage = answer.usage or (answer.response and answer.response.usage)
        if answer.count is not None:
            self.num_prompt_tokens = answer.count
            self._num_reported = 0
        elif usage:
            self.num_prompt_tokens = usage.prompt_tokens or usage.input_tokens
            self._num_reported = usage.completion_tokens or usage.output_tokens or 0
