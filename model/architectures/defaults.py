"""The keys of config.json that each model class reads, and their default values.

The tables follow transformers' configuration classes and are indexed by model_type.
Baton ignores a key that is not listed for a class, as transformers does. The exceptions
are keys that are read for every model (_COMMON_KEYS in keys.py). A test compares these
tables with transformers.
"""

from collections.abc import Mapping
from typing import Any, Final

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",  # None means num_attention_heads
    "head_dim",  # None means hidden_size / num_attention_heads
    "max_position_embeddings",
)


def _model_class(
    *sizes: int | None, eps: float = 1e-6, **others: Any
) -> Mapping[str, Any]:
    """Returns the keys of one model class with their defaults.

    Args:
        sizes: the defaults of _SIZES, in that order.
        eps: the default of rms_norm_eps.
        others: keys that not every class reads, and keys with defaults that differ from
            the common defaults.
    """
    common: dict[str, Any] = {
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    if "hidden_activation" not in others:
        common["hidden_act"] = "silu"
    return {**dict(zip(_SIZES, sizes, strict=True)), **common, **others}


# fmt: off
_WINDOW: Final[dict[str, Any]] = {"use_sliding_window": False, "sliding_window": 4096}
_LATER_LAYERS_WINDOW: Final[dict[str, Any]] = {
    **_WINDOW, "max_window_layers": 28, "layer_types": None,
}
_MULTIPLIERS: Final[dict[str, Any]] = {
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GLM: Final = _model_class(
    151552, 4096, 13696, 40, 32, 2, 128, 131072, eps=1.5625e-07, attention_bias=True,
    partial_rotary_factor=0.5,
)
_GEMMA: Final[dict[str, Any]] = {
    "tie_word_embeddings": True, "attention_bias": False,
    "use_bidirectional_attention": None,
}
_GEMMA_2: Final[dict[str, Any]] = {
    **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "layer_types": None, "query_pre_attn_scalar": 256,
}
_MLA: Final[dict[str, Any]] = {
    "attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}
_QWEN_EXPERTS: Final[dict[str, Any]] = {
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
}
DEFAULTS: Final[dict[str, Mapping[str, Any]]] = {
    "llama": _model_class(
        32000, 4096, 11008, 32, 32, None, None, 2048, attention_bias=False,
        mlp_bias=False,
    ),
    "mistral": _model_class(
        32000, 4096, 14336, 32, 32, 8, None, 131072, sliding_window=4096,
    ),
    "qwen2": _model_class(
        151936, 4096, 22016, 32, 32, 32, None, 32768, **_LATER_LAYERS_WINDOW,
    ),
    "qwen3": _model_class(
        151936, 4096, 22016, 32, 32, 32, 128, 32768, attention_bias=False,
        **_LATER_LAYERS_WINDOW,
    ),
    "phi3": _model_class(
        32064, 3072, 8192, 32, 32, None, None, 4096, eps=1e-5, sliding_window=None,
        original_max_position_embeddings=4096, partial_rotary_factor=1.0,
    ),
    "olmo2": _model_class(
        50304, 4096, 11008, 32, 32, None, None, 2048, eps=1e-5, attention_bias=False,
    ),
    "olmo3": _model_class(
        50304, 4096, 11008, 32, 32, None, None, 2048, eps=1e-5, attention_bias=False,
        rope_theta=500000.0, sliding_window=4096, layer_types=None,
    ),
    "smollm3": _model_class(
        128256, 2048, 11008, 36, 16, 4, None, 32768, attention_bias=False,
        mlp_bias=False, tie_word_embeddings=True, rope_theta=2e6, no_rope_layers=None,
        no_rope_layer_interval=4, use_sliding_window=False, sliding_window=None,
        layer_types=None,
    ),
    "granite": _model_class(
        32000, 4096, 11008, 32, 32, None, None, 2048, attention_bias=False,
        mlp_bias=False, **_MULTIPLIERS,
    ),
    "glm": _GLM,
    "glm4": _GLM,
    "gemma": _model_class(
        256000, 3072, 24576, 28, 16, 16, 256, 8192,
        **{**_GEMMA, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma2": _model_class(
        256000, 2304, 9216, 26, 8, 4, 256, 8192, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, **_GEMMA_2,
    ),
    "gemma3_text": _model_class(
        262208, 2304, 9216, 26, 8, 4, 256, 131072, attn_logit_softcapping=None,
        final_logit_softcapping=None, rope_theta=1e6, rope_local_base_freq=10000.0,
        sliding_window_pattern=6, **{**_GEMMA_2, "use_bidirectional_attention": False},
    ),
    "mixtral": _model_class(
        32000, 4096, 14336, 32, 32, 8, None, 131072, eps=1e-5, rope_theta=1e6,
        sliding_window=None, num_local_experts=8, num_experts_per_tok=2,
    ),
    "qwen2_moe": _model_class(
        151936, 2048, 5632, 24, 16, 16, None, 32768, qkv_bias=True, num_experts=60,
        num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, **_LATER_LAYERS_WINDOW, **_QWEN_EXPERTS,
    ),
    "qwen3_moe": _model_class(
        151936, 2048, 6144, 24, 32, 4, None, 32768, attention_bias=False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, **_WINDOW,
        **_QWEN_EXPERTS,
    ),
    "olmoe": _model_class(
        50304, 2048, 2048, 16, 16, None, None, 4096, eps=1e-5, attention_bias=False,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=False, clip_qkv=None,
    ),
    "granitemoe": _model_class(
        32000, 4096, 11008, 32, 32, None, None, 2048, attention_bias=False,
        num_local_experts=8, num_experts_per_tok=2, **_MULTIPLIERS,
    ),
    "gpt_oss": _model_class(
        201088, 2880, 2880, 36, 64, 8, 64, 131072, eps=1e-5, attention_bias=True,
        rope_theta=150000.0, sliding_window=128, layer_types=None,
        num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=1.702,
        swiglu_limit=7.0,
        rope_parameters={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    ),
    "glm4_moe": _model_class(
        151552, 4096, 10944, 46, 96, 8, None, 131072, eps=1e-5, attention_bias=False,
        partial_rotary_factor=0.5, n_routed_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1408, n_shared_experts=1, norm_topk_prob=True,
        first_k_dense_replace=1, routed_scaling_factor=1.0, n_group=1, topk_group=1,
        use_qk_norm=False,
    ),
    "deepseek_v2": _model_class(
        102400, 4096, 11008, 32, 32, None, None, 2048, mlp_bias=False,
        n_routed_experts=64, num_experts_per_tok=None, moe_intermediate_size=1407,
        n_shared_experts=2, norm_topk_prob=False, first_k_dense_replace=0,
        routed_scaling_factor=1.0, n_group=None, topk_group=None, topk_method="greedy",
        **_MLA,
    ),
    "deepseek_v3": _model_class(
        129280, 7168, 18432, 61, 128, 128, None, 4096, rope_interleave=True,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        n_shared_experts=1, norm_topk_prob=True, first_k_dense_replace=3,
        routed_scaling_factor=2.5, n_group=8, topk_group=4, **_MLA,
    ),
}
# fmt: on
