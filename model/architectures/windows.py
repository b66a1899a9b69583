"""Which layers see a window of the tokens before them only, as config.json describes it."""

from typing import Any, Final

from model.architectures.table import Architecture
from model.architectures.values import each_layer, size, unsupported, wrong
from protocol.short_repr import short_repr

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def layer_kinds(raw: dict[str, Any], declared: Architecture) -> list[str]:
    """Returns FULL or SLIDING for each layer; [] where the class does not tell layers apart.

    Raises:
        UnsupportedModel: another kind, or SLIDING where the class has no windows.
        ModelLoadError: layer_types is not as long as the model has layers.
    """
    kinds = raw.get("layer_types")
    if others := set(kinds or []) - {FULL, SLIDING}:
        raise unsupported(
            f"layer_types {short_repr(sorted(others))}", f"{FULL}, {SLIDING}"
        )
    if kinds and len(kinds) != (wanted := size(raw, "num_hidden_layers")):
        raise wrong(
            f"num_hidden_layers is {wanted}, but {len(kinds)} layers have a kind"
        )
    if kinds and not declared.windows and SLIDING in kinds:
        raise unsupported(f"layer_types {SLIDING} in this architecture", FULL)
    if declared.windows in ("", "all"):
        return []
    return list(kinds or _default_kinds(raw, declared.windows))


def _default_kinds(raw: dict[str, Any], rule: str) -> list[str]:
    """Of each layer, where there are no layer_types; `rule`: see `Architecture.windows`."""
    layers = range(each_layer(raw))
    if rule == "typed":
        every = size(raw, "sliding_window_pattern")
        sliding = [(layer + 1) % every != 0 for layer in layers]
    elif rule == "unrotated":
        sliding = [
            _has_window(raw) and not is_rotated for is_rotated in rotated_layers(raw)
        ]
    elif rule == "late":
        first = int(raw["max_window_layers"])
        sliding = [_has_window(raw) and layer >= first for layer in layers]
    else:
        stop = int(raw["max_window_layers"]) if raw["use_sliding_window"] else 0
        sliding = [layer < stop and layer % 2 == 0 for layer in layers]
    return [SLIDING if is_sliding else FULL for is_sliding in sliding]


def rotated_layers(raw: dict[str, Any]) -> list[bool]:
    """Returns for each layer whether positions rotate it: SmolLM3 leaves out some. [] if all are.

    Raises:
        ModelLoadError: no_rope_layers is not as long as the model has layers.
    """
    flags = raw.get(
        "no_rope_layers"
    )  # 1 means, despite its name, that the layer has a rope
    interval = raw.get("no_rope_layer_interval")
    if flags is None and interval:
        flags = [(layer + 1) % interval != 0 for layer in range(each_layer(raw))]
    if flags and len(flags) != (wanted := each_layer(raw)):
        raise wrong(f"no_rope_layers has {len(flags)} entries for {wanted} layers")
    return [bool(each) for each in flags or ()]


def _has_window(raw: dict[str, Any]) -> bool:
    return bool(raw.get("use_sliding_window", True) and raw.get("sliding_window"))


def parse_windows(
    raw: dict[str, Any], declared: Architecture
) -> tuple[int | None, ...]:
    """Returns the tokens that a token of each layer sees, itself included; None: all before it.
    () where all layers see all: a window as wide as the context is none.

    Raises:
        ModelLoadError: layers have a window, of no width.
        UnsupportedModel: see `layer_kinds`.
    """
    kinds = layer_kinds(raw, declared)
    if declared.windows == "all":
        # layer_types does not choose the layers, but may still demand that there is a window.
        has_any = _has_window(raw) or SLIDING in (raw.get("layer_types") or ())
        kinds = [SLIDING for _ in range(each_layer(raw)) if has_any]
    if SLIDING not in kinds:
        return ()
    if not _has_window(raw):
        name = (
            "sliding_window"
            if raw.get("use_sliding_window", True)
            else "use_sliding_window"
        )
        raise wrong(
            f"{name} is {short_repr(raw[name])}, but layer_types has {SLIDING}: set sliding_window "
            f"(and use_sliding_window, where the class has it), or write {FULL}"
        )
    window = size(raw, "sliding_window")
    if window >= size(raw, "max_position_embeddings"):
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)
