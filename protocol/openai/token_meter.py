"""Counts the tokens of a response that the proxy passes on, for keys with token limits.

The `usage` in the response counts if there is one. A stream without usage is counted by
its frames (protocol/resume.py), which list every token. A stream without frames is
counted by its events, which have at least one token each.
"""

import msgspec

from protocol.resume import num_tokens_of


class _Usage(msgspec.Struct):
    """The usage of completions and chats, or of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """The members of a response, an event, or a response of /tokenize that are read."""

    usage: _Usage | None = None
    response: _Response | None = None
    count: int | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_USAGE = b'"usage":'
_DATA = b"data:"


class TokenMeter:
    """The token counts of one response so far.

    Attributes:
        num_prompt_tokens: The number that the server has reported, or None.
        has_begun: Whether enough of the response has arrived to know that it uses
            tokens.
    """

    def __init__(self) -> None:
        self.restart()

    @property
    def num_generated_tokens(self) -> int:
        if self._num_reported is not None:
            return self._num_reported
        return self._num_framed or self._num_events

    def restart(self) -> None:
        """Resets the counts, as another server starts the response from the
        beginning.
        """
        self.num_prompt_tokens: int | None = None
        self.has_begun = False
        self._num_reported: int | None = (
            None  # generated tokens that the server reported
        )
        self._num_framed = 0
        self._num_events = 0

    def on_whole(self, body: bytes) -> None:
        """Reads a response that is not a stream."""
        self._read(body)

    def on_frame(self, text: bytes) -> None:
        """Counts the tokens in a frame's text."""
        self.has_begun = True
        self._num_framed += num_tokens_of(text)

    def on_events(self, events: bytes) -> None:
        """Counts complete events, and reads the usage of those that have one."""
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
            return  # an unknown kind of response, or `[DONE]`
        self.has_begun |= answer.count is not None or bool(answer.usage)
        usage = answer.usage or (answer.response and answer.response.usage)
        if answer.count is not None:
            self.num_prompt_tokens = answer.count
            self._num_reported = 0
        elif usage:
            self.num_prompt_tokens = usage.prompt_tokens or usage.input_tokens
            self._num_reported = usage.completion_tokens or usage.output_tokens or 0
