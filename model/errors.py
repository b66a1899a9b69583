"""Errors that say why a model cannot be served."""


class ModelNotAvailable(ValueError):
    """The model is not a local directory and cannot be fetched from the hub."""


class ModelError(ValueError):
    """A model cannot be served. The message names the field, its value and the fix."""


class UnsupportedModel(ModelError):
    """The model is well-formed but uses a feature that this server does not
    implement."""


class ModelLoadError(ModelError):
    """The model's files contradict each other or the model's config."""


class InvalidParallelism(ModelError):
    """The tensor-parallel size does not fit the model."""
