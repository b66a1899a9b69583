"""The default model SmolLM2, with its real vocabulary and chat template.

The tests are slow, because SmolLM2 is two orders of magnitude larger than the test
models.
"""

from pathlib import Path

import openai
import pytest

from tests.e2e.reference import Reference
from tests.rigs.client import MODEL, complete, complete_all
from tests.rigs.cluster import assert_idle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_QUESTIONS = [
    "What is the capital of France?",
    "Write one line about the sea.",
    "2 + 2 = ?",
]
_TEXTS = [
    "The",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Größe, 東京, naïve 🦆 and other words",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Reference:
    return Reference(default_model)


def test_texts_equal_transformers_through_both_servers_and_on_one(
    default_cluster, reference
):
    prompts = [reference.tokenizer(text).input_ids for text in _TEXTS]
    expected = [reference.generate(prompt, 12) for prompt in prompts]
    answers = complete_all(default_cluster.url, prompts, 12)
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.text for answer in answers] == [
        reference.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected
    ]
    assert [answer.kv["transferred"] for answer in answers] == [len(p) for p in prompts]
    decode_only = [complete(default_cluster.decode[0].url, text, 12) for text in _TEXTS]
    assert [answer.token_ids for answer in decode_only] == expected
    assert_idle(default_cluster.prefill[0], default_cluster.decode[0])


def test_chat_equals_template_and_greedy_generation(default_cluster, reference):
    with openai.OpenAI(
        base_url=f"{default_cluster.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=300,
    ) as client:
        for question in _QUESTIONS:
            messages = [{"role": "user", "content": question}]
            answer = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=24, temperature=0
            )
            ids, text = reference.answer(messages, 24)
            assert answer.choices[0].message.content == text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(reference.chat(messages))
            assert answer.usage.completion_tokens == len(ids)
