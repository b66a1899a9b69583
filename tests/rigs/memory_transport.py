"""A transport between an engine core and a test."""

from protocol.messages import (
    EngineInput,
    EngineOutput,
    EngineStats,
    Outputs,
    TokenDelta,
    TokenLogprobs,
)


class MemoryTransport:
    """A transport that keeps the messages that the core sends, for the test to read."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.compiled: list[str] = []
        self.stats: dict[str, float] = {}

    def receive(self, timeout_s: float) -> tuple[list[EngineInput], bool]:
        return [], True

    def wake(self) -> None:
        pass

    def send(self, message: EngineOutput) -> None:
        match message:
            case Outputs(deltas, compiled):
                self.deltas += deltas
                self.compiled += compiled
            case EngineStats(values):
                self.stats = values

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [
            token
            for delta in self.deltas
            if delta.request_id == request_id and delta.choice == choice
            for token in delta.token_ids
        ]

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprobs | None]:
        return [
            row
            for delta in self.deltas
            if delta.request_id == request_id
            for row in delta.prompt_logprobs or []
        ]

    def terminals(self, request_id: str) -> list[TokenDelta]:
        """Return the deltas that ended the request or one of its choices."""
        return [
            delta
            for delta in self.deltas
            if delta.request_id == request_id
            and (delta.finish_reason is not None or delta.error is not None)
        ]
