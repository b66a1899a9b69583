"""Which layers see a window of the tokens before them only, as config.json describes it."""

from typing import Any, Final

from model.architectures.values import each_layer, size, unsupported, wrong
from protocol.short_repr import short_repr

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def layer_kinds(raw: dict[str, Any]) -> list[str]:
    """Of each layer; [] where config.json does not tell layers apart."""
    kinds, every = raw.get("layer_types"), raw.get("sliding_window_pattern")
    if kinds is None and every:  # a layer that sees all tokens after each few that do not
        return [FULL if (n + 1) % every == 0 else SLIDING for n in range(each_layer(raw))]
    if others := set(kinds or []) - {FULL, SLIDING}:
        raise unsupported(f"layer_types {short_repr(sorted(others))}", f"{FULL}, {SLIDING}")
    if kinds and len(kinds) != (wanted := size(raw, "num_hidden_layers")):
        raise wrong(f"num_hidden_layers is {wanted}, but {len(kinds)} layers have a kind")
    return kinds or []


def parse_windows(raw: dict[str, Any], reads: str) -> tuple[int | None, ...]:
    """Tokens that a token of each layer sees, itself included; None: all before it. () where all
    layers see all: a window as wide as the context is none.

    Args:
        reads: how the architecture does: see `Architecture.windows`.
    """
    kinds = layer_kinds(raw)
    if not reads and SLIDING in kinds:
        raise unsupported(f"layer_types {SLIDING} in this architecture", FULL)
    if not reads or not raw.get("use_sliding_window", True) or not raw.get("sliding_window"):
        return ()
    window = size(raw, "sliding_window")
    if window >= size(raw, "max_position_embeddings"):
        return ()
    layers = range(each_layer(raw))
    if reads == "all":
        kinds = [SLIDING for _ in layers]
    elif reads == "late" and not kinds:
        first = int(raw.get("max_window_layers") or 0)
        kinds = [SLIDING if layer >= first else FULL for layer in layers]
    elif not kinds:
        raise wrong(f"sliding_window is {window}, but no layer_types say in which layers; add them")
    return tuple(window if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()
