"""Values of a config.json, and how a wrong or unsupported one is told."""

import math
from typing import Any, Final

from model.errors import ModelLoadError, UnsupportedModel
from protocol.short_repr import short_repr

_MOST_LAYERS: Final = 10_000


def size(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(f"{name} is {short_repr(value)}, expected a positive integer")
    return value


def each_layer(raw: dict[str, Any]) -> int:
    """How many there are in a model whose layers are looked at one by one."""
    if (found := size(raw, "num_hidden_layers")) > _MOST_LAYERS:
        raise wrong(f"num_hidden_layers is {found}, expected at most {_MOST_LAYERS}")
    return found


def number(raw: dict[str, Any], name: str, default: float) -> float:
    """Returns raw[name], or `default` where that is null or missing.

    Raises:
        ModelLoadError: it is not a number above 0.
    """
    value = raw.get(name)
    value = default if value is None else value
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < math.inf
    ):
        raise wrong(f"{name} is {short_repr(value)}, expected a number above 0")
    return float(value)


def wrong(what: str) -> ModelLoadError:
    return ModelLoadError(f"config.json: {what}")


def unsupported(what: str, supported: str) -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported; supported: {supported}")
