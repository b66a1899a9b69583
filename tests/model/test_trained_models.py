"""The tiny models that this repository trains are worth comparing tokens of."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from model.config import load_config
from model.registry import load_model
from tests.make_models import ensure_model
from tests.model.dense import DenseAttention, greedy
from tests.model.test_llama import check_equal

STORY = "Anna found the red ball near the river. Anna"


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_generates_what_transformers_does_with_margins_to_spare(kind):
    folder = ensure_model(kind)
    model = load_model(load_config(folder), folder, dtype=torch.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_equal(model, reference, num_tokens=40)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(STORY).ids
    ids = prompt + greedy(model, prompt, 60)
    with torch.inference_mode():
        attention = DenseAttention(model.attention_spec)
        hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), attention)
        top = model.logits(hidden[len(prompt) - 1 : -1]).topk(2).values
    margins = top[:, 0] - top[:, 1]
    assert margins.median() > 1 and margins.min() > 1e-3  # nats


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_continuation_depends_on_tokens_far_back(kind):
    folder = ensure_model(kind)
    model = load_model(load_config(folder), folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, colour in (("Kate", "blue"), ("Leo", "silver")):
        story = f"{name} took the {colour} ball on the hill. " * 40
        prompt = tokenizer.encode(story.strip()).ids
        text = tokenizer.decode(greedy(model, prompt, 8))
        assert name in text and colour in text
