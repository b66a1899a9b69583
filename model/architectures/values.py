"""Reads and checks single values of a config.json, and creates errors about values."""

import math
from typing import Any, Final

from model.errors import ModelLoadError, UnsupportedModel
from protocol.short_repr import short_repr

# This limit bounds the work of loops over layers, because config.json may contain any
# number.
_MAX_LAYERS: Final = 10_000


def read_size(raw: dict[str, Any], name: str) -> int:
    """Returns raw[name], which must be a positive integer.

    Raises:
        ModelLoadError: the value is not a positive integer.
    """
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config_error(
            f"{name} is {short_repr(value)}, expected a positive integer"
        )
    return value


def read_num_layers(raw: dict[str, Any]) -> int:
    """Returns num_hidden_layers, for code that loops over the layers.

    Raises:
        ModelLoadError: the value is not a positive integer or is above _MAX_LAYERS.
    """
    num_layers = read_size(raw, "num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise config_error(
            f"num_hidden_layers is {num_layers}, expected at most {_MAX_LAYERS}"
        )
    return num_layers


def read_number(raw: dict[str, Any], name: str, default: float) -> float:
    """Returns raw[name], or `default` if the value is null or missing.

    Raises:
        ModelLoadError: the value is not a finite number above 0.
    """
    value = raw.get(name)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise config_error(f"{name} is {short_repr(value)}, expected a number above 0")
    return float(value)


def config_error(problem: str) -> ModelLoadError:
    """Returns the error for a value of config.json that is invalid in any model."""
    return ModelLoadError(f"config.json: {problem}")


def unsupported_error(feature: str, supported: str) -> UnsupportedModel:
    """Returns the error for a valid value that this server does not implement."""
    return UnsupportedModel(f"{feature} is not supported; supported: {supported}")
