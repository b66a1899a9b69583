"""Trained models whose heads the GPU kernels support."""

from pathlib import Path

from tests.e2e.matrix import model_dir
from tests.make_models import ensure_model, trained_models

# Similar models that are trained on first use if there is no folder of shared models.
# FlashInfer does not support the head sizes of the small models of other tests.
_FALLBACKS = {"gqa4": "gqa64", "mla": "moe"}


def supported_model_dir(name: str) -> Path:
    """Return the directory of the trained model `name` (see `model_dir`), or of a
    similar one that FlashInfer can serve.
    """
    if name in _FALLBACKS and not trained_models():
        return ensure_model(_FALLBACKS[name])
    return model_dir(name)
