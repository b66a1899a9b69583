"""Reading config.json: defaults, old and new rope keys, and errors with their fixes."""

import json

import pytest

from model.config import load_config, parse_config
from model.errors import ModelLoadError, UnsupportedModel
from tests.model.test_real_configs import MODELS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_group": 4,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"]}
GLM = {"architectures": ["GlmForCausalLM"], "head_dim": 8}
ORIGINAL = "original_max_position_embeddings"


def with_rope_scaling(**scaling):
    return {"rope_scaling": scaling}


def test_sizes_are_read_and_missing_keys_have_the_defaults_of_transformers():
    config = parse_config(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (8, 4, 10000.0)
    assert not config.tie_embeddings
    assert parse_config({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}).attention_bias
    assert not parse_config(
        {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
    ).output_bias
    oss = MODELS["gpt-oss-20b"][1]
    assert parse_config({**oss, "rope_scaling": None}) == parse_config(oss)
    plain = {"rope_theta": 150000.0}
    assert parse_config({**oss, "rope_parameters": plain}).rope.rope_type == "default"
    qwen3 = parse_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, "head")
    no_kv_heads = {
        key: value for key, value in LLAMA.items() if key != "num_key_value_heads"
    }
    assert parse_config(no_kv_heads).num_kv_heads == 8


def test_old_and_new_rope_keys_mean_the_same():
    sizes = {"factor": 8.0, "original_max_position_embeddings": 64}
    scaling = {**sizes, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    old = {"rope_scaling": {"type": "llama3", **scaling}, "rope_theta": 500000}
    new_config = parse_config({**LLAMA, **new})
    old_config = parse_config({**LLAMA, **old})
    assert new_config.rope == old_config.rope
    assert (new_config.rope.rope_type, new_config.rope.theta) == ("llama3", 5e5)
    assert new_config.rope_canonical == old_config.rope_canonical
    assert new_config.rope_canonical != parse_config(LLAMA).rope_canonical


def test_kv_geometry_of_grouped_and_latent_attention():
    config = parse_config(LLAMA)
    assert (config.kv_heads_total, config.kv_components, config.kv_dim) == (4, 2, 8)
    latent = parse_config(DEEPSEEK)
    assert (latent.kv_heads_total, latent.kv_components) == (1, 1)
    assert latent.kv_dim == 32 + 8
    assert latent.moe is not None and latent.rope.interleaved
    assert parse_config({**DEEPSEEK, "first_k_dense_replace": 2}).moe is None


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*not declared; .*LlamaForCausal",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"]},
            "chunks.*nearest that is served is LlamaFor",
        ),
        ({"architectures": None, "model_type": "bert"}, "bert.*LlamaForCausalLM"),
        (
            with_rope_scaling(type="ntk", factor=2.0),
            "ntk.*default, linear, dynamic, llama3",
        ),
        (
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types.*chunked.*full_attention",
        ),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types sliding_attention in this arch",
        ),
        ({"layer_types": "all"}, "layer_types"),
        (
            {**MISTRAL3, "text_config": {"model_type": "ministral3"}},
            "ministral3.*ported: mistral",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*bfloat16.*gptq"),
        (
            {"quantization": {"group_size": 64, "bits": 4}},
            "quantization_.*64, .*4} is not.*gptq",
        ),
        ({"hidden_act": "mish"}, "hidden_act .*mish.*silu"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv 8.0"),
        ({**DEEPSEEK, "topk_method": "noaux_tc"}, "noaux_tc.*greedy"),
        ({**DEEPSEEK, "scoring_func": "sigmoid"}, "sigmoid.*softmax"),
        ({**DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob"),
        (
            {
                **DEEPSEEK,
                "partial_rotary_factor": 0.5,
                **with_rope_scaling(type="linear", factor=2.0),
            },
            'partial_rotary_factor 0.5 of rope type "linear"',
        ),
    ],
)
def test_unsupported_value_is_refused_and_supported_ones_are_named(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**LLAMA, **change})


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 64}
KINDS = ["sliding_attention"] + ["full_attention"] * 3


@pytest.mark.parametrize(
    ("name", "change", "windows"),
    [
        ("Llama", {"sliding_window": 64}, ""),
        ("Mistral", {}, ""),  # the default window of 4096 tokens exceeds the context
        ("Mistral", {"sliding_window": None}, ""),
        ("Mistral", {"sliding_window": 511}, "wwww"),
        ("Mistral", {"sliding_window": 512}, ""),
        (
            "Qwen2",
            {**QWEN_WINDOW, "use_sliding_window": False, "max_window_layers": 1},
            "",
        ),
        # By default, only layers after the first 28 have a window.
        ("Qwen2", QWEN_WINDOW, ""),
        ("Qwen2", {**QWEN_WINDOW, "max_window_layers": 1}, ".www"),
        ("Qwen3", {**QWEN_WINDOW, "layer_types": KINDS}, "w..."),
        ("Gemma2", {"sliding_window": 64}, "w.w."),
        ("Gemma3", {"sliding_window": 64, "sliding_window_pattern": 3}, "ww.w"),
    ],
)
def test_windows_of_layers_are_read_as_by_transformers(name, change, windows):
    base = {**LLAMA, "architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 4}
    config = parse_config({**base, **change})
    size = change.get("sliding_window")
    assert config.layer_windows == tuple(
        size if letter == "w" else None for letter in windows
    )
    assert config.window_of(3) == (size if windows.endswith("w") else None)
    assert ("windows" in config.special_attention) == bool(windows)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": "4"}, 'num_key_value_heads is "4"'),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps is "x", expected a number above 0'),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]"),
        (with_rope_scaling(type="linear"), "factor"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                **with_rope_scaling(factor=2.0),
            },
            "rope_scaling and rope_parameters contradict each other: put {.*2.0} into "
            "rope_parameters",
        ),
        (with_rope_scaling(type="llama3", factor=8.0), "low_freq_factor"),
        (
            with_rope_scaling(type="yarn", factor=float("nan")),
            "factor is NaN, expected a num",
        ),
        (
            with_rope_scaling(type="yarn", **{ORIGINAL: -1}),
            f"{ORIGINAL} is -1, expected a number above 0",
        ),
        ({"head_dim": 63}, "head_dim is 63, expected an even number"),
        (
            {**DEEPSEEK, "qk_rope_head_dim": 7},
            "qk_rope_head_dim is 7, expected an even number",
        ),
        (
            {"num_attention_heads": 128},
            "num_attention_heads is 128, above hidden_size 64",
        ),
        (
            {**DEEPSEEK, **V3, "n_group": 3},
            "n_group 3, topk_group 1 and .* do not fit .* 8",
        ),
        (
            {**DEEPSEEK, **V3, "n_group": 8, "topk_group": 2},
            "n_group is 8, above half of n_rout",
        ),
        (
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, but num_hidden_layers is 2",
        ),
        (
            {**MISTRAL, "sliding_window": -1},
            "sliding_window is -1, expected a positive",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "text_config is null, expected an",
        ),
        (
            {**GLM, "partial_rotary_factor": 1.5},
            "partial_rotary_factor 1.5 of head_dim 8 rotates 12",
        ),
        (
            with_rope_scaling(type="longrope", long_factor=[1.0]),
            "short_factor .* has 0 numb",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "has 1 entries for 2 ",
        ),
        (
            {**DEEPSEEK, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9, above n_routed_.* 8",
        ),
    ],
)
def test_invalid_config_is_refused_with_the_name_of_the_field(change, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_config({**LLAMA, **change})


def test_directory_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": 3}))
    with pytest.raises(
        ModelLoadError, match=r"config\.json .* a value of a wrong kind: 'int'"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "outcome"),
    [
        ({"max_position_embeddings": 96}, 96),
        ({"max_position_embeddings": 96, "rope_theta": 5.0}, 96),
        ({"vocab_size": LLAMA["vocab_size"]}, LLAMA["max_position_embeddings"]),
        ({"max_position_embedings": 96}, r"did you mean max_position_embeddings\?"),
        (
            {"use_cache": True},
            '"use_cache" changes nothing in this model; leave it out',
        ),
        ({"max_position_embeddings": "much"}, 'max_position_embeddings is "much"'),
    ],
)
def test_overrides_take_effect_or_are_refused(tmp_path, overrides, outcome):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    if isinstance(outcome, int):
        config = load_config(tmp_path, overrides=json.dumps(overrides))
        assert config.max_position == outcome
    else:
        with pytest.raises(ModelLoadError, match=outcome):
            load_config(tmp_path, overrides=json.dumps(overrides))


def test_overrides_apply_to_the_text_config_of_an_image_model(tmp_path):
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    raw = {**MISTRAL3, "text_config": text, "num_hidden_layers": 9}
    assert parse_config(raw).num_layers == 2, (
        "a key outside of text_config changed the text part"
    )
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path, overrides='{"num_hidden_layers": 3}').num_layers == 3
    with pytest.raises(ModelLoadError, match='"use_cache" changes nothing'):
        load_config(tmp_path, overrides='{"use_cache": true}')
