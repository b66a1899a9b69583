"""Unusual forms of config.json are read as transformers reads them, or refused with the
key's name.
"""

import dataclasses

import pytest
import transformers

from model.architectures.defaults import DEFAULTS
from model.architectures.table import ARCHITECTURES
from model.config import parse_config
from model.errors import ModelError
from tests.model.as_transformers import compare
from tests.model.random_configs import MAX_POSITION
from tests.model.test_against_transformers import GLOBAL as FULL
from tests.model.test_against_transformers import LOCAL, LONGROPE
from tests.model.test_config import LLAMA

ORIGINAL = "original_max_position_embeddings"
SIZES = {
    **LLAMA,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_POSITION,
    "head_dim": 8,
}
LONG = {
    **LONGROPE,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [3.0, 4.0, 5.0, 6.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 32}
EVERY_SECOND = {"sliding_window_pattern": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 20}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
NO_KV_HEADS = {"num_attention_heads": 32, "head_dim": 8}


def with_rope_parameters(**rope):
    return {"rope_parameters": rope}


def with_ropes_by_kind(full, sliding=None):
    return {"rope_parameters": {FULL: full, **({LOCAL: sliding} if sliding else {})}}


READ = {
    # Places of original_max_position_embeddings ("original"), inside and outside of the
    # rope parameters.
    "phi3: original inside only": (
        "Phi3",
        with_rope_parameters(**LONG, **{ORIGINAL: 32}),
    ),
    "phi3: original outside only": (
        "Phi3",
        {**with_rope_parameters(**LONG), ORIGINAL: 32},
    ),
    "phi3: two originals": (
        "Phi3",
        {**with_rope_parameters(**LONG, **{ORIGINAL: 64}), ORIGINAL: 32},
    ),
    "llama: two originals": ("Llama", {**with_rope_parameters(**YARN), ORIGINAL: 16}),
    "gemma3: original inside": (
        "Gemma3",
        {**with_ropes_by_kind({**LONG, ORIGINAL: 32}), **EVERY_SECOND},
    ),
    "gemma3: two originals": (
        "Gemma3",
        {**with_ropes_by_kind(YARN), ORIGINAL: 64, **EVERY_SECOND},
    ),
    # Missing rope_theta, and several places of rope_theta.
    "llama: no theta": ("Llama", with_rope_parameters(rope_type="linear", factor=2.0)),
    "smollm3: no theta": ("SmolLM3", with_rope_parameters(rope_type="default")),
    "gemma3: no theta": (
        "Gemma3",
        {
            **with_ropes_by_kind({"rope_type": "default"}, {"rope_type": "default"}),
            **EVERY_SECOND,
        },
    ),
    "gemma3: theta outside": (
        "Gemma3",
        {
            "rope_theta": 300.0,
            "rope_local_base_freq": 50.0,
            **with_ropes_by_kind({"rope_type": "default"}),
            **EVERY_SECOND,
        },
    ),
    "olmo3: theta inside": (
        "Olmo3",
        with_ropes_by_kind({"rope_theta": 300.0}, {"rope_theta": 700.0}),
    ),
    # Rotation of only a part of each head.
    "glm: an odd part": ("Glm", {"partial_rotary_factor": 0.4, "head_dim": 8}),
    "glm4: an odd part, llama3": (
        "Glm4",
        with_rope_parameters(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            partial_rotary_factor=0.4,
            **{ORIGINAL: 32},
        ),
    ),
    "llama: a part, not read": ("Llama", {"partial_rotary_factor": 0.4}),
    "deepseek: a part, not read": (
        "DeepseekV3",
        {**DEEPSEEK, "partial_rotary_factor": 0.5},
    ),
    # Windows.
    "qwen2-moe: no layer_types": ("Qwen2Moe", {**EXPERTS, **WINDOW}),
    "qwen2-moe: two layers": (
        "Qwen2Moe",
        {**EXPERTS, **WINDOW, "max_window_layers": 2},
    ),
    "smollm3: no layer_types": ("SmolLM3", {**WINDOW, "no_rope_layer_interval": 2}),
    "gemma2: a pattern, not read": (
        "Gemma2",
        {"sliding_window": 20, "sliding_window_pattern": 3},
    ),
    "gemma3: a pattern": (
        "Gemma3",
        {"sliding_window": 20, "sliding_window_pattern": 3},
    ),
    "mistral: layer_types, not read": (
        "Mistral",
        {"sliding_window": 20, "layer_types": [FULL] * 4},
    ),
    # Keys that belong to different model classes.
    "qwen2: mlp_bias": ("Qwen2", {"mlp_bias": True}),
    "mistral: attention_bias": ("Mistral", {"attention_bias": True}),
    "llama: scales": (
        "Llama",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.5,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 2.0,
        },
    ),
    "llama: hidden_activation": ("Llama", {"hidden_activation": "relu"}),
    "llama: clip_qkv": ("Llama", {"clip_qkv": 0.1}),
    "mixtral: qwen's and deepseek's": (
        "Mixtral",
        {
            **MIXTRAL,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0],
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.0,
            "swiglu_limit": 1.5,
        },
    ),
    "gpt-oss: hidden_act": ("GptOss", {**MIXTRAL, "hidden_act": "relu"}),
    "gemma2: hidden_act": ("Gemma2", {"hidden_act": "relu"}),
    # Activations.
    **{
        f"llama: {name}": ("Llama", {"hidden_act": name})
        for name in (
            "relu",
            "relu2",
            "quick_gelu",
            "gelu_fast",
            "gelu_accurate",
            "gelu_python",
        )
    },
    "qwen2-moe: relu": ("Qwen2Moe", {**EXPERTS, "hidden_act": "relu"}),
    "gemma2: relu": ("Gemma2", {"hidden_activation": "relu"}),
    "gemma: gelu": (
        "Gemma",
        {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    ),
    # Missing keys.
    "llama: no max_position_embeddings": ("Llama", {"max_position_embeddings": ...}),
    "qwen3-moe: no max_position_embeddings": (
        "Qwen3Moe",
        {**EXPERTS, "max_position_embeddings": ...},
    ),
    "qwen2: no num_key_value_heads": (
        "Qwen2",
        {**NO_KV_HEADS, "num_key_value_heads": ...},
    ),
    "gemma: no num_key_value_heads": (
        "Gemma",
        {"num_attention_heads": 16, "num_key_value_heads": ...},
    ),
    "glm: no intermediate_size": ("Glm", {"intermediate_size": ...}),
    "mixtral: the other name": (
        "Mixtral",
        {"num_experts": 4, "num_experts_per_tok": 2},
    ),
}
REFUSED = {
    "gemma3: original outside only": (
        "Gemma3",
        {**with_ropes_by_kind(LONG), ORIGINAL: 32, **EVERY_SECOND},
        rf"{ORIGINAL} is 32 outside of rope_parameters"
        r".*put it next to the rope_type .*longrope",
    ),
    "olmo3: original outside only": (
        "Olmo3",
        {**with_ropes_by_kind(LONG, {"rope_theta": 1e4}), ORIGINAL: 32},
        rf"{ORIGINAL} is 32 outside of rope_parameters",
    ),
    "olmo3: theta outside": (
        "Olmo3",
        {"rope_theta": 1e4},
        "rope_theta is 10000.0, which does not say whether layers of sliding_attention",
    ),
    "gemma: two activations": (
        "Gemma",
        {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
        'hidden_activation is "gelu_pytorch_tanh", but hidden_act is "silu": give them '
        "the same",
    ),
    "gemma3: one rope": (
        "Gemma3",
        with_rope_parameters(**YARN),
        "rope_parameters is .*yarn.*object for each of full_attention",
    ),
    "gemma3: type": (
        "Gemma3",
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        'rope_scaling has the type "linear" and no rope_type: write it as rope_type',
    ),
    "llama: a rope by kind": (
        "Llama",
        with_ropes_by_kind(YARN),
        "rope_parameters by kind of layer in this architecture",
    ),
    "llama: another rope_theta": (
        "Llama",
        {
            **with_rope_parameters(rope_theta=5e5),
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "rope_scaling and rope_parameters contradict each other",
    ),
    "phi3: linear": (
        "Phi3",
        with_rope_parameters(rope_type="linear", factor=2.0),
        '"linear" is not supported; .*longrope',
    ),
    "llama: su": (
        "Llama",
        with_rope_parameters(**{**LONG, "rope_type": "su"}),
        '"su" is not supported',
    ),
    "llama: a part, linear": (
        "Llama",
        with_rope_parameters(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
        'partial_rotary_factor 0.5 of rope type "linear" in this architecture',
    ),
    "glm: an odd part, yarn": (
        "Glm",
        with_rope_parameters(**YARN, partial_rotary_factor=0.4),
        "expected an even number",
    ),
    "olmo3: truncate": (
        "Olmo3",
        with_ropes_by_kind({**YARN, "truncate": False}),
        "truncate false of rope type yarn",
    ),
    "llama: factors of llama3": (
        "Llama",
        with_rope_parameters(
            rope_type="llama3", factor=4.0, low_freq_factor=4.0, high_freq_factor=1.0
        ),
        "high_freq_factor of rope type llama3 is 1, expected a number above "
        "low_freq_factor 4",
    ),
    "deepseek: mscale_all_dim": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            **with_rope_parameters(rope_type="linear", factor=2.0, mscale_all_dim=1.0),
        },
        'mscale_all_dim of rope type "linear"',
    ),
    "gemma3: soft cap": (
        "Gemma3",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping 50.0 in this",
    ),
    "qwen2: windows on and off": (
        "Qwen2",
        {"sliding_window": 20, "layer_types": [LOCAL] * 4},
        "use_sliding_window is false, but layer_types has sliding_attention: set",
    ),
    "gpt-oss: no window": (
        "GptOss",
        {**MIXTRAL, "sliding_window": None},
        "sliding_window is null, but layer_types",
    ),
    "granite: no attention": (
        "Granite",
        {"attention_multiplier": 0.0},
        "attention_multiplier is 0.0, expected a number",
    ),
}


def config_of(name, change):
    changed = {**SIZES, "architectures": [f"{name}ForCausalLM"], **change}
    return {key: value for key, value in changed.items() if value is not ...}


@pytest.mark.parametrize("case", READ)
def test_config_is_read_as_by_transformers(case, tmp_path):
    assert compare(config_of(*READ[case]), tmp_path).verdict == "equal"


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_transformers_reads_differently_is_refused_by_name(case):
    name, change, error = REFUSED[case]
    with pytest.raises(ModelError, match=error):
        parse_config(config_of(name, change))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_of_missing_keys_equal_those_of_transformers(name):
    architecture = ARCHITECTURES[name]
    config_class = getattr(transformers, name).config_class
    if architecture.text_type:
        config_class = transformers.CONFIG_MAPPING[architecture.text_type]
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    listed_keys = {key for defaults in DEFAULTS.values() for key in defaults}
    listed_keys.remove("rope_parameters")
    defaults = dict(architecture.defaults)
    rope_parameters = defaults.pop("rope_parameters", None)
    field_defaults = {key: value for key, value in defaults.items() if key in fields}
    assert field_defaults == {
        key: value for key, value in fields.items() if key in listed_keys
    }
    # transformers has different names for these keys.
    other_defaults = {
        key: value for key, value in defaults.items() if key not in fields
    }
    expected = dict.fromkeys(("head_dim", "sliding_window_pattern"))
    expected |= _rope_defaults(config_class())
    if "sliding_window_pattern" in other_defaults:
        expected["sliding_window_pattern"] = config_class()._sliding_window_pattern
    assert other_defaults == {key: expected[key] for key in other_defaults}
    if rope_parameters is not None:
        assert rope_parameters.items() <= config_class().rope_parameters.items()


def _rope_defaults(config):
    ropes = config.rope_parameters
    full = ropes.get(FULL, ropes)
    return {
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "rope_local_base_freq": ropes.get(LOCAL, {}).get("rope_theta"),
    }
