"""Small random transformers models, saved as checkpoints for comparisons."""

from pathlib import Path
from typing import Any

import torch
import transformers

from model.config import load_config
from model.decoder import load_model

# eos_token_id and bos_token_id are None, because the default ids of some classes are
# outside of this vocabulary.
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
IMAGES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
MLA_SIZES: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 8, "num_hidden_layers": 3, "kv_lora_rank": 32,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
}  # fmt: skip


def continued(reference, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the tokens that a transformers model generates greedily."""
    ids = torch.tensor([prompt])
    output = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def make(
    architecture: str,
    folder: Path,
    *,
    seed: int = 0,
    shard: str = "5GB",
    **options: Any,
):
    """Saves a random model of `architecture` in `folder`.

    Returns:
        The transformers model.
    """
    sizes = MLA_SIZES if architecture.startswith("Deepseek") else SIZES
    name, has_images, _ = architecture.partition("ForConditional")
    name = name.replace("ForCausalLM", "")
    kind = "TextConfig" if architecture == "Gemma3ForCausalLM" else "Config"
    options = {**sizes, **options}
    if has_images:
        options = {
            "text_config": options,
            "vision_config": IMAGES,
            "tie_word_embeddings": False,
        }
    config = getattr(transformers, name + kind)(**options)
    model_class = getattr(transformers, architecture)
    return _save_random(model_class, config, folder, seed=seed, shard=shard)


def make_of(raw: dict[str, Any], folder: Path):
    """Saves a random model with the config.json `raw`, and returns it."""
    model_class = getattr(transformers, raw["architectures"][0])
    model_type = model_class.config_class.model_type
    values = {"pad_token_id": 0, **raw, "model_type": model_type}
    config = model_class.config_class.from_dict(values)
    # The faster implementations of attention ignore soft caps.
    config._attn_implementation = "eager"
    # The faster implementations of experts need rows with a multiple of 16 bytes.
    config._experts_implementation = "eager"
    return _save_random(model_class, config, folder)


def _save_random(
    model_class: Any, config: Any, folder: Path, *, seed: int = 0, shard: str = "5GB"
):
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # Gemma adds 1 to the weights of norms
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def load(folder: Path, **options: Any):
    """Loads Baton's model of a checkpoint, in float32."""
    return load_model(load_config(folder), folder, dtype=torch.float32, **options)
