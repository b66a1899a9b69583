"""Errors that say why a model cannot be served."""


class ModelNotAvailable(ValueError):
    """The model is not a local directory and cannot be fetched from the hub."""


class ModelError(ValueError):
    """A model cannot be served. The message names the field, its value and the fix."""


class UnsupportedModel(ModelError):
    """The model is valid, but needs a feature that Baton does not implement."""


class ModelLoadError(ModelError):
    """The model's files contradict each other or the model's config."""


class InvalidParallelism(ModelError):
    """The model cannot be divided by the given --tp, --dcp and --ep."""
