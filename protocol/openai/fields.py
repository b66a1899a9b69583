"""Request fields that are accepted only with the value that changes nothing.

Clients and routers send many fields they do not use. A field of this table is accepted with one
of the listed values and refused, by name, with any other; `null` means "not given" for every
field. Implementing a field means taking its line out and adding it to a request class.
"""

from collections.abc import Callable, Set
from typing import Any

from protocol.errors import InvalidRequest
from protocol.near_names import suggestion
from protocol.short_repr import short_repr

# A float in the table accepts 0 and 0.0 alike; an int accepts that int only; True is never 1.
_BOTH: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "top_a": (0.0,),
    "priority": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "return_hidden_states": (False,),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "bad_words": ([],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    # Reasoning switches, for models that have none.
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}

NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "suffix": ("",),
    "continue_final_message": (False,),
}

NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "best_of": (1,),
    "echo": (False,),
    "documents": ([],),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
}

NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "refusal": ("",),
    "reasoning_content": ("",),
    "reasoning": ("",),
}

NEUTRAL_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
}


def changes_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `neutral`, type-strict: 1 is not True, 0 equals 0.0 only there."""
    return any(_same(value, candidate) for candidate in neutral)


def _same(value: Any, candidate: Any) -> bool:
    if type(candidate) is float:
        return type(value) in (int, float) and value == candidate
    return type(value) is type(candidate) and bool(value == candidate)


def drop_neutral(
    body: dict[str, Any],
    known: Set[str],
    neutral: dict[str, tuple[Any, ...]],
    where: str = "",
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> dict[str, Any]:
    """`body` without nulls and without the fields of `neutral`.

    Args:
        known: the fields that the caller understands; they are kept as they are unless null.
        where: a prefix that tells the client where the field stands, e.g. "messages[0].".
        elsewhere: says of a name that is not known here what it is at another endpoint, as the end
            of a sentence that begins with it.

    Raises:
        InvalidRequest: a field is neither known nor neutral, or carries a value that matters.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            kept[name] = value
        elif name not in neutral:
            near = f"is not supported{suggestion(name[:80], known)}; leave it out"
            raise InvalidRequest(
                f"`{where}{short_repr(name)[1:-1]}` {elsewhere(name) or near}.",
                param=where + name[:80],
            )
        elif not changes_nothing(value, neutral[name]):
            allowed = " or ".join(short_repr(candidate) for candidate in neutral[name])
            raise InvalidRequest(
                f"`{where}{name}` is {short_repr(value)}, which is not implemented; "
                f"send {allowed} or leave it out.",
                param=where + name,
            )
    return kept
