"""Streams that may migrate to another server, and streams that resume here.

See protocol/resume.py for the format. An answer is a function of the request and its
tokens. So the tokens that the client has are fed to a new state of the same request,
whose bytes are discarded, and the engine continues after them. Half a character, half a
stop string and half a call are then as they were.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.http.api import Api, Endpoint
from protocol import resume
from protocol.errors import BatonError, ResumeRefused
from protocol.kv_params import prompt_digest
from protocol.messages import AddRequest, ResumedChoice, TokenDelta
from protocol.resume import Origin, Resume

_MARGIN_BYTES = 1 << 15  # of frames that a stream may send until it has migrated
# The parts of the geometry on which tokens depend. Ranks and blocks may differ.
_NUMERIC_GEOMETRY = ("kv_digest", "device", "dtype", "kv_dtype")


def _digest(api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]) -> str:
    """Return the digest of all that a stream's bytes depend on, given its tokens.

    The seed is not part of it.
    """
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
            *map(geometry.get, _NUMERIC_GEOMETRY),
            endpoint.name,
            settings.tool_call_parser,
            settings.reasoning_parser,
            prompts,
        ]
    )


def pop_resume(members: dict[str, Any], secret: bytes) -> Resume | None:
    """Remove the member that resumes a stream from a body, and return its contents.

    Raises:
        ResumeRejected: the member is malformed or not signed with the secret.
    """
    value = members.pop(resume.MEMBER, None)
    return None if value is None else resume.open_resume(value, secret)


def resume_requests(
    resumed: Resume, api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]
) -> list[AddRequest]:
    """Return the engine's requests with the tokens that the client has.

    Raises:
        ResumeRefused: the stream may answer another request, or could continue with
            other tokens here.
    """
    origin = resumed.origin
    if origin.digest != _digest(api, endpoint, adds):
        raise ResumeRefused(
            "the stream began with another prompt, model, version or dtype"
        )
    tokens, ended = _sent_tokens(resumed, api.client.require_ready().vocab_size - 1)
    num_choices = adds[0].num_choices
    requests = list[AddRequest]()
    for at, (add, limit) in enumerate(zip(adds, origin.limits, strict=True)):
        if limit > add.max_tokens:
            raise ResumeRefused(
                f"the stream was promised {limit} more tokens than the prompt's "
                f"{len(add.token_ids)}, and the context is shorter"
            )
        sampling = replace(add.sampling, seed=origin.seed)
        add = replace(add, max_tokens=limit, sampling=sampling)
        indices = range(at * num_choices, (at + 1) * num_choices)
        choices = [ResumedChoice(tokens[index], index in ended) for index in indices]
        has_begun = [bool(choice.token_ids or choice.has_ended) for choice in choices]
        if any(has_begun):
            if add.num_prompt_logprobs is not None and not all(has_begun):
                raise ResumeRefused(
                    "logprobs of its prompt were sent with some choices only"
                )
            add = replace(add, resumed_choices=choices, num_prompt_logprobs=None)
        requests.append(add)
    return requests


def _sent_tokens(
    resumed: Resume, largest_id: int
) -> tuple[defaultdict[int, list[int]], set[int]]:
    """Return the tokens of each choice by its index, and the indices of ended choices.

    Raises:
        ResumeRefused: the stream has ids beyond `largest_id`.
    """
    tokens = defaultdict[int, list[int]](list)
    ended = set[int]()
    for frame in resumed.frames:
        for entry in frame:
            ids = entry.token_ids
            tokens[entry.index] += ids
            if entry.finish_reason is not None:
                ended.add(entry.index)
            if ids and not 0 <= min(ids) <= max(ids) <= largest_id:
                raise ResumeRefused(
                    f"the stream has tokens beyond {largest_id}, this model's last one"
                )
    return tokens, ended


def has_open_choice(add: AddRequest) -> bool:
    """Whether some choice has not ended at another server."""
    return not add.resumed_choices or not all(
        choice.has_ended for choice in add.resumed_choices
    )


@dataclass
class Framing:
    """The frames of one answer, by which it may continue at another server.

    Attributes:
        origin: how the answer began.
        is_requested: whether a proxy requests frames; else there are none.
        resumed: the stream that the answer continues.
        is_movable: whether the KV can migrate, too: the answer is to one prompt, and
            other servers can read this server's KV.
        is_stream: whether the client receives the answer piece by piece.
        keeps_logprobs: whether frames contain logprobs that the client has, because a
            later event repeats them.
    """

    origin: Origin
    is_requested: bool
    resumed: Resume | None = None
    is_movable: bool = False
    is_stream: bool = True
    keeps_logprobs: bool = False
    # Frames of an answer that is no stream.
    _held: list[bytes] = field(default_factory=list)
    _num_bytes: int = 0  # of the frames that a proxy keeps
    _entries: list[list[Any]] = field(default_factory=list)  # since the last frame

    @classmethod
    def of(
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
        """Return the framing of a request.

        Args:
            headers: the request's HTTP headers.
            resumed: the stream that the request continues, or None.
        """
        fields: Mapping[bytes, bytes] = dict(headers)
        header = fields.get(resume.HEADER.encode())
        request_id = fields.get(b"x-request-id", b"")
        is_requested = False
        if header is not None:
            is_requested = resume.is_frames_request(api.secret, request_id, header)
        has_one_prompt = len(adds) == 1
        keeps_its_logprobs = is_stream or adds[0].num_prompt_logprobs is None
        is_movable = bool(
            is_requested
            and has_one_prompt
            and keeps_its_logprobs
            and api.settings.advertised_host
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
    def may_move(self) -> bool:
        """Whether the proxy keeps all frames, so that the stream may migrate."""
        return self._num_bytes < resume.MAX_HISTORY_BYTES - _MARGIN_BYTES

    def take(self, index: int, delta: TokenDelta) -> None:
        """Add the delta of a choice, whose events come next."""
        if self.is_requested:
            is_complete = self.keeps_logprobs or not self.is_stream
            self._entries.append(resume.frame_entry(index, delta, whole=is_complete))

    def begin(self) -> bytes:
        """Return the first frame of a stream that begins here."""
        if not self.is_requested or self.resumed is not None:
            return b""
        return resume.frame(resume.encode_text(self.origin), b"")

    def wrap(self, events: bytes) -> bytes:
        """Return events in a frame with the deltas since the last frame."""
        if not self.is_requested:
            return events
        text = resume.encode_text(self._entries)
        self._entries = []
        self._num_bytes += len(text) + 1
        return resume.frame(text, events)

    def hold(self) -> None:
        """Keep the deltas of an answer that is no stream, in case it migrates."""
        if self.is_movable and self._num_bytes < resume.MAX_HISTORY_BYTES:
            self._held.append(self.wrap(b""))
        self._entries.clear()  # an answer that cannot migrate needs none

    def moved(self, params: dict[str, Any], event: bytes) -> bytes:
        """Return the end of a stream that migrates.

        Args:
            params: the kv_transfer_params with which another server pulls the KV.
            event: the event that ends the stream where no server continues it.
        """
        before = b"" if self.is_stream else b"".join([self.begin(), *self._held])
        return before + resume.frame(resume.MOVED + msgspec.json.encode(params), event)

    def wrap_error(self, error: BatonError, event: bytes) -> bytes:
        """Return the error event in a frame, if frames are requested."""
        if not self.is_requested:
            return event
        text = resume.refusal_text(error) or resume.encode_text([])
        return resume.frame(text, event)
