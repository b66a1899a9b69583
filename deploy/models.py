"""`baton models`: lists the supported architectures, or summarizes a model."""

import sys
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from model.architectures.table import list_architectures
from model.config import load_config
from protocol.settings.settings import BatonSettings, parse


class ModelsSettings(BatonSettings):
    """Prints the supported architectures, or whether one model is supported."""

    positional: ClassVar[str] = "model"
    model: str | None = Field(
        None, description="directory, GGUF file or hub id (None: list architectures)"
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of a hub id (None: the default branch)"
    )
    hf_overrides: str | None = Field(
        None, description="JSON object of values that replace those in config.json"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the architectures, or a summary of the model.

    Returns the exit status: 1 if the options or the model cannot be used.
    """
    settings = parse(ModelsSettings, argv, prog="baton models")
    try:
        if not settings.model:
            if settings.revision or settings.hf_overrides:
                raise ValueError("--revision and --hf-overrides need --model")
            print(list_architectures())
        else:
            config = load_config(
                settings.model, settings.revision, settings.hf_overrides
            )
            print(config.summary)
    except (OSError, ValueError) as error:
        print(f"baton models: error: {error}", file=sys.stderr)
        return 1
    return 0
