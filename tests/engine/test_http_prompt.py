"""Where in its echo a prompt's tokens begin."""

from pathlib import Path

import pytest

from engine.http.choice import PromptGeneration
from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest
from protocol.openai.completions import parse_completion
from tests.engine.test_tokenizer import write_sentencepiece_like


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_sentencepiece_like(tmp_path)  # puts <s> and a space before every text
    return Tokenizer(tmp_path)


def offsets(tokenizer: Tokenizer, given: str) -> list[tuple[str, int]]:
    """Tokens of the echo of `given`, and where they begin."""
    asked = parse_completion({"model": "m", "prompt": given, "echo": True, "logprobs": 0})
    ids = tokenizer.encode(given)
    add = AddRequest(request_id="r", token_ids=ids, sampling=asked.sampling(0), max_tokens=1)
    prompt = PromptGeneration(asked, add, given, tokenizer)
    prompt.add_logprobs([None] * len(ids))
    text, reports = prompt.echo()
    assert text == given and reports is not None
    return [(report.token.text, report.offset) for report in reports]


def test_what_the_tokenizer_puts_before_a_text_takes_no_room(tokenizer: Tokenizer) -> None:
    found = offsets(tokenizer, "Hi é")
    assert found[0] == ("<s>", 0)
    assert all("Hi é"[at:].startswith(token.lstrip()) for token, at in found[1:] if token[0] != "b")


@pytest.mark.parametrize(
    ("given", "begins"), [("Hi <s> it", [0, 0, 0, 1, 2, 3]), ("<s> it", [0, 0, 3])]
)
def test_nor_where_the_text_names_special_tokens_itself(
    tokenizer: Tokenizer, given: str, begins: list[int]
) -> None:
    """What such a text decodes to differs from it by a space."""
    assert not tokenizer.decode_all(tokenizer.encode(given)).endswith(given)
    found = offsets(tokenizer, given)
    assert [at for _, at in found][: len(begins)] == begins
    assert [token for token, _ in found].count("<s>") == 2
