"""Why a model cannot be served."""


class ModelNotAvailable(ValueError):
    """The model is neither a local directory nor to be had from the hub."""


class ModelError(ValueError):
    """A model that cannot be served; the message names the field, its value and the fix."""


class UnsupportedModel(ModelError):
    """The model is well-formed, but uses something that this server does not implement."""


class ModelLoadError(ModelError):
    """The model's files contradict each other or its config."""


class InvalidParallelism(ModelError):
    """A tensor-parallel size that does not fit the model."""
