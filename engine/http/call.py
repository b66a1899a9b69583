"""Turns the engine's deltas for an accepted call into one response or a stream.

A stream starts only when its first tokens have arrived. So a failure before the first
tokens is an HTTP error. A failure after the first tokens ends the stream with an error
event and no [DONE].
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.http.api import Api
from engine.http.choice import INLINE_LOGPROBS, ChoiceStream, PromptGeneration
from engine.http.middleware import cancelled_on_disconnect
from engine.http.request_stats import RequestStats
from engine.http.resume import Framing
from engine.http.text_encoder import client_texts
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
from protocol.openai.responses import (
    ChoicePiece,
    ResponseWriter,
    Usage,
    add_kv,
    kv_header,
)
from protocol.openai.sampling import GenerationRequest
from protocol.process.logging import get_logger
from protocol.resume import HEADER, Resume

log = get_logger(__name__)

# When a response resumes at this server, its frames are replayed on the event loop. The
# replay lets other tasks run after each group of this many frames.
_FRAMES_REPLAYED_AT_ONCE = 64


class HttpRequestState:
    """Answers one accepted request, as a stream or as a single response.

    Args:
        writer: the class that writes responses in the endpoint's format.
        adds: the requests to the engine, one for each prompt, in order.
        subscription: the subscription to the deltas of `adds`.
        framing: the response's frames, with which a proxy can continue the response at
            another server (engine/http/resume.py).

    Attributes:
        migrated_kv: the kv_transfer_params that refer to the KV of a request that has
            migrated to another server; None until the migration.
    """

    def __init__(
        self,
        api: Api,
        writer: type[ResponseWriter],
        parsed: GenerationRequest,
        adds: list[AddRequest],
        subscription: Subscription,
        stats: RequestStats,
        framing: Framing,
    ) -> None:
        stats.mark_accepted(sum(len(add.token_ids) for add in adds))
        self._hooks = api.hooks
        self._parsed = parsed
        self.framing = framing
        origin = framing.origin
        self.writer = writer(origin.id, origin.created, parsed, api.fingerprint)
        texts = client_texts(parsed)
        if parsed.truncate_prompt_tokens is not None:
            # An echo contains only the tokens that remain after truncation.
            texts = [None] * len(texts)
        num_choices = parsed.num_candidates
        self._prompts = {
            add.request_id: PromptGeneration(
                parsed,
                add,
                text,
                api.tokenizer,
                api.settings,
                first_index=prompt_index * num_choices,
                answer_id=origin.id,
            )
            for prompt_index, (add, text) in enumerate(zip(adds, texts, strict=True))
        }
        self.subscription = subscription
        self.stats = stats
        self._num_open_choices = num_choices * len(adds)
        self._num_sent_tokens = 0
        self.migrated_kv: dict[str, Any] | None = None

    @property
    def is_done(self) -> bool:
        return self._num_open_choices == 0

    async def respond(self, receive: Receive) -> Response:
        """Wait for tokens, and return the response.

        For a stream, the first tokens suffice. Any other response needs all tokens. The
        response closes the subscription when it has been sent. This function closes the
        subscription if an error occurs.

        Raises:
            BatonError: the request failed before its response began.
            ClientDisconnected: the client disconnected.
        """
        try:
            async with cancelled_on_disconnect(receive):
                framing = self.framing
                replayed: list[ChoicePiece] = []
                if framing.resumed:
                    replayed = await self._replay(framing.resumed)
                if framing.is_movable:  # from now on the server can migrate the request
                    self.subscription.allow_migration(
                        lambda: framing.may_migrate,
                        is_resumed=framing.resumed is not None,
                    )
                pieces = await self.next_pieces()
                if self._parsed.stream:
                    return EventStream(self, pieces)
                return await self._collect([*replayed, *pieces])
        except BaseException:
            self.subscription.close()
            raise

    async def _collect(self, pieces: list[ChoicePiece]) -> Response:
        """Collect all pieces and return the complete response.

        If the request migrates while pieces are collected, the response contains the
        request's frames instead. With these, another server continues the response.

        Args:
            pieces: the pieces that have arrived so far, including those that `_replay`
                returned.
        """
        merged: dict[int, ChoicePiece] = {}
        while True:
            self.framing.hold_frame()
            if self.migrated_kv is not None:
                return EventStream(self, [])
            for piece in pieces:
                self.writer.add_piece(piece)
                if piece.index in merged:
                    merged[piece.index].extend(piece)
                else:
                    merged[piece.index] = piece
            if self.is_done:
                break
            pieces = await self.next_pieces()
        choices = self._best_candidates(merged)
        usage, extra = self._finish(choices[0].finish_reason)
        write = partial(self.writer.complete_body, choices, usage, extra)
        num_tokens = sum(len(choice.logprobs or ()) for choice in choices)
        is_long = num_tokens * (1 + (self._parsed.num_logprobs or 0)) > INLINE_LOGPROBS
        body = await asyncio.to_thread(write) if is_long else write()
        headers = {
            KV_HEADER: kv_header(usage),
            **self.prefill_kv_headers(),
            **self.stats.report_headers(),
        }
        return CompleteAnswer(
            self.subscription, body, headers, refers_to_kv=bool(extra)
        )

    def prefill_kv_headers(self) -> dict[str, str]:
        """Return the header that counts the prefill legs' prompt tokens by KV source.

        Returns {} while a prompt has no usage yet, and if all these counts are 0.
        """
        usages = [prompt.latest_usage for prompt in self._prompts.values()]
        usage = Usage(kv=add_kv([kv for kv in usages if kv is not None]))
        if None in usages or not any(usage.baton_kv("prefill_").values()):
            return {}
        return {PREFILL_KV_HEADER: kv_header(usage, "prefill_")}

    def _best_candidates(self, merged: dict[int, ChoicePiece]) -> list[ChoicePiece]:
        """Select the `n` best candidates of each prompt, and number them from 0.

        Args:
            merged: the complete answers of all candidates, by index. This function
                changes the `index` of the selected answers.
        """
        best: list[ChoiceStream] = []
        for prompt in self._prompts.values():
            ranked = prompt.choices
            if len(ranked) > self._parsed.n:
                ranked = sorted(ranked, key=lambda choice: -choice.mean_logprob)
            best += ranked[: self._parsed.n]
        pieces = [merged[choice.index] for choice in best]
        for index, piece in enumerate(pieces):
            piece.index = index
        return pieces

    async def next_pieces(self, timeout_s: float | None = None) -> list[ChoicePiece]:
        """Wait for pieces, and return those that have arrived since the last call.

        The result is empty only if the request is done or has migrated, or if nothing
        has arrived for `timeout_s`. A migration sets `migrated_kv`. New tokens are
        counted in the request's stats, and added to the response's next frame.

        Raises:
            BatonError: a sequence failed; the call cannot continue.
        """
        if timeout_s is not None:
            if not await self.subscription.wait_for_news(timeout_s):
                return []
        while True:
            pieces: list[ChoicePiece] = []
            for delta in await self.subscription.next_batch():
                prompt = self._prompts[delta.request_id]
                if delta.finish_reason == MOVED:
                    self._mark_migrated(prompt.choices[delta.choice].index, delta)
                    continue
                if delta.prompt_logprobs is not None:
                    prompt.add_logprobs(delta.prompt_logprobs)
                if prompt.is_slow_to_report:
                    await asyncio.to_thread(prompt.prompt_report)
                piece = self._feed(delta)
                if piece is None:
                    continue
                pieces.append(piece)
                if piece.token_ids:
                    self.stats.add_tokens(len(piece.token_ids))
                self.framing.add_delta(piece.index, delta)
            if pieces or self.is_done or self.migrated_kv is not None:
                return pieces

    def _mark_migrated(self, index: int, delta: TokenDelta) -> None:
        self.framing.add_migrated(index, delta)
        if self.migrated_kv is None:
            self.migrated_kv = delta.kv_transfer_params or {}

    async def _replay(self, resumed: Resume) -> list[ChoicePiece]:
        """Restore the state of a resumed request from its frames.

        Returns:
            The pieces of the frames; [] for a stream, because its client has already
            received these pieces.
        """
        pieces: list[ChoicePiece] = []
        request_ids = list(self._prompts)
        num_choices = self._parsed.num_candidates
        for prompt in self._prompts.values():
            if prompt.is_resumed and self._parsed.num_prompt_logprobs is not None:
                # The client has already received the prompt's logprobs. Placeholders
                # replace them, because `prompt_report` needs an entry for each token.
                prompt.add_logprobs([None] * len(prompt.token_ids))
        for number, frame in enumerate(resumed.frames, 1):
            frame_pieces = []
            for entry in frame:
                request_id = request_ids[entry.index // num_choices]
                delta = entry.to_delta(request_id, entry.index % num_choices)
                piece = self._feed(delta)
                if piece is not None:
                    frame_pieces.append(piece)
            if self._parsed.stream:
                self.events(frame_pieces)
            else:
                pieces += frame_pieces
            if number % _FRAMES_REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return pieces

    def _feed(self, delta: TokenDelta) -> ChoicePiece | None:
        """Feed a delta to its choice, and return the piece that the delta adds, if any.

        Aborts the choice in the engine if the delta completes a stop string. Raises the
        delta's error, if the delta has one.
        """
        if delta.error is not None:
            raise delta.error.to_error()
        prompt = self._prompts[delta.request_id]
        if delta.choice == 0 and delta.usage is not None:
            delta = prompt.record_usage(delta)
        choice = prompt.choices[delta.choice]
        was_stopped = choice.hit_stop_string
        piece = choice.feed(delta)
        if piece is None:
            return None
        if piece.finish_reason is not None:
            self._num_open_choices -= 1
        elif choice.needs_abort and not was_stopped:
            has_other_choices = len(prompt.choices) > 1
            self.subscription.abort(
                delta.request_id, delta.choice if has_other_choices else None
            )
        return piece

    def events(self, pieces: list[ChoicePiece]) -> bytes:
        """Return the server-sent events for `pieces`.

        If `pieces` end the request, the events end in [DONE], and this function records
        the request as finished.
        """
        last_position = len(pieces) - 1 if self.is_done else -1
        shows_tokens = self._parsed.return_token_ids or self._parsed.wants_logprobs
        parts: list[bytes] = []
        usage_so_far = self._usage() if self._parsed.continuous_usage else None
        for position, piece in enumerate(pieces):
            self._num_sent_tokens += len(piece.token_ids)
            # After a stop string has ended the text, further pieces have no tokens.
            has_shown_tokens = shows_tokens and piece.token_ids
            if position == last_position:
                usage, extra = self._finish(piece.finish_reason)
                parts.append(self.writer.last_chunk(piece, usage, extra))
                parts.append(self.writer.end)
            elif (
                has_shown_tokens
                or piece.is_first
                or piece.finish_reason
                or piece.has_content
            ):
                if usage_so_far is not None:
                    # Report only the tokens up to this piece: more pieces may have
                    # arrived in the same batch.
                    usage_so_far.completion_tokens = self._num_sent_tokens
                parts.append(self.writer.chunk(piece, usage_so_far))
        return b"".join(parts)

    def _finish(self, finish_reason: str | None) -> tuple[Usage, dict[str, Any]]:
        """Record the request as finished.

        Returns:
            The usage, and the members that the hooks add to the response.
        """
        usage = self._usage()
        last_deltas = self._last_deltas()
        extra = self._hooks.response_members(last_deltas)
        times = last_deltas[0].times if last_deltas else None
        self.stats.mark_finished(usage, finish_reason or "stop", times)
        return usage, extra

    def _last_deltas(self) -> list[TokenDelta]:
        """Return the last delta of each prompt's first choice, if it has arrived."""
        deltas = [prompt.choices[0].last_delta for prompt in self._prompts.values()]
        return [delta for delta in deltas if delta is not None]

    def _usage(self) -> Usage:
        """Return the request's usage.

        The tokens of all candidates count, including those that are not in the
        response. The tokens of a prompt count once, however many candidates it has.
        """
        prompts = self._prompts.values()
        choices = [choice for prompt in prompts for choice in prompt.choices]
        usages = [prompt.usage for prompt in prompts if prompt.usage is not None]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
            accepted_tokens=sum(choice.num_accepted_tokens for choice in choices),
            rejected_tokens=sum(choice.num_rejected_tokens for choice in choices),
            kv=add_kv(usages),
        )


class CompleteAnswer(Response):
    """A complete JSON response, which closes its subscription when it has been sent.

    A response may refer to KV that this server retains. If the connection is closed
    before the client has received such a response, no server will pull the KV. Closing
    the subscription then releases the KV.
    """

    media_type = "application/json"

    def __init__(
        self,
        subscription: Subscription,
        body: bytes,
        headers: Mapping[str, str],
        refers_to_kv: bool,
    ) -> None:
        super().__init__(body, headers=headers)
        self._subscription = subscription
        self._refers_to_kv = refers_to_kv

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _send_head(send, self)
            await _send_body(send, bytes(self.body), more=self._refers_to_kv)
            if self._refers_to_kv:
                # `_send_body` returns only when most of the body has been sent.
                await _send_body(send, b"", more=True)
                if not is_closing(scope):
                    self._subscription.confirm_delivery()
                await _send_body(send, b"", more=False)
        finally:
            self._subscription.close()


class EventStream(Response):
    """Sends the events of a call.

    This class is cheaper than Starlette's StreamingResponse, which runs a task group
    for each stream.

    Args:
        pieces: the pieces that have already arrived. They are sent first.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(self, call: HttpRequestState, pieces: list[ChoicePiece]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers | call.prefill_kv_headers())
        del self.headers["content-length"]
        if call.framing.is_requested:
            self.headers[HEADER] = "1"
        self._call = call
        self._pieces = pieces
        self._pings = sse.Pings(call.writer.ping)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with cancelled_on_disconnect(receive):
                await _send_head(send, self)
                await self._send_events(send)
                if self._call.migrated_kv is not None:
                    await self._send_migration(scope, send, self._call.migrated_kv)
        except BaseException as error:
            self._call.stats.mark_failed(error)
            if not isinstance(error, ClientDisconnected):
                raise
        finally:
            self._call.subscription.close()

    async def _send_events(self, send: Send) -> None:
        """Send events until the call is done, has migrated or fails.

        A failure is sent as an error event.
        """
        call = self._call
        pieces = self._pieces
        framing = call.framing
        first_frame = framing.origin_frame()
        try:
            while True:
                data = self._pings.with_ping(call.events(pieces))
                # A frame is sent even without events, because it has the tokens.
                if pieces or data:
                    report = framing.report_frame(call.stats.report)
                    data = first_frame + report + framing.wrap(data)
                    first_frame = b""
                if data:
                    await _send_body(send, data, more=not call.is_done)
                if call.is_done or call.migrated_kv is not None:
                    return
                pieces = await call.next_pieces(self._pings.wait_s())
        except BatonError as error:
            failure = error
        except Exception:
            log.exception("A stream failed and ends with an error event.")
            failure = InternalError("The server failed while it was answering.")
        call.stats.mark_failed(failure)
        event = framing.wrap_error(failure, call.writer.error(failure))
        await _send_body(send, event, more=False)

    async def _send_migration(
        self, scope: Scope, send: Send, params: dict[str, Any]
    ) -> None:
        """End the stream, so that the proxy continues the stream at another server.

        Args:
            params: the kv_transfer_params that refer to the stream's KV.
        """
        self._call.stats.mark_migrated()
        error = NoServerAvailable(
            "the stream left this server and no other server continued it; send the "
            "request again"
        )
        end = self._call.framing.migration_end(params, self._call.writer.error(error))
        await _send_body(send, end, more=True)
        if not is_closing(scope):
            self._call.subscription.confirm_delivery()
        await _send_body(send, b"", more=False)


async def _send_head(send: Send, response: Response) -> None:
    start = {"type": "http.response.start", "status": response.status_code}
    await send({**start, "headers": response.raw_headers})


async def _send_body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
