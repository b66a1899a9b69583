"""Published configs of well-known models.

They must imply the published number of weights. Models with the same keys but small
sizes must compute what transformers computes.
"""

import json
from typing import Any

import pytest

from model.architectures.rotation import NOT_ROTATED
from model.config import ModelConfig, parse_config
from model.sizes import weight_bytes
from tests.model.random_models import IMAGES, load, make_of
from tests.model.test_against_transformers import check_equal

SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def published(architecture: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        **dict(zip(SIZES, sizes, strict=True)),
        **rest,
    }


QWEN: dict[str, Any] = {
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_experts": 128,
    "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
    "rope_theta": 1e6,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "moe_layer_freq": 1, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
GLM_MOE: dict[str, Any] = {
    "attention_bias": True, "head_dim": 128, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1,
    "rope_theta": 1000000, "rope_scaling": None,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [8.0] * 48}
# For each model, the published number of weights in billions (without layers for
# speculative decoding), and its config.json.
MODELS: dict[str, tuple[float, dict[str, Any]]] = {
    "Mixtral-8x7B": (46.7, published(
        "MixtralForCausalLM", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None)),
    "Qwen3-30B-A3B": (30.5, published(
        "Qwen3MoeForCausalLM", 48, 2048, 6144, 32, 4, 151936, 40960,
        moe_intermediate_size=768, **QWEN)),
    "DeepSeek-R1-0528-Qwen3-8B": (8.19, published(
        "Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 151936, 131072, head_dim=128,
        rope_scaling={
            "rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attn_factor": 0.8782488562869419})),
    "Qwen3-235B-A22B": (235.1, published(
        "Qwen3MoeForCausalLM", 94, 4096, 12288, 64, 4, 151936, 40960,
        moe_intermediate_size=1536, **QWEN)),
    "Qwen2-57B-A14B": (57.4, published(
        "Qwen2MoeForCausalLM", 28, 3584, 18944, 28, 4, 151936, 32768,
        moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        use_sliding_window=False, sliding_window=65536)),
    "DeepSeek-V3": (671.0, published(
        "DeepseekV3ForCausalLM", 61, 7168, 18432, 128, 128, 129280, 163840,
        n_routed_experts=256, first_k_dense_replace=3, n_group=8, topk_group=4,
        routed_scaling_factor=2.5, rope_scaling=YARN, **DEEPSEEK)),
    "Kimi-K2": (1026.0, published(
        "DeepseekV3ForCausalLM", 61, 7168, 18432, 64, 64, 163840, 131072,
        n_routed_experts=384, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=2.827, model_type="kimi_k2",
        rope_scaling={**YARN, "factor": 32.0}, rope_theta=50000.0, **DEEPSEEK)),
    "GLM-4.5": (353.0, published(
        "Glm4MoeForCausalLM", 92, 5120, 12288, 96, 8, 151552, 131072,
        n_routed_experts=160, moe_intermediate_size=1536, first_k_dense_replace=3,
        use_qk_norm=True, **GLM_MOE)),
    "GLM-4.5-Air": (106.9, published(
        "Glm4MoeForCausalLM", 46, 4096, 10944, 96, 8, 151552, 131072,
        n_routed_experts=128, moe_intermediate_size=1408, first_k_dense_replace=1,
        use_qk_norm=False, **GLM_MOE)),
    "GLM-4-9B-0414": (9.4, published(
        "Glm4ForCausalLM", 40, 4096, 13696, 32, 2, 151552, 32768, head_dim=128,
        attention_bias=True, partial_rotary_factor=0.5)),
    "phi-4": (14.7, published(
        "Phi3ForCausalLM", 40, 5120, 17920, 40, 10, 100352, 16384, sliding_window=None,
        rope_scaling=None, rope_theta=250000, original_max_position_embeddings=16384)),
    "Phi-4-mini": (3.84, published(
        "Phi3ForCausalLM", 32, 3072, 8192, 24, 8, 200064, 131072, sliding_window=262144,
        partial_rotary_factor=0.75, rope_scaling=LONG,
        original_max_position_embeddings=4096, tie_word_embeddings=True)),
    "OLMo-2-7B": (7.3, published(
        "Olmo2ForCausalLM", 32, 4096, 11008, 32, 32, 100352, 4096, rope_theta=500000)),
    "OLMo-3-7B": (7.3, published(
        "Olmo3ForCausalLM", 32, 4096, 11008, 32, 32, 100278, 65536, rope_theta=500000,
        sliding_window=4096, rope_scaling={
            "rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2,
            "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 8192})),
    "SmolLM3-3B": (3.08, published(
        "SmolLM3ForCausalLM", 36, 2048, 11008, 16, 4, 128256, 65536,
        use_sliding_window=False, no_rope_layers=[1, 1, 1, 0] * 9, rope_theta=5000000.0,
        sliding_window=None, layer_types=["full_attention"] * 36,
        tie_word_embeddings=True)),
    "granite-3.3-8b": (8.17, published(
        "GraniteForCausalLM", 40, 4096, 12800, 32, 8, 49159, 131072,
        attention_multiplier=0.0078125, embedding_multiplier=12.0,
        residual_multiplier=0.22, logits_scaling=16.0, tie_word_embeddings=True)),
    "OLMoE-1B-7B": (6.92, published(
        "OlmoeForCausalLM", 16, 2048, 1024, 16, 16, 50304, 4096, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None)),
    "gemma-7b": (8.54, published(
        "GemmaForCausalLM", 28, 3072, 24576, 16, 16, 256000, 8192, head_dim=256,
        hidden_act="gelu", hidden_activation=None)),
    "gemma-2-9b": (9.24, published(
        "Gemma2ForCausalLM", 42, 3584, 14336, 16, 8, 256000, 8192,
        sliding_window=4096)),
    "gemma-3-1b": (1.0, published(
        "Gemma3ForCausalLM", 26, 1152, 6912, 4, 1, 262144, 32768, sliding_window=512)),
    "gemma-3-4b": (3.88, {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240,
            "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024}}),
    "gpt-oss-20b": (20.9, published(
        "GptOssForCausalLM", 24, 2880, 2880, 64, 8, 201088, 131072,
        num_local_experts=32, experts_per_token=4, num_experts_per_tok=4,
        swiglu_limit=7.0, sliding_window=128)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_model_has_the_published_number_of_weights(name: str) -> None:
    billions, raw = MODELS[name]
    actual_billions = weight_bytes(parse_config(raw), 1, keep_quantised=False) / 1e9
    assert actual_billions == pytest.approx(billions, rel=0.006)


def test_values_of_published_configs_are_read() -> None:
    def parse_published(name: str) -> ModelConfig:
        return parse_config(MODELS[name][1])

    kimi = parse_published("Kimi-K2").moe
    v3 = parse_published("DeepSeek-V3").moe
    assert kimi and v3 and (kimi.num_groups, v3.num_groups, v3.topk_groups) == (1, 8, 4)
    assert kimi.is_normalized and kimi.routed_scaling_factor == 2.827
    stored = parse_published("DeepSeek-V3").quantization
    assert (
        stored
        and stored.block == (128, 128)
        and parse_published("phi-4").quantization is None
    )
    assert parse_published("DeepSeek-V3").draft_layers == 1 and v3.dense_layers == (
        0,
        1,
        2,
    )
    assert (
        parse_published("GLM-4.5").qk_norm,
        parse_published("GLM-4.5-Air").qk_norm,
    ) == ("head", "")
    assert (
        parse_published("GLM-4.5").rope.dim,
        parse_published("GLM-4-9B-0414").rope.interleaved,
    ) == (64, True)
    mini = parse_published("Phi-4-mini").rope
    assert mini.dim == 96
    assert mini.divisors[0] == 8.0
    assert round(mini.attention_factor or 0, 4) == 1.1902
    assert parse_published(
        "DeepSeek-R1-0528-Qwen3-8B"
    ).rope.attention_factor == pytest.approx(1)
    assert parse_published("SmolLM3-3B").layer_ropes[:5] == (0, 0, 0, NOT_ROTATED, 0)
    assert parse_published("granite-3.3-8b").score_scale == 0.0078125
    assert parse_published("gemma-7b").activation == "gelu_tanh"
    windows = [
        parse_published(name).layer_windows
        for name in ("gemma-2-9b", "gemma-3-1b", "gpt-oss-20b")
    ]
    assert [each[:7].count(None) for each in windows] == [3, 1, 3]
    assert parse_published("gpt-oss-20b").rope.rope_type == "yarn"
    assert not parse_published("gpt-oss-20b").rope.truncate
    olmo = parse_published("OLMo-3-7B")
    assert [rope.rope_type for rope in olmo.ropes] == ["yarn", "default"]
    assert olmo.window_of(0)
    assert {rope.theta for rope in olmo.ropes} == {500000.0}
    assert olmo.layer_ropes[:4] == (1, 1, 1, 0)
    assert [next(filter(None, each)) for each in windows] == [4096, 512, 128]
    assert (
        parse_published("Phi-4-mini").layer_windows
        == ()
        == parse_published("Qwen3-30B-A3B").layer_windows
    )
    phi = parse_config({**MODELS["phi-4"][1], "sliding_window": 2047})
    assert phi.window_of(39) == 2047


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_hidden_layers": 4, "vocab_size": 131, "max_position_embeddings": 512,
    "head_dim": 16, "sliding_window": 40, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "original_max_position_embeddings": 64,
}  # fmt: skip


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with the same keys, but small sizes.

    Features that are off stay off, and sizes that are equal stay equal.
    """
    scaled: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            scaled[key] = small(value)
        elif key in ("n_group", "topk_group") and value == 1:
            scaled[key] = value
        elif key == "num_key_value_heads":
            scaled[key] = 8 if value == raw["num_attention_heads"] else 2
        elif (
            key == "sliding_window" and value and value >= raw.get(SIZES[6], value + 1)
        ):
            scaled[key] = 512
        elif isinstance(value, list) and key != "architectures":
            # Lists with a value per layer are cut to 4 layers. Other lists are rope
            # factors, which are cut to 3 (pairs of the 6 rotated elements).
            length = 4 if "layer" in key else 3
            scaled[key] = value[:length]
        else:
            scaled[key] = value if value is None else SMALL.get(key, value)
    return scaled


# One model is left out: transformers ignores attn_factor of DeepSeek-R1-0528-Qwen3-8B,
# but Baton applies it.
@pytest.mark.parametrize("name", [name for name in MODELS if "R1-0528" not in name])
def test_small_copy_of_a_published_model_computes_what_transformers_computes(
    name, tmp_path
):
    raw = small(MODELS[name][1])
    raw.pop("quantization_config", None)
    if "text_config" in raw:
        raw |= {"vision_config": IMAGES}
        raw["text_config"] |= {
            "vocab_size": 131,
            "head_dim": 16,
            "num_hidden_layers": 7,
        }
    reference = make_of(raw, tmp_path)
    # Replace the config.json that transformers wrote.
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_equal(load(tmp_path), reference, num_tokens=4)
