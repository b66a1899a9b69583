"""`baton models`: the architectures that are served, or whether one model is."""

import sys
from collections.abc import Sequence

from pydantic import Field

from model.architectures.table import list_architectures
from model.config import load_config
from protocol.settings.settings import BatonSettings, parse


class ModelsSettings(BatonSettings):
    """The architectures that are served, each with its test; or whether one model is."""

    model: str | None = Field(
        None, description="directory or hub id of a model to look at"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub")
    hf_overrides: str | None = Field(
        None, description="JSON of values instead of config.json's"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints that; returns the exit status, 1 for a model that is not served."""
    settings = parse(ModelsSettings, argv, prog="baton models")
    asked, options = settings.model, (settings.revision, settings.hf_overrides)
    try:
        if any(options) and not asked:
            raise ValueError(
                "--revision and --hf-overrides are of a model: name it by --model"
            )
        print(load_config(asked, *options).summary if asked else list_architectures())
    except ValueError as error:
        print(f"baton models: error: {error}", file=sys.stderr)
        return 1
    return 0
