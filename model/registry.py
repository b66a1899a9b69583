"""From a config and a directory to a model that runs."""

from pathlib import Path
from typing import Final

import torch

from model.base import CausalLM
from model.config import ModelConfig
from model.deepseek import DeepseekV2ForCausalLM
from model.errors import ModelError
from model.llama import LlamaForCausalLM
from model.parallel import Parallel
from model.sizes import check_parallelism
from model.weights import DummySource, SafetensorsSource, WeightLoader

LOAD_FORMATS: Final = ("auto", "dummy")

_MODELS: Final[dict[str, type[CausalLM]]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
}


def load_model(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parallel: Parallel | None = None,
    load_format: str = "auto",
    seed: int = 0,
    pack: bool = False,
) -> CausalLM:
    """Loads this rank's part of a model.

    Args:
        model_dir: as `hub.resolve_model` returns it; not read when load_format is "dummy".
        dtype: to compute in; on the CPU weights of this dtype stay mapped from their file.
        load_format: "auto" reads safetensors, "dummy" makes weights from their names and `seed`.
        pack: on the CPU in float32, keep linear weights in a faster order instead of mapped.

    Raises:
        ModelError: the files do not fit the config, or tp does not fit the model.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format {load_format!r} is unknown; use {' or '.join(LOAD_FORMATS)}")
    parallel = parallel or Parallel()
    check_parallelism(config, parallel.size)
    is_dummy = load_format == "dummy"
    source = DummySource(seed, device) if is_dummy else SafetensorsSource(Path(model_dir))
    loader = WeightLoader(source, dtype=dtype, device=device, pack=pack)
    with torch.inference_mode():
        model = _MODELS[config.architecture](config, loader, parallel)
    loader.finish()
    return model
