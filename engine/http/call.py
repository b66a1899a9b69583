"""An accepted call: the engine's deltas as one answer, whole or a stream.

A stream starts only when the first tokens are there, so whatever fails before that is an HTTP
error; a later failure ends the stream with an error event and no [DONE].
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.http.api import Api, Endpoint
from engine.http.choice import INLINE_LOGPROBS, ChoiceStream, PromptGeneration
from engine.http.middleware import cancelled_on_disconnect
from engine.http.request_stats import RequestStats
from engine.http.resume import Framing
from engine.http.text_encoder import given_texts
from engine.process.client import Subscription
from protocol.errors import BatonError, InternalError, NoServerAvailable
from protocol.http import sse
from protocol.http.bodies import ClientDisconnected, is_closing
from protocol.messages import (
    KV_HEADER,
    MOVED,
    PREFILL_KV_HEADER,
    AddRequest,
    TokenDelta,
)
from protocol.openai.responses import ChoicePiece, Usage, add_kv, kv_header
from protocol.openai.sampling import GenerationRequest
from protocol.process.logging import get_logger
from protocol.resume import HEADER, Resume

log = get_logger(__name__)

_FRAMES_AT_ONCE = 64  # of a stream that goes on here, before others have their turn


class HttpRequestState:
    """Answers one accepted request, in a stream or whole.

    Args:
        adds: the engine's requests, one for each prompt, in order.
        subscription: to them.
        framing: by which it may go on elsewhere, or goes on here.
    """

    def __init__(
        self,
        api: Api,
        endpoint: Endpoint,
        parsed: GenerationRequest,
        adds: list[AddRequest],
        subscription: Subscription,
        stats: RequestStats,
        framing: Framing,
    ) -> None:
        stats.accepted(sum(len(add.token_ids) for add in adds))
        self._hooks = api.hooks
        self._parsed = parsed
        self.framing = framing
        origin = framing.origin
        self.writer = endpoint.writer(
            origin.id, origin.created, parsed, api.fingerprint
        )
        texts = given_texts(parsed)
        if parsed.truncate_prompt_tokens is not None:
            texts = [None] * len(texts)  # an echo is of the tokens that are left
        n, how = parsed.num_candidates, (api.tokenizer, api.settings)
        self._prompts = {
            add.request_id: PromptGeneration(parsed, add, text, *how, at * n, origin.id)
            for at, (add, text) in enumerate(zip(adds, texts, strict=True))
        }
        self.subscription = subscription
        self.stats = stats
        self._num_open = n * len(adds)
        self._num_told = 0  # tokens of a stream so far
        self.moved: dict[str, Any] | None = (
            None  # where its KV is, once it goes on elsewhere
        )

    @property
    def done(self) -> bool:
        return self._num_open == 0

    async def respond(self, receive: Receive) -> Response:
        """The response, which ends its requests itself.

        Raises:
            BatonError: it failed before there is an answer.
            ClientDisconnected: the client has gone.
        """
        try:
            async with cancelled_on_disconnect(receive):
                known, framing = list[ChoicePiece](), self.framing
                if framing.resumed:
                    known = await self._replay(framing.resumed)
                if framing.is_movable:  # from now on who drains this server waits
                    has_come = framing.resumed is not None
                    self.subscription.let_move(
                        lambda: framing.may_move, has_come=has_come
                    )
                pieces = await self.next_pieces()
                if self._parsed.stream:
                    return EventStream(self, pieces)
                return await self._whole([*known, *pieces])
        except BaseException:
            self.subscription.close()
            raise

    async def _whole(self, pieces: list[ChoicePiece]) -> Response:
        merged: dict[int, ChoicePiece] = {}
        while True:
            self.framing.hold()
            if self.moved is not None:
                return EventStream(self, [])
            for piece in pieces:
                self.writer.take(piece)
                if piece.index in merged:
                    merged[piece.index].extend(piece)
                else:
                    merged[piece.index] = piece
            if self.done:
                break
            pieces = await self.next_pieces()
        choices = self._best(merged)
        usage, extra = self._finish(choices[0].finish_reason)
        write = partial(self.writer.full, choices, usage, extra)
        num_tokens = sum(len(choice.logprobs or ()) for choice in choices)
        is_long = num_tokens * (1 + (self._parsed.num_logprobs or 0)) > INLINE_LOGPROBS
        body = await asyncio.to_thread(write) if is_long else write()
        headers = {KV_HEADER: kv_header(usage), **self.prefill_kv()}
        return WholeAnswer(self.subscription, body, headers, tells_of_kv=bool(extra))

    def prefill_kv(self) -> dict[str, str]:
        """The header of what prefill legs did, once that is known of every prompt."""
        firsts = [prompt.first_usage for prompt in self._prompts.values()]
        usage = Usage(kv=add_kv([first for first in firsts if first is not None]))
        if None in firsts or not any(usage.baton_kv("prefill_").values()):
            return {}
        return {PREFILL_KV_HEADER: kv_header(usage, "prefill_")}

    def _best(self, merged: dict[int, ChoicePiece]) -> list[ChoicePiece]:
        """Of the whole answers by index, those to be returned, in order and with new indices."""
        chosen: list[ChoiceStream] = []
        for prompt in self._prompts.values():
            ranked = prompt.choices
            if len(ranked) > self._parsed.n:
                ranked = sorted(ranked, key=lambda choice: -choice.mean_logprob)
            chosen += ranked[: self._parsed.n]
        pieces = [merged[choice.index] for choice in chosen]
        for index, piece in enumerate(pieces):
            piece.index = index
        return pieces

    async def next_pieces(self) -> list[ChoicePiece]:
        """What has arrived since the last call, at least one piece until `done` or `moved`.

        Raises:
            BatonError: a sequence failed; the call cannot go on.
        """
        while True:
            pieces: list[ChoicePiece] = []
            for delta in await self.subscription.next_batch():
                if delta.finish_reason == MOVED:
                    self.moved = delta.kv_transfer_params or {}
                    return pieces
                prompt = self._prompts[delta.request_id]
                if delta.prompt_logprobs is not None:
                    prompt.add_logprobs(delta.prompt_logprobs)
                if prompt.takes_long:
                    await asyncio.to_thread(prompt.tell)
                piece = self._feed(delta)
                if piece is None:
                    continue
                pieces.append(piece)
                if piece.token_ids:
                    self.stats.tokens(len(piece.token_ids))
                self.framing.take(piece.index, delta)
            if pieces or self.done:
                return pieces

    async def _replay(self, resumed: Resume) -> list[ChoicePiece]:
        """Takes in what the client has of a stream, and returns what it has not of an answer."""
        pieces: list[ChoicePiece] = []
        names, n = list(self._prompts), self._parsed.num_candidates
        for prompt in self._prompts.values():
            if prompt.is_known and self._parsed.num_prompt_logprobs is not None:
                prompt.add_logprobs([None] * len(prompt.ids))  # the client has them
        for number, frame in enumerate(resumed.frames, 1):
            fed = [
                self._feed(
                    TokenDelta(
                        request_id=names[told.index // n],
                        choice=told.index % n,
                        token_ids=told.token_ids,
                        finish_reason=told.finish_reason,
                        usage=told.usage,
                        logprobs=told.logprobs,
                    )
                )
                for told in frame
            ]
            found = [piece for piece in fed if piece is not None]
            if self._parsed.stream:
                self.events(found)
            else:
                pieces += found
            if number % _FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return pieces

    def _feed(self, delta: TokenDelta) -> ChoicePiece | None:
        if delta.error is not None:
            raise delta.error.to_error()
        prompt = self._prompts[delta.request_id]
        if delta.choice == 0 and delta.usage is not None:
            delta = prompt.with_first_usage(delta)
        choice = prompt.choices[delta.choice]
        was_found = choice.stop_found
        piece = choice.feed(delta)
        if piece is None:
            return None
        if piece.finish_reason is not None:
            self._num_open -= 1
        elif choice.needs_abort and not was_found:
            several = len(prompt.choices) > 1
            self.subscription.abort(delta.request_id, delta.choice if several else None)
        return piece

    def events(self, pieces: list[ChoicePiece]) -> bytes:
        """The stream's bytes for some pieces, through [DONE] when they are the last."""
        last = len(pieces) - 1 if self.done else -1
        shows_tokens = self._parsed.return_token_ids or self._parsed.wants_logprobs
        parts: list[bytes] = []
        so_far = self._usage() if self._parsed.continuous_usage else None
        for position, piece in enumerate(pieces):
            self._num_told += len(piece.token_ids)
            shows_all = shows_tokens and piece.token_ids  # none after a stop string
            if position == last:
                usage, extra = self._finish(piece.finish_reason)
                parts.append(
                    self.writer.last_chunk(piece, usage, extra) + self.writer.end
                )
            elif shows_all or piece.first or piece.finish_reason or piece.has_text:
                if (
                    so_far is not None
                ):  # up to this piece: others may have arrived with it
                    so_far.completion_tokens = self._num_told
                parts.append(self.writer.chunk(piece, so_far))
        return b"".join(parts)

    def _finish(self, finish_reason: str | None) -> tuple[Usage, dict[str, Any]]:
        usage = self._usage()
        finals = self._finals()
        extra = self._hooks.finish(finals)
        self.stats.finished(
            usage, finish_reason or "stop", finals[0].times if finals else None
        )
        return usage, extra

    def _finals(self) -> list[TokenDelta]:
        """The last delta of each prompt's first choice, in order, as far as they have come."""
        firsts = [prompt.choices[0].final for prompt in self._prompts.values()]
        return [final for final in firsts if final is not None]

    def _usage(self) -> Usage:
        """Of every candidate, returned or not; a prompt counts once."""
        prompts = self._prompts.values()
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            completion_tokens=sum(
                c.num_tokens for prompt in prompts for c in prompt.choices
            ),
            reasoning_tokens=sum(
                c.num_reasoning for prompt in prompts for c in prompt.choices
            ),
            kv=add_kv(
                [final.usage for final in self._finals() if final.usage is not None]
            ),
        )


class WholeAnswer(Response):
    """Ends its requests. Where it says where retained KV is, and the connection ends before it has
    taken that, nobody will come for the KV."""

    media_type = "application/json"

    def __init__(
        self,
        subscription: Subscription,
        body: bytes,
        headers: Mapping[str, str],
        tells_of_kv: bool,
    ) -> None:
        super().__init__(body, headers=headers)
        self._subscription = subscription
        self._tells_of_kv = tells_of_kv

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _send_head(send, self)
            await _send_body(send, bytes(self.body), more=self._tells_of_kv)
            if self._tells_of_kv:
                await _send_body(send, b"", more=True)  # waits until most of it is out
                if not is_closing(scope):
                    self._subscription.answered()
                await _send_body(send, b"", more=False)
        finally:
            self._subscription.close()


class EventStream(Response):
    """Sends a call's events; leaner than StreamingResponse, which runs a task group per stream."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, call: HttpRequestState, pieces: list[ChoicePiece]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers | call.prefill_kv())
        del self.headers["content-length"]
        if call.framing.is_asked:
            self.headers[HEADER] = "1"
        self._call = call
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with cancelled_on_disconnect(receive):
                await _send_head(send, self)
                await self._send_events(send)
                if self._call.moved is not None:
                    await self._hand_over(scope, send, self._call.moved)
        except BaseException as error:
            self._call.stats.close(error)
            if not isinstance(error, ClientDisconnected):
                raise
        finally:
            self._call.subscription.close()

    async def _send_events(self, send: Send) -> None:
        call, pieces, framing = self._call, self._pieces, self._call.framing
        before = framing.begin()
        try:
            while True:
                data = call.events(pieces)
                if pieces:  # of tokens, too, that no event shows yet
                    data, before = before + framing.wrap(data), b""
                if data:
                    await _send_body(send, data, more=not call.done)
                if call.done or call.moved is not None:
                    return
                pieces = await call.next_pieces()
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("a stream failed")
            failure = InternalError("The server failed while it was answering.")
        call.stats.close(failure)
        await _send_body(
            send, framing.wrap_error(failure, call.writer.error(failure)), more=False
        )

    async def _hand_over(
        self, scope: Scope, send: Send, params: dict[str, Any]
    ) -> None:
        self._call.stats.moved()
        over = NoServerAvailable("the server hands its streams over; ask again")
        end = self._call.framing.moved(params, self._call.writer.error(over))
        await _send_body(send, end, more=True)
        if not is_closing(scope):
            self._call.subscription.answered()
        await _send_body(send, b"", more=False)


async def _send_head(send: Send, response: Response) -> None:
    start = {"type": "http.response.start", "status": response.status_code}
    await send({**start, "headers": response.raw_headers})


async def _send_body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
