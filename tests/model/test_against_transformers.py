"""Logits and greedy tokens of every architecture and rope type equal transformers', in float32."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from model.config import load_config
from model.decoder import load_model
from tests.make_models import ensure_model, trained_models
from tests.model.dense import DenseAttention, greedy
from tests.model.random_models import load, make

STORY = "Anna found the red ball near the river. Anna"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MSCALE = {**YARN, "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEEPSEEK, DENSE = "DeepseekV2ForCausalLM", {"first_k_dense_replace": 3}
CASES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 10000.0, **YARN}}),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 24, "rms_norm_eps": 1e-3}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"rope_parameters": {**LINEAR, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "num_key_value_heads": 2}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "deepseek-dense": (DEEPSEEK, DENSE),
    "deepseek-moe": (DEEPSEEK, {}),
    # Rows of 23 floats are none that a grouped product takes: every expert sees every token then.
    "deepseek-moe-odd": (
        DEEPSEEK,
        {"moe_intermediate_size": 23, "experts_implementation": "eager"},
    ),
    "deepseek-moe-groups": (DEEPSEEK, {"topk_method": "group_limited_greedy"}),
    "deepseek-q-lora": (DEEPSEEK, {"q_lora_rank": 24, **DENSE}),
    "deepseek-bias": (DEEPSEEK, {"q_lora_rank": 24, "attention_bias": True, **DENSE}),
    "deepseek-yarn": (
        DEEPSEEK,
        {"rope_parameters": {**MSCALE, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-yarn-mscale": (
        DEEPSEEK,
        {"rope_parameters": {**MSCALE, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek-yarn-plain": (
        DEEPSEEK,
        {"rope_parameters": MSCALE, "q_lora_rank": 24, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, tmp_path, monkeypatch):
    monkeypatch.setattr("model.moe._MAX_TOKENS", 64)  # so that experts take prompts in parts
    architecture, options = CASES[case]
    reference = make(architecture, tmp_path, **options)
    model = load(tmp_path)
    check_equal(model, reference)


def check_equal(model, reference, num_tokens: int = 20) -> None:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, model.config.vocab_size, (1, 150), generator=generator)
    with torch.inference_mode():
        wanted = reference(prompt).logits[0]
        attention = DenseAttention(model.attention_spec)
        logits = model.logits(model.forward(prompt[0], torch.arange(150), attention))
        rows = torch.tensor([149, 0, 70, 149])
        attention = DenseAttention(model.attention_spec)
        some = model.forward(prompt[0], torch.arange(150), attention, rows)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(some), wanted[rows], rtol=1e-4, atol=1e-4)
    generated = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = prompt[0].tolist()
    assert greedy(model, ids, num_tokens, chunk=64) == generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ["gqa", "mla", *trained_models()])
def test_trained_models_generate_what_transformers_does(name):
    """The tiny models that this repository trains, and others where there are some."""
    folder = trained_models().get(name) or ensure_model(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_equal(load(folder), reference, num_tokens=40)


def test_bfloat16_is_close_to_float32(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    config = load_config(tmp_path)
    ids, positions = torch.arange(40), torch.arange(40)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(config, tmp_path, dtype=dtype)
        with torch.inference_mode():
            hidden = model.forward(ids, positions, DenseAttention(model.attention_spec))
            assert hidden.dtype == dtype
            found.append(model.logits(hidden).softmax(-1))
    assert (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_the_tiny_models_are_worth_comparing_tokens_of(kind):
    """They draw tokens with margins to spare, which depend on tokens far back."""
    folder = ensure_model(kind)
    model, tokenizer = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(STORY).ids
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
