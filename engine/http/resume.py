"""Streams that may migrate to another server, and streams that resume at this server.

See protocol/resume.py for the format. The bytes of a response are a function of the
request and the generated tokens. So this server creates a new state for a resumed
request, and feeds the tokens that the client already has to this state. The resulting
bytes are discarded. An incomplete character, stop string or tool call then has the same
state as at the previous server, and the engine continues after these tokens.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.http.api import Api
from protocol import resume
from protocol.errors import BatonError, ResumeRefused
from protocol.http.endpoints import Endpoint
from protocol.kv_params import prompt_digest
from protocol.messages import AddRequest, ResumedChoice, TokenDelta
from protocol.resume import Origin, Resume
from protocol.server_stats import RequestReport

# Maximum size of the frames that a stream sends while it migrates.
_MARGIN_BYTES = 1 << 15
# The parts of the geometry that affect which tokens are generated. The server at which
# a stream began and this server may differ in other parts, such as the number of ranks.
_GEOMETRY_IN_DIGEST = ("kv_digest", "device", "dtype", "kv_dtype")


def _digest(api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]) -> str:
    """Return a digest of a response's inputs, without generated tokens and the seed."""
    geometry = api.client.require_ready().geometry
    settings = api.settings
    prompts = [
        [
            prompt_digest(add.token_ids, add.cache_salt),
            msgspec.to_builtins(replace(add.sampling, seed=0), str_keys=True),
            sorted(add.stop_token_ids),
            add.num_choices,
        ]
        for add in adds
    ]
    return resume.digest(
        [
            api.fingerprint,
            api.tokenizer.digest,
            *map(geometry.get, _GEOMETRY_IN_DIGEST),
            endpoint.name,
            settings.tool_call_parser,
            settings.reasoning_parser,
            prompts,
        ]
    )


def pop_resume(members: dict[str, Any], secret: bytes) -> Resume | None:
    """Remove the member `baton_resume` from a body, and return its contents.

    Returns None if the body does not resume a stream.

    Raises:
        ResumeRejected: the member is malformed or not signed with the secret.
    """
    value = members.pop(resume.MEMBER, None)
    return None if value is None else resume.open_resume(value, secret)


def resume_requests(
    resumed: Resume, api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]
) -> list[AddRequest]:
    """Return `adds` with the tokens that the client already has.

    The requests also get the seed and the token limits with which the stream began.

    Raises:
        ResumeRefused: the stream began with a different request or model, or its tokens
            do not fit this server's context or vocabulary.
    """
    origin = resumed.origin
    if origin.digest != _digest(api, endpoint, adds):
        raise ResumeRefused(
            "the stream began with another prompt, parameter, model, version or dtype"
        )
    tokens, ended_indices = _sent_tokens(
        resumed, api.client.require_ready().vocab_size - 1
    )
    num_choices = adds[0].num_choices
    requests = list[AddRequest]()
    for prompt_index, (add, limit) in enumerate(zip(adds, origin.limits, strict=True)):
        if limit > add.max_tokens:
            raise ResumeRefused(
                f"the stream may generate {limit} tokens after a prompt of "
                f"{len(add.token_ids)} tokens, but this server's context is too short"
            )
        sampling = replace(add.sampling, seed=origin.seed)
        add = replace(add, max_tokens=limit, sampling=sampling)
        first_index = prompt_index * num_choices
        indices = range(first_index, first_index + num_choices)
        choices = [
            ResumedChoice(tokens[index], index in ended_indices) for index in indices
        ]
        has_begun = [bool(choice.token_ids or choice.has_ended) for choice in choices]
        if any(has_begun):
            if add.num_prompt_logprobs is not None and not all(has_begun):
                raise ResumeRefused(
                    "the client has the logprobs of the prompt for only some of the "
                    "stream's choices"
                )
            add = replace(add, resumed_choices=choices, num_prompt_logprobs=None)
        requests.append(add)
    return requests


def _sent_tokens(
    resumed: Resume, largest_id: int
) -> tuple[defaultdict[int, list[int]], set[int]]:
    """Return each choice's token ids by choice index, and the indices of ended choices.

    Raises:
        ResumeRefused: the stream has a token id above `largest_id`.
    """
    tokens = defaultdict[int, list[int]](list)
    ended_indices = set[int]()
    for frame in resumed.frames:
        for entry in frame:
            ids = entry.token_ids
            tokens[entry.index] += ids
            if entry.finish_reason is not None:
                ended_indices.add(entry.index)
            if ids and not 0 <= min(ids) <= max(ids) <= largest_id:
                raise ResumeRefused(
                    f"the stream has token ids above {largest_id}, the largest id of "
                    "this server's model"
                )
    return tokens, ended_indices


def has_open_choice(add: AddRequest) -> bool:
    """Whether this server must still generate tokens for a request.

    False for a resumed request if all its choices ended at the previous server.
    """
    return not add.resumed_choices or not all(
        choice.has_ended for choice in add.resumed_choices
    )


@dataclass
class Framing:
    """The frames of one response, with which another server can continue the response.

    Attributes:
        origin: the id, the seed and the limits with which the response began.
        is_requested: whether the proxy requests frames. If not, no frames are sent.
        resumed: the stream that this response continues, or None.
        is_movable: whether the response may migrate together with its KV. Requires a
            single prompt, and that other servers can read this server's KV.
        is_stream: whether the client receives the response as a stream.
        keeps_logprobs: whether frames contain logprobs that the client already has.
            This is necessary if a later event repeats these logprobs.
    """

    origin: Origin
    is_requested: bool
    resumed: Resume | None = None
    is_movable: bool = False
    is_stream: bool = True
    keeps_logprobs: bool = False
    # The frames so far of a response that is not a stream. They are sent if the
    # response migrates.
    _held_frames: list[bytes] = field(default_factory=list)
    # Bytes of the frames that the proxy must store to continue the response.
    _num_bytes: int = 0
    # The entries of the next frame: the deltas since the last frame.
    _entries: list[list[Any]] = field(default_factory=list)

    @classmethod
    def from_request(
        cls,
        headers: Sequence[tuple[bytes, bytes]],
        api: Api,
        endpoint: Endpoint,
        adds: Sequence[AddRequest],
        resumed: Resume | None,
        *,
        is_stream: bool,
        keeps_logprobs: bool = False,
    ) -> "Framing":
        """Return the framing of the response to a request.

        Args:
            headers: the request's HTTP headers, in which a proxy requests frames.
            adds: the requests to the engine, one for each prompt.
            resumed: the stream that the request continues, or None.
            is_stream: see Framing.
            keeps_logprobs: see Framing.
        """
        fields: Mapping[bytes, bytes] = dict(headers)
        header = fields.get(resume.HEADER.encode())
        request_id = fields.get(b"x-request-id", b"")
        is_requested = False
        if header is not None:
            is_requested = resume.is_frames_request(api.secret, request_id, header)
        has_one_prompt = len(adds) == 1
        # A response that is not a stream would lose the prompt's logprobs if it moved.
        keeps_prompt_logprobs = is_stream or adds[0].num_prompt_logprobs is None
        is_movable = bool(
            is_requested
            and has_one_prompt
            and keeps_prompt_logprobs
            and api.settings.advertised_side_channel_host
        )
        num_bytes = 0
        if resumed is None:
            origin = Origin(
                id=secrets.token_hex(16),
                created=int(time.time()),
                seed=adds[0].sampling.seed,
                limits=[add.max_tokens for add in adds],
                digest=_digest(api, endpoint, adds) if is_requested else "",
            )
        else:
            origin = resumed.origin
            if is_movable:
                num_bytes = len(resume.encode_text(resumed.frames))
        return cls(
            origin=origin,
            is_requested=is_requested,
            resumed=resumed,
            is_movable=is_movable,
            is_stream=is_stream,
            keeps_logprobs=keeps_logprobs,
            _num_bytes=num_bytes,
        )

    @property
    def may_migrate(self) -> bool:
        """Whether the frames are still small enough to be stored for a migration."""
        return self._num_bytes < resume.MAX_HISTORY_BYTES - _MARGIN_BYTES

    def add_delta(self, index: int, delta: TokenDelta) -> None:
        """Add a choice's delta to the next frame.

        Args:
            index: the choice's index in the response.
        """
        if self.is_requested:
            with_logprobs = self.keeps_logprobs or not self.is_stream
            self._entries.append(
                resume.frame_entry(index, delta, with_logprobs=with_logprobs)
            )

    def add_migrated(self, index: int, delta: TokenDelta) -> None:
        """Add the drafted-token counts in a migrating choice's last delta to a frame.

        Args:
            index: the choice's index in the response.
        """
        if delta.accepted_tokens or delta.rejected_tokens:
            self.add_delta(index, replace(delta, finish_reason=None, usage=None))

    def origin_frame(self) -> bytes:
        """Return the first frame of a new stream, which contains the stream's origin.

        Returns b"" for a resumed stream, and if the proxy requests no frames.
        """
        if not self.is_requested or self.resumed is not None:
            return b""
        return resume.frame(resume.encode_text(self.origin), b"")

    def report_frame(self, report: RequestReport | None) -> bytes:
        """Return the frame with the report on a request that has ended.

        Returns b"" if there is no report yet, and if the proxy requests no frames.
        """
        if report is None or not self.is_requested:
            return b""
        return resume.frame(resume.REPORT_PREFIX + report.encode(), b"")

    def wrap(self, events: bytes) -> bytes:
        """Return `events` in a frame, together with the deltas since the last frame.

        Returns only `events` if the proxy requests no frames.
        """
        if not self.is_requested:
            return events
        text = resume.encode_text(self._entries)
        self._entries = []
        self._num_bytes += len(text) + 1
        return resume.frame(text, events)

    def hold_frame(self) -> None:
        """Store the deltas of a response that is not a stream, in case it migrates.

        If the response cannot migrate, the deltas are dropped.
        """
        if self.is_movable and self._num_bytes < resume.MAX_HISTORY_BYTES:
            self._held_frames.append(self.wrap(b""))
        self._entries.clear()

    def migration_end(self, params: dict[str, Any], event: bytes) -> bytes:
        """Return the last bytes of a response that migrates.

        Args:
            params: the kv_transfer_params with which another server pulls the KV.
            event: the error event that ends the stream if no server continues it.
        """
        held_frames = b""
        if not self.is_stream:
            held_frames = b"".join([self.origin_frame(), *self._held_frames])
        elif self._entries:
            held_frames = self.wrap(b"")
        text = resume.MOVED + msgspec.json.encode(params)
        return held_frames + resume.frame(text, event)

    def wrap_error(self, error: BatonError, event: bytes) -> bytes:
        """Return an error event in a frame that shows whether the proxy may fail over.

        Returns only the event if the proxy requests no frames.
        """
        if not self.is_requested:
            return event
        text = resume.failover_text(error) or resume.encode_text([])
        return resume.frame(text, event)
