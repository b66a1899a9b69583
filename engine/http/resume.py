"""Streams that may go on at another server, and those that do: see protocol/resume.py.

Here an answer is a function of the request and its tokens. So the tokens that the client has are
fed to a new state of the same request, whose bytes are thrown away, and the engine goes on behind
them: half a character, half a stop string, half a call are then as they were.
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

_MARGIN_BYTES = 1 << 15  # of texts, that a stream may send until it has moved
_COMPUTED_BY = (
    "kv_digest",
    "device",
    "dtype",
    "kv_dtype",
)  # ranks and blocks may be others


def _digest(api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]) -> str:
    """Of all but the seed that the bytes of a stream follow from, given its tokens."""
    geometry, settings = api.client.require_ready().geometry, api.settings
    model = [api.fingerprint, api.tokenizer.digest, *map(geometry.get, _COMPUTED_BY)]
    how = [endpoint.name, settings.tool_call_parser, settings.reasoning_parser]
    prompts = [
        [
            prompt_digest(add.token_ids, add.cache_salt),
            msgspec.to_builtins(replace(add.sampling, seed=0), str_keys=True),
            sorted(add.stop_token_ids),
            add.num_choices,
        ]
        for add in adds
    ]
    return resume.digest([*model, *how, prompts])


def take_from(members: dict[str, Any], secret: bytes) -> Resume | None:
    """What a request goes on from; its other members are then as without. Raises ResumeRejected."""
    given = members.pop(resume.MEMBER, None)
    return None if given is None else resume.open_resume(given, secret)


def going_on(
    resumed: Resume, api: Api, endpoint: Endpoint, adds: Sequence[AddRequest]
) -> list[AddRequest]:
    """The engine's requests with what the client has. Raises ResumeRefused where it could be the
    answer to another request, or go on with other tokens."""
    origin, tokens = resumed.origin, defaultdict[int, list[int]](list)
    if origin.digest != _digest(api, endpoint, adds):
        raise ResumeRefused(
            "the stream began with another prompt, model, version or dtype"
        )
    largest = api.client.require_ready().vocab_size - 1
    ended = set()
    for told in (told for frame in resumed.frames for told in frame):
        tokens[told.index] += told.token_ids
        if told.finish_reason is not None:
            ended.add(told.index)
        if (
            told.token_ids
            and not 0 <= min(told.token_ids) <= max(told.token_ids) <= largest
        ):
            raise ResumeRefused(
                f"the stream has tokens beyond {largest}, this model's last one"
            )
    n, known = adds[0].num_choices, list[AddRequest]()
    for at, (add, limit) in enumerate(zip(adds, origin.limits, strict=True)):
        if limit > add.max_tokens:
            told_of = f"{limit} more tokens than the prompt's {len(add.token_ids)}"
            raise ResumeRefused(
                f"the stream was promised {told_of}, and the context is shorter"
            )
        add = replace(
            add, max_tokens=limit, sampling=replace(add.sampling, seed=origin.seed)
        )
        choices = [
            ResumedChoice(tokens[at * n + i], at * n + i in ended) for i in range(n)
        ]
        begun = [bool(choice.token_ids or choice.has_ended) for choice in choices]
        if any(begun):
            if add.num_prompt_logprobs is not None and not all(begun):
                raise ResumeRefused(
                    "logprobs of its prompt were told with some choices only"
                )
            add = replace(add, resumed_choices=choices, num_prompt_logprobs=None)
        known.append(add)
    return known


def is_open(add: AddRequest) -> bool:
    """Whether some choice has not ended elsewhere."""
    return not add.resumed_choices or not all(
        choice.has_ended for choice in add.resumed_choices
    )


@dataclass
class Framing:
    """Of one answer.

    Attributes:
        is_asked: a proxy wants frames; else there are none.
        resumed: what the stream goes on from.
        is_movable: so can its KV: it is of one prompt, and others can read it.
        is_stream: what is kept of it the client has.
        keeps_logprobs: frames have those that the client has, too, as a later event repeats them.
    """

    origin: Origin
    is_asked: bool
    resumed: Resume | None = None
    is_movable: bool = False
    is_stream: bool = True
    keeps_logprobs: bool = False
    _held: list[bytes] = field(
        default_factory=list
    )  # frames of an answer that is told whole
    _num_bytes: int = 0  # of the texts that a proxy keeps
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
        given: Mapping[bytes, bytes] = dict(headers)
        asked = given.get(resume.HEADER.encode())
        request_id = given.get(b"x-request-id", b"")
        is_asked = asked is not None and resume.is_frames_request(
            api.secret, request_id, asked
        )
        is_one = len(adds) == 1 and (is_stream or adds[0].num_prompt_logprobs is None)
        is_movable = bool(is_asked and is_one and api.settings.advertised_host)
        origin = (
            resumed.origin
            if resumed
            else Origin(
                id=secrets.token_hex(16),
                created=int(time.time()),
                seed=adds[0].sampling.seed,
                limits=[add.max_tokens for add in adds],
                digest=_digest(api, endpoint, adds) if is_asked else "",
            )
        )
        num = len(resume.encode_text(resumed.frames)) if resumed and is_movable else 0
        return cls(
            origin=origin,
            is_asked=is_asked,
            resumed=resumed,
            is_movable=is_movable,
            is_stream=is_stream,
            keeps_logprobs=keeps_logprobs,
            _num_bytes=num,
        )

    @property
    def may_move(self) -> bool:
        """Whether the proxy has all of it."""
        return self._num_bytes < resume.MAX_HISTORY_BYTES - _MARGIN_BYTES

    def take(self, index: int, delta: TokenDelta) -> None:
        """What a choice got, whose events come next."""
        if self.is_asked:
            is_whole = self.keeps_logprobs or not self.is_stream
            self._entries.append(resume.frame_entry(index, delta, whole=is_whole))

    def begin(self) -> bytes:
        """What goes in front of a stream that begins here."""
        if not self.is_asked or self.resumed is not None:
            return b""
        return resume.frame(resume.encode_text(self.origin), b"")

    def wrap(self, events: bytes) -> bytes:
        if not self.is_asked:
            return events
        entries, self._entries = self._entries, []
        text = resume.encode_text(entries)
        self._num_bytes += len(text) + 1
        return resume.frame(text, events)

    def hold(self) -> None:
        """Keeps what was taken, of an answer that is told whole, for the case that it moves."""
        if self.is_movable and self._num_bytes < resume.MAX_HISTORY_BYTES:
            self._held.append(self.wrap(b""))
        self._entries.clear()  # of one that cannot move nothing is wanted

    def moved(self, params: dict[str, Any], event: bytes) -> bytes:
        """The end of a stream that goes on where its KV is wanted from here, or ends in `event`."""
        before = b"" if self.is_stream else b"".join([self.begin(), *self._held])
        return before + resume.frame(resume.MOVED + msgspec.json.encode(params), event)

    def wrap_error(self, error: BatonError, event: bytes) -> bytes:
        text = resume.refusal_text(error) or resume.encode_text([])
        return resume.frame(text, event) if self.is_asked else event
