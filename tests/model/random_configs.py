"""Random config.json files of all architectures, small enough for tests.

The files vary what publishers vary: the form and place of rope parameters, windows,
layer types, biases, activations, scales and experts. Some keys are missing, and some
keys are not read by the model class.
"""

import random
from typing import Any, Final

from model.architectures.table import ARCHITECTURES
from tests.model.random_models import IMAGES

MAX_POSITION: Final = 96  # tokens
# Prompts are longer than every original_max_position_embeddings, so that longrope uses
# its long factors.
PROMPT_TOKENS: Final = 80

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ACTIVATIONS: Final = (
    "silu", "swish", "gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh",
    "gelu_new", "gelu_fast", "gelu_accurate", "quick_gelu", "relu", "relu2", "mish",
)  # fmt: skip
_ORIGINAL: Final = "original_max_position_embeddings"

Raw = dict[str, Any]


def random_config(seed: int) -> Raw:
    """Returns the config.json of a small random model, which the seed determines."""
    draw = random.Random(seed)
    architecture = draw.choice(sorted(ARCHITECTURES))
    raw = _sizes(draw, architecture)
    _add_experts(draw, architecture, raw)
    _add_windows(draw, architecture, raw)
    _add_scales(draw, architecture, raw)
    _add_ropes(draw, architecture, raw)
    for name, value in draw.sample(_strays(raw), k=draw.choice((0, 0, 1, 2, 3))):
        raw[name] = value
    if draw.random() < 0.2:
        raw.pop(draw.choice([name for name in raw if name not in _NEEDED]))
    if not ARCHITECTURES[architecture].text_type:
        return {"architectures": [architecture], **raw}
    raw["model_type"] = ARCHITECTURES[architecture].text_type
    top: Raw = {
        "architectures": [architecture],
        "vision_config": IMAGES,
        "text_config": raw,
    }
    if draw.random() < 0.5:
        top["tie_word_embeddings"] = draw.random() < 0.5
    return top


# These keys are always present, because the defaults of the classes are too large for a
# test.
_NEEDED: Final = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_local_experts",
    "num_experts", "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip


def _sizes(draw: random.Random, architecture: str) -> Raw:
    heads = draw.choice((4, 8))
    raw: Raw = {
        "vocab_size": draw.choice((61, 64)),
        "hidden_size": 64,
        "intermediate_size": draw.choice((48, 40)),
        "num_hidden_layers": draw.choice((2, 3, 5)),
        "num_attention_heads": heads,
        "max_position_embeddings": MAX_POSITION,
        "pad_token_id": 0,
    }
    if draw.random() < 0.8:
        raw["num_key_value_heads"] = draw.choice((1, 2, heads))
    # In Phi-3 and OLMoE, the heads must add up to hidden_size: Phi-3's number of rope
    # factors follows from hidden_size, and OLMoE's norms have this width.
    if draw.random() < 0.6 and not architecture.startswith(("Phi3", "Olmoe")):
        raw["head_dim"] = draw.choice((8, 16, 20))
    if draw.random() < 0.5:
        raw["rms_norm_eps"] = draw.choice((1e-3, 1e-5))
    for name, chance in (("tie_word_embeddings", 0.5), ("attention_bias", 0.4)):
        if draw.random() < chance:
            raw[name] = draw.random() < 0.5
    if draw.random() < 0.5:
        raw["hidden_act"] = draw.choice(_ACTIVATIONS)
    if architecture.startswith("Gemma") and draw.random() < 0.5:
        raw["hidden_activation"] = draw.choice(_ACTIVATIONS)
    if ARCHITECTURES[architecture].mla:
        raw |= {
            "num_key_value_heads": heads,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
        }
        raw |= {
            "q_lora_rank": draw.choice((None, 24)),
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
        raw.pop("head_dim", None)
    return raw


def _add_experts(draw: random.Random, architecture: str, raw: Raw) -> None:
    mixture = ARCHITECTURES[architecture].mixture
    if mixture is None:
        return
    raw[mixture.count_field] = 8
    raw["num_experts_per_tok"] = draw.choice((1, 2, 3))
    raw[mixture.width_field] = 24
    if mixture.shared_width_field:
        raw[mixture.shared_width_field] = 40
    optional: dict[str, tuple[Any, ...]] = {
        "norm_topk_prob": (True, False),
        "decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([], [0], [1]),
        "first_k_dense_replace": (0, 1, 2),
        "n_shared_experts": (1, 2),
        "routed_scaling_factor": (1.0, 1.7),
        "use_qk_norm": (True, False),
    }
    for name, values in optional.items():
        if draw.random() < 0.5:
            raw[name] = draw.choice(values)
    if draw.random() < 0.7:
        raw |= {"n_group": 4, "topk_group": 2}
    if architecture == "DeepseekV2ForCausalLM" and draw.random() < 0.7:
        raw["topk_method"] = draw.choice(("greedy", "group_limited_greedy"))
    if architecture == "GptOssForCausalLM":
        raw["swiglu_limit"] = draw.choice((1.5, 7.0))


def _add_windows(draw: random.Random, architecture: str, raw: Raw) -> None:
    layers = raw["num_hidden_layers"]
    if draw.random() < 0.7:
        raw["sliding_window"] = draw.choice((20, 20, 20, 20, 95, 96, 4096, None))
    if draw.random() < 0.6:
        raw["use_sliding_window"] = draw.random() < 0.7
    if draw.random() < 0.5:
        raw["max_window_layers"] = draw.choice((0, 1, 2, 28))
    if draw.random() < (0.3 if ARCHITECTURES[architecture].window_rule else 0.05):
        raw["layer_types"] = [draw.choice((_FULL, _SLIDING)) for _ in range(layers)]
    if draw.random() < 0.3:
        raw["sliding_window_pattern"] = draw.choice((1, 2, 3))
    if draw.random() < 0.2:
        raw["no_rope_layer_interval"] = draw.choice((2, 3))
    if draw.random() < 0.15:
        raw["no_rope_layers"] = [draw.choice((0, 1)) for _ in range(layers)]


def _add_scales(draw: random.Random, architecture: str, raw: Raw) -> None:
    values = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.5,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": draw.choice((2.0, None)),
    }
    if architecture.startswith("Gemma") or draw.random() < 0.05:
        values["attn_logit_softcapping"] = draw.choice((1.5, None))
    for name, value in values.items():
        if draw.random() < 0.25:
            raw[name] = value


def _strays(raw: Raw) -> list[tuple[str, Any]]:
    """Returns keys that most classes do not read, with values."""
    return [
        ("mlp_bias", True),
        ("qkv_bias", False),
        ("rope_interleave", False),
        ("partial_rotary_factor", 0.5),
        ("rope_local_base_freq", 50.0),
        (_ORIGINAL, 32),
        ("swiglu_limit", 1.5),
        ("hidden_activation", "relu"),
        ("n_shared_experts", 1),
        ("use_qk_norm", True),
        ("layer_types", [_FULL] * raw["num_hidden_layers"]),
        ("clip_qkv", 0.5),
        ("rope_theta", 700.0),
        ("kv_lora_rank", 16),
    ]


def _add_ropes(draw: random.Random, architecture: str, raw: Raw) -> None:
    forms = ["none", "theta", "scaling", "scaling", "both"]
    has_kinds = architecture.startswith(("Gemma3", "Olmo3"))
    forms += ["kinds"] * 8 + ["flat"] if has_kinds else ["flat"] * 8 + ["kinds"]
    form = draw.choice(forms)
    if draw.random() < 0.5 or form == "theta":
        # Versions of transformers read a rope_theta of Olmo 3 differently, unless it is
        # the default.
        is_plain = architecture.startswith("Olmo3") and draw.random() < 0.8
        raw["rope_theta"] = 500000.0 if is_plain else draw.choice((100.0, 10000.0))
    if form in ("none", "theta"):
        return
    rope = _rope(draw, raw, architecture)
    rotates_part = ARCHITECTURES[architecture].rotates_part
    for name, chance, values in (
        ("partial_rotary_factor", 0.4 if rotates_part else 0.08, (0.5, 0.4, 0.75, 1.0)),
        (_ORIGINAL, 0.6, (16, 32, 64)),
    ):
        if draw.random() < chance:
            for place in draw.choice(([raw], [rope], [raw, rope])):
                place[name] = draw.choice(values)
    if form in ("scaling", "both"):
        raw["rope_scaling"] = rope
    if form in ("flat", "both"):
        raw["rope_parameters"] = _theta(draw, rope)
    if form == "kinds":
        other = _rope(draw, raw, architecture)
        raw["rope_parameters"] = {
            _FULL: _theta(draw, rope),
            _SLIDING: _theta(draw, other),
        }
        if draw.random() < 0.15:
            del raw["rope_parameters"][draw.choice((_FULL, _SLIDING))]


def _theta(draw: random.Random, rope: Raw) -> Raw:
    if draw.random() < 0.7:
        return {**rope, "rope_theta": draw.choice((200.0, 10000.0))}
    return rope


def _rope(draw: random.Random, raw: Raw, architecture: str) -> Raw:
    """Returns the parameters of one rope. Sometimes a required parameter is missing."""
    kinds = ("default", "longrope", "longrope", "su", "yarn", "linear")
    rope_type = draw.choice(kinds if architecture.startswith("Phi3") else _ROPE_TYPES)
    rope: Raw = {
        draw.choice(("type", "rope_type", "rope_type", "rope_type")): rope_type
    }
    if rope_type != "default" and draw.random() < 0.9:
        rope["factor"] = draw.choice((1.0, 2.0, 4.0))
    if rope_type == "llama3":
        factors = ((1.0, 4.0), (1.0, 2.0), (2.0, 8.0), (4.0, 1.0))
        low, high = draw.choice(factors)
        rope |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope_type == "yarn":
        optional = {
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "mscale": 0.7,
            "mscale_all_dim": 0.8, "truncate": False,
        }  # fmt: skip
        rope |= {name: value for name, value in optional.items() if draw.random() < 0.3}
    if rope_type in ("longrope", "su") or (
        rope_type == "yarn" and architecture[:4] == "Phi3"
    ):
        width = raw.get("head_dim") or 64 // raw["num_attention_heads"]
        width = raw.get("qk_rope_head_dim", width)
        pairs = width // 2 if draw.random() < 0.8 else width // 4
        rope["short_factor"] = [1.0 + pair / 8 for pair in range(pairs)]
        rope["long_factor"] = [3.0 + pair / 4 for pair in range(pairs)]
        if draw.random() < 0.3:
            rope["attention_factor"] = 1.3
    if rope_type in ("linear", "dynamic") and draw.random() < 0.1:
        rope["mscale_all_dim"] = 0.8
    if len(rope) > 1 and draw.random() < 0.05:
        del rope[draw.choice([name for name in rope if "type" not in name])]
    return rope
