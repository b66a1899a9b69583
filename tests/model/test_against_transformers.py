"""For all architectures and rope types, logits and greedy tokens equal transformers'.

The comparisons are in float32.
"""

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from model.config import load_config
from model.decoder import load_model
from model.sizes import check_files, weight_bytes
from tests.make_models import ensure_model, trained_models
from tests.model.dense import DenseAttention, greedy
from tests.model.random_models import continued, load, make

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# The model classes in these cases ignore this key and always have a bias.
UNREAD = {"attention_bias": False}
EAGER = {"experts_implementation": "eager"}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEEPSEEK = "DeepseekV2"
DENSE = {"first_k_dense_replace": 3}


def yarn(**options):
    return {
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e4,
            "beta_fast": 32,
            "beta_slow": 1,
            **options,
        }
    }


CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_theta": 10000.0, **YARN}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    # Mistral has no bias, even with attention_bias.
    "mistral": ("Mistral", {"sliding_window": None, "attention_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {**LINEAR, "rope_theta": 1e6}, **UNREAD}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 2}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "deepseek-dense": (DEEPSEEK, DENSE),
    "deepseek-moe": (DEEPSEEK, {}),
    # The grouped product does not accept rows of 23 floats. So every expert computes
    # every token.
    "deepseek-moe-odd": (DEEPSEEK, {"moe_intermediate_size": 23, **EAGER}),
    "deepseek-moe-groups": (DEEPSEEK, {"topk_method": "group_limited_greedy"}),
    "deepseek-q-lora": (DEEPSEEK, {"q_lora_rank": 24, **DENSE}),
    "deepseek-bias": (DEEPSEEK, {"q_lora_rank": 24, "attention_bias": True, **DENSE}),
    "deepseek-yarn": (DEEPSEEK, yarn(mscale=0.707, mscale_all_dim=0.707)),
    "deepseek-yarn-mscale": (DEEPSEEK, yarn(mscale=1.0, mscale_all_dim=0.8)),
    "deepseek-yarn-plain": (
        DEEPSEEK,
        {**yarn(), "q_lora_rank": 24, "tie_word_embeddings": True},
    ),
}

SHORT = [1.0 + pair / 8 for pair in range(4)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": SHORT,
    "long_factor": [4 * factor for factor in SHORT],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN = {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}
GROUPS = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 2.5,
}
ONE_BLOCK = {"num_local_experts": 8, "num_experts_per_tok": 3}
GEMMA = {"sliding_window": 40, "query_pre_attn_scalar": 20, "head_dim": 16}
WINDOW = {"sliding_window": 40}
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
CASES |= {
    "mistral-window": ("Mistral", WINDOW),
    "mixtral-window": ("Mixtral", {**ONE_BLOCK, **WINDOW}),
    "phi3-window": ("Phi3", WINDOW),
    "qwen2-window": (
        "Qwen2",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3-window": (
        "Qwen3",
        {
            **WINDOW,
            "use_sliding_window": True,
            "layer_types": [LOCAL, GLOBAL],
            "head_dim": 16,
        },
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {**QWEN, **WINDOW, "use_sliding_window": True, "head_dim": 16},
    ),
    "qwen2-moe-window": (
        "Qwen2Moe",
        {
            **QWEN,
            **WINDOW,
            "use_sliding_window": True,
            "layer_types": [LOCAL, GLOBAL],
            "shared_expert_intermediate_size": 40,
        },
    ),
    "smollm3-window": (
        "SmolLM3",
        {
            **WINDOW,
            "use_sliding_window": True,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
        },
    ),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "phi3": ("Phi3", {"sliding_window": None, "attention_bias": True}),
    "phi3-longrope": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
            "hidden_size": 128,
            "original_max_position_embeddings": 64,
            "head_dim": 16,
        },
    ),
    "phi3-short": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "factor": 4.0},
            "original_max_position_embeddings": 512,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            **WINDOW,
            "num_hidden_layers": 5,
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
                GLOBAL: {**YARN, "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "attention_bias": True},
    ),
    "granite": ("Granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2-plain": (
        "Gemma2",
        {**GEMMA, "sliding_window": 512, "attn_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
                GLOBAL: {**LINEAR, "rope_theta": 1e6},
            },
        },
    ),
    "gemma3-images": ("Gemma3ForConditionalGeneration", GEMMA),
    "mistral-images": (
        "Mistral3ForConditionalGeneration",
        {**WINDOW, "model_type": "mistral"},
    ),
    "mixtral": ("Mixtral", {**ONE_BLOCK, "attention_bias": True}),
    "gpt-oss": (
        "GptOss",
        {
            **ONE_BLOCK,
            **WINDOW,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt-oss-each": (
        "GptOss",
        {**ONE_BLOCK, **EAGER, "intermediate_size": 23, "head_dim": 16},
    ),
    "granite-moe": ("GraniteMoe", {**ONE_BLOCK, **MULTIPLIERS}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 16}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **QWEN,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 40,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe-listed": (
        "Qwen3Moe",
        {
            **QWEN,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **GROUPS,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        {**GROUPS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ),
    "deepseek-v3": ("DeepseekV3", {"q_lora_rank": 24}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {"rope_interleave": False, **yarn(mscale=1.0, mscale_all_dim=1.0)},
    ),
}
for name, (kind, options) in CASES.items():
    CASES[name] = (kind if "For" in kind else f"{kind}ForCausalLM", options)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, tmp_path, monkeypatch):
    # With this limit, experts compute a prompt in several parts.
    monkeypatch.setattr("model.mixture.experts._MAX_TOKENS", 64)
    architecture, options = CASES[case]
    reference = make(architecture, tmp_path, **options)
    model = load(tmp_path)
    check_equal(model, reference)
    check_files(model.config, tmp_path)
    image_prefixes = ("model.vision_tower", "model.multi_modal_projector")
    num_elements = sum(
        parameter.numel()
        for name, parameter in reference.named_parameters()
        if not name.startswith(image_prefixes) and parameter.dim() > 1
    )
    assert weight_bytes(model.config, 1, keep_quantised=False) == num_elements


def test_longrope_uses_short_factors_if_no_sequence_exceeds_the_original_context(
    tmp_path,
):
    sizes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
    reference = make("Phi3ForCausalLM", tmp_path, **sizes)
    short = load_config(tmp_path, max_model_len=256)
    check_equal(load_model(short, tmp_path, dtype=torch.float32), reference)
    long = load_config(tmp_path, max_model_len=257)
    assert long == load_config(tmp_path) and long.semantic_json != short.semantic_json


def check_equal(model, reference, num_tokens: int = 20) -> None:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, model.config.vocab_size, (1, 150), generator=generator)
    with torch.inference_mode():
        expected = reference(prompt).logits[0]
        attention = DenseAttention(model.attention_spec)
        logits = model.logits(model.forward(prompt[0], torch.arange(150), attention))
        rows = torch.tensor([149, 0, 70, 149])
        attention = DenseAttention(model.attention_spec)
        some_hidden = model.forward(prompt[0], torch.arange(150), attention, rows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    some_logits = model.logits(some_hidden)
    torch.testing.assert_close(some_logits, expected[rows], rtol=1e-4, atol=1e-4)
    ids = prompt[0].tolist()
    assert greedy(model, ids, num_tokens, chunk=64) == continued(
        reference, ids, num_tokens
    )


@pytest.mark.parametrize("name", ["gqa", "mla", *trained_models()])
def test_trained_models_generate_what_transformers_generates(name):
    """The test uses the tiny models of this repository, and shared trained models if
    they are present.
    """
    folder = trained_models().get(name) or ensure_model(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    check_equal(load(folder), reference, num_tokens=40)


def test_bfloat16_is_close_to_float32(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    config = load_config(tmp_path)
    ids = torch.arange(40)
    positions = torch.arange(40)
    probabilities = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(config, tmp_path, dtype=dtype)
        with torch.inference_mode():
            hidden = model.forward(ids, positions, DenseAttention(model.attention_spec))
            assert hidden.dtype == dtype
            probabilities.append(model.logits(hidden).softmax(-1))
    assert (probabilities[0] - probabilities[1]).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_tokens_of_the_tiny_models_are_suitable_for_comparisons(kind):
    """Logits have clear margins, and generated tokens depend on distant tokens."""
    folder = ensure_model(kind)
    model = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Anna found the red ball near the river. Anna").ids
    ids = prompt + greedy(model, prompt, 60)
    with torch.inference_mode():
        attention = DenseAttention(model.attention_spec)
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), attention)
        top = model.logits(hidden[len(prompt) - 1 : -1]).topk(2).values
    margins = top[:, 0] - top[:, 1]
    assert margins.median() > 1 and margins.min() > 1e-3  # nats
    for name, colour in (("Kate", "blue"), ("Leo", "silver")):
        story = f"{name} took the {colour} ball on the hill. " * 40
        text = tokenizer.decode(greedy(model, tokenizer.encode(story.strip()).ids, 8))
        assert name in text and colour in text
