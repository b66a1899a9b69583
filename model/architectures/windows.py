"""Reads from config.json which layers have sliding-window attention."""

from typing import Any, Final

from model.architectures.table import Architecture
from model.architectures.values import (
    config_error,
    read_num_layers,
    read_size,
    unsupported_error,
)
from protocol.short_repr import short_repr

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def layer_kinds(raw: dict[str, Any], architecture: Architecture) -> list[str]:
    """Returns FULL or SLIDING for each layer.

    The list is empty if the model class treats all layers alike.

    Raises:
        UnsupportedModel: layer_types has a kind other than FULL and SLIDING, or has
            SLIDING in a class without sliding windows.
        ModelLoadError: the length of layer_types is not the number of layers.
    """
    kinds = raw.get("layer_types") or []
    unknown_kinds = set(kinds) - {FULL, SLIDING}
    if unknown_kinds:
        raise unsupported_error(
            f"layer_types {short_repr(sorted(unknown_kinds))}", f"{FULL}, {SLIDING}"
        )
    if kinds:
        num_layers = read_size(raw, "num_hidden_layers")
        if len(kinds) != num_layers:
            raise config_error(
                f"layer_types has {len(kinds)} entries, but num_hidden_layers is "
                f"{num_layers}"
            )
    if SLIDING in kinds and not architecture.window_rule:
        raise unsupported_error(f"layer_types {SLIDING} in this architecture", FULL)
    if architecture.window_rule in ("", "all"):
        return []
    return list(kinds or _default_kinds(raw, architecture.window_rule))


def _default_kinds(raw: dict[str, Any], rule: str) -> list[str]:
    """Returns the kind of each layer for a config that has no layer_types.

    Args:
        rule: a value of `Architecture.window_rule` other than "" and "all".
    """
    layers = range(read_num_layers(raw))
    if rule == "typed":
        period = read_size(raw, "sliding_window_pattern")
        is_sliding = [(layer + 1) % period != 0 for layer in layers]
    elif rule == "unrotated":
        has_window = _has_window(raw)
        is_sliding = [has_window and not rotated for rotated in rotated_layers(raw)]
    elif rule == "late":
        has_window = _has_window(raw)
        first_layer = int(raw["max_window_layers"])
        is_sliding = [has_window and layer >= first_layer for layer in layers]
    else:
        end = int(raw["max_window_layers"]) if raw["use_sliding_window"] else 0
        is_sliding = [layer < end and layer % 2 == 0 for layer in layers]
    return [SLIDING if sliding else FULL for sliding in is_sliding]


def rotated_layers(raw: dict[str, Any]) -> list[bool]:
    """Returns for each layer whether it applies rotary embeddings.

    Some layers of SmolLM3 do not apply them. The list is empty if all layers of a model
    apply them.

    Raises:
        ModelLoadError: the length of no_rope_layers is not the number of layers.
    """
    # Despite the name of the field, 1 means that the layer applies rotary embeddings.
    flags = raw.get("no_rope_layers")
    interval = raw.get("no_rope_layer_interval")
    if flags is None and interval:
        flags = [(layer + 1) % interval != 0 for layer in range(read_num_layers(raw))]
    if flags:
        num_layers = read_num_layers(raw)
        if len(flags) != num_layers:
            raise config_error(
                f"no_rope_layers has {len(flags)} entries for {num_layers} layers"
            )
    return [bool(flag) for flag in flags or ()]


def _has_window(raw: dict[str, Any]) -> bool:
    return bool(raw.get("use_sliding_window", True) and raw.get("sliding_window"))


def parse_windows(
    raw: dict[str, Any], architecture: Architecture
) -> tuple[int | None, ...]:
    """Returns for each layer how many tokens a token attends to, including itself.

    None means the token itself and all earlier tokens. The tuple is empty if no layer
    has a window. A window that is at least as wide as the context counts as no window.

    Raises:
        ModelLoadError: layers need a window, but the config gives no width.
        UnsupportedModel: see `layer_kinds`.
    """
    kinds = layer_kinds(raw, architecture)
    if architecture.window_rule == "all":
        # In these classes, either all layers have a window or no layer has one.
        # layer_types does not select layers, but a SLIDING entry requires a window.
        num_layers = read_num_layers(raw)
        needs_window = _has_window(raw) or SLIDING in (raw.get("layer_types") or ())
        kinds = [SLIDING] * num_layers if needs_window else []
    if SLIDING not in kinds:
        return ()
    if not _has_window(raw):
        is_enabled = raw.get("use_sliding_window", True)
        name = "sliding_window" if is_enabled else "use_sliding_window"
        raise config_error(
            f"{name} is {short_repr(raw[name])}, but layer_types has {SLIDING}: set "
            "sliding_window (and use_sliding_window, where the class has it), or write "
            f"{FULL}"
        )
    window = read_size(raw, "sliding_window")
    if window >= read_size(raw, "max_position_embeddings"):
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)
