"""The sampling values that a model's generation_config.json gives requests that say nothing."""

import json
from pathlib import Path
from typing import Final

from model.errors import ModelLoadError
from protocol.errors import InvalidRequest
from protocol.openai.requests import validate
from protocol.openai.sampling import GenerationConfig

_NAME: Final = "generation_config.json"


def read_generation_config(folder: Path) -> GenerationConfig:
    """What of the file requests can say, too; nothing where there is no such file.

    Raises:
        ModelLoadError: a value that no request may have; names it, and how to do without.
    """
    path = folder / _NAME
    try:
        found = json.loads(path.read_text("utf-8"))
        known = {name: found.get(name) for name in GenerationConfig.model_fields}
        given = {name: value for name, value in known.items() if value is not None}
        return validate(GenerationConfig, given)
    except FileNotFoundError:
        return GenerationConfig()
    except (InvalidRequest, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: {error} Correct it, or use --generation-config none."
        ) from error
