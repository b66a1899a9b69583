"""Fields by which a client asks to keep the KV of its prompt for the next requests.

`prompt_cache_retention` and `cache_control` set soft pins (kvcache/pins/): the KV is
evicted later than other KV, and no request is refused because of it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from protocol.openai.requests import ReadFrom, Strict

# Seconds for each value of `ttl` and of `prompt_cache_retention`. OpenAI keeps prompts
# `in_memory` for 5 to 10 minutes after their last use. Older clients write in-memory.
RETENTION_S: Final = {
    "5m": 300,
    "1h": 3600,
    "in_memory": 300,
    "in-memory": 300,
    "24h": 86400,
}

PromptCacheKey = Annotated[
    str | None,
    Field(
        description="a string; requests with the same key prefer the same servers",
    ),
]
PromptCacheRetention = Annotated[
    Literal["in_memory", "in-memory", "24h"] | None,
    Field(description="in_memory or 24h"),
]


class CacheControl(Strict):
    """Marks the end of a part of the prompt that is to be kept, as in Anthropic's API.

    The part begins at the beginning of the prompt.
    """

    must_be: ClassVar[str] = 'an object {"type": "ephemeral", "ttl": "5m" or "1h"}'

    type: Literal["ephemeral"] = Field(description="ephemeral")
    ttl: Literal["5m", "1h"] = Field("5m", description="5m or 1h")

    @property
    def seconds(self) -> int:
        return RETENTION_S[self.ttl]


class KVHintAction(Strict):
    """One action of `kv_hints`. The program that executes it defines its payload."""

    model_config = ConfigDict(extra="ignore")
    must_be: ClassVar[str] = (
        "an object with `action_id`, `action_type`, `action_version` and `payload`"
    )

    action_id: str = Field(description="a string")
    action_type: str = Field(description="a string")
    action_version: str = Field(description="a string")
    payload: dict[str, Any] = Field(description="an object")


MAX_KV_ACTIONS = 1024


class KVHintsEnvelope(Strict):
    """The hints that routers such as Dynamo add to requests, in vLLM's format.

    vLLM and TensorRT-LLM document the envelope, but no actions. Therefore Baton does
    not execute any action.
    """

    model_config = ConfigDict(extra="ignore")

    protocol_version: str = Field(description="a string")
    message_id: str = Field(description="a string")
    actions: Annotated[
        list[KVHintAction],
        Field(fail_fast=True, max_length=MAX_KV_ACTIONS),
    ] = Field(description=f"a list of at most {MAX_KV_ACTIONS} actions")


KVHints = Annotated[
    None,
    ReadFrom(KVHintsEnvelope, lambda _: None),
    Field(
        description="an object with `protocol_version`, `message_id` and `actions`; it "
        "changes nothing here"
    ),
]
Marked = Annotated[
    CacheControl | None, Field(exclude=True, description=CacheControl.must_be)
]


@dataclass(frozen=True)
class CacheMark:
    """The first messages of a conversation, whose KV the client asks to keep.

    Attributes:
        seconds: Time for which the KV is to be kept.
        num_messages: Number of these messages.
        num_parts: Number of content parts of the last of these messages that are
            included; None: all.
    """

    seconds: int
    num_messages: int
    num_parts: int | None = None
