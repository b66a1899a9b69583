"""Small random checkpoints of drafters."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.random_models import make

NUM_LAYERS = 3
# The three kinds of model that ship MTP layers: MLA with experts, grouped-query
# attention with experts, and dense with Qwen's names.
MTP_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": 24, "norm_topk_prob": True},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {
            "num_hidden_layers": NUM_LAYERS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"num_hidden_layers": NUM_LAYERS, "head_dim": 16, "num_key_value_heads": 2},
    ),
}


def mtp_names(kind: str) -> dict[str, str]:
    """Returns the names of an MTP layer's weights by their role."""
    tables = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    if kind == "qwen3":
        return {
            **tables,
            "token_norm": "mtp.pre_fc_norm_embedding.weight",
            "state_norm": "mtp.pre_fc_norm_hidden.weight",
            "projection": "mtp.fc.weight",
            "layer": "mtp.layers.0",
            "norm": "mtp.norm.weight",
        }
    prefix = f"model.layers.{NUM_LAYERS}"
    return {
        **tables,
        "token_norm": f"{prefix}.enorm.weight",
        "state_norm": f"{prefix}.hnorm.weight",
        "projection": f"{prefix}.eh_proj.weight",
        "layer": prefix,
        "norm": f"{prefix}.shared_head.norm.weight",
    }


def make_mtp(kind: str, folder: Path) -> Any:
    """Saves a random model with an MTP layer.

    Returns:
        The transformers model, which has no MTP layer.
    """
    architecture, options = MTP_MODELS[kind]
    reference = make(architecture, folder, **options)
    names = mtp_names(kind)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    last_layer = f"model.layers.{NUM_LAYERS - 1}."
    for name, tensor in list(tensors.items()):
        if name.startswith(last_layer):
            mtp_name = f"{names['layer']}.{name.removeprefix(last_layer)}"
            tensors[mtp_name] = _random(mtp_name, tensor.shape, generator)
    size = tensors["model.norm.weight"].shape[0]
    for role in ("token_norm", "state_norm", "norm"):
        tensors[names[role]] = _random(names[role], (size,), generator)
    projection = names["projection"]
    tensors[projection] = _random(projection, (size, 2 * size), generator)
    if kind != "qwen3":
        # In these files, the MTP layer has copies of the model's embedding and head.
        prefix = names["layer"]
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        copies = (f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight")
        for copy, table in zip(copies, tables, strict=True):
            tensors[copy] = tensors[table].clone()
        edit_config(folder, num_nextn_predict_layers=1)
    save(tensors, folder)
    return reference


EAGLE3_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 131,
    "draft_vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make_eagle3(
    folder: Path, *, has_embedding: bool = False, **changes: Any
) -> dict[str, Tensor]:
    """Saves a random EAGLE-3 drafter.

    Args:
        changes: changes of EAGLE3_CONFIG.

    Returns:
        The tensors of the drafter.
    """
    raw = {**EAGLE3_CONFIG, **changes}
    size = raw["hidden_size"]
    width = raw["intermediate_size"]
    heads_size = raw["num_attention_heads"] * raw["head_dim"]
    kv_size = raw["num_key_value_heads"] * raw["head_dim"]
    captured_size = 3 * raw.get("target_hidden_size", size)
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (heads_size, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_size, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads_size),
        "midlayer.mlp.gate_proj.weight": (width, size),
        "midlayer.mlp.up_proj.weight": (width, size),
        "midlayer.mlp.down_proj.weight": (size, width),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "fc.weight": (size, captured_size),
        "norm.weight": (size,),
        "lm_head.weight": (raw["draft_vocab_size"], size),
    }
    if has_embedding:
        shapes["embed_tokens.weight"] = (raw["vocab_size"], size)
    if raw.get("norm_before_fc"):
        shapes["input_norm.weight"] = (captured_size,)
    generator = torch.Generator().manual_seed(11)
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    ids = torch.randperm(raw["vocab_size"], generator=generator)
    target_ids = ids[: raw["draft_vocab_size"]].sort().values
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    is_drafted = torch.zeros(raw["vocab_size"], dtype=torch.bool)
    is_drafted[target_ids] = True
    tensors["t2d"] = is_drafted
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save(tensors, folder)
    return tensors


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, shape: Any, generator: torch.Generator) -> Tensor:
    noise = torch.randn(*shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * noise
    return noise * shape[-1] ** -0.5
