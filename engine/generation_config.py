"""Reads generation_config.json, which has a model's defaults for request fields."""

import json
import logging
import math
from pathlib import Path
from typing import Any, Final

from model.errors import ModelLoadError
from protocol.errors import InvalidRequest
from protocol.openai.requests import validate
from protocol.openai.sampling import MAX_INT31, GenerationConfig

logger = logging.getLogger("baton.serve")

# For each field: the largest value that a request may have, and the largest value that
# generation_config.json may have. Larger values in the file are replaced by this second
# limit, which has the same effect in practice.
_REQUEST_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (2, 1e6),
    "repetition_penalty": (100, 1e6),
    "top_p": (1, 1),
    "top_k": (MAX_INT31, MAX_INT31),
    "max_new_tokens": (MAX_INT31, MAX_INT31),
}
_GREEDY_TOP_P = 1e-6  # a top_p that allows only the likeliest token


def read_generation_config(folder: Path) -> GenerationConfig:
    """Reads the fields of generation_config.json that requests also have. Without the
    file, no field is set.

    transformers accepts some values that this server refuses in requests. Such a value
    is used (or replaced by an equivalent value) and logged.

    Raises:
        ModelLoadError: a value is invalid both in requests and for transformers, or the
            file is not a JSON object.
    """
    path = folder / "generation_config.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        values: dict[str, Any] = {}
        for name in GenerationConfig.model_fields:
            if content.get(name) is not None:
                values[name] = content[name]
        clamped = _clamp_beyond_limits(values)
        for name, value in clamped.items():
            logger.warning(
                "%s: `%s` is %s, which no request may have; using %s",
                path,
                name,
                values[name],
                value,
            )
        config = validate(GenerationConfig, {**values, **dict.fromkeys(clamped)})
        return config.model_copy(update=clamped)
    except FileNotFoundError:
        return GenerationConfig()
    except (InvalidRequest, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: {error} Correct it, or use --generation-config none."
        ) from error


def _clamp_beyond_limits(values: dict[str, Any]) -> dict[str, float]:
    """Returns replacements, by field, for the values that transformers accepts and that
    this server refuses in requests."""
    clamped: dict[str, float] = {}
    for name, value in values.items():
        if name not in _REQUEST_LIMITS or type(value) not in (int, float):
            continue
        request_limit, max_value = _REQUEST_LIMITS[name]
        if request_limit < value < math.inf:
            clamped[name] = min(value, max_value)
        elif name == "top_p" and value == 0:
            clamped[name] = _GREEDY_TOP_P
    return clamped
