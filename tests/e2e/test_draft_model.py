"""Servers with a draft model give the answers of servers without one."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.make_models import ensure_model
from tests.rigs.cluster import assert_idle, start_decode, started
from tests.rigs.drafting_requests import REQUESTS, answers

_MAX_TOKENS = 200


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param((), id="one rank"),
        pytest.param(("--tp", "2"), id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_a_draft_model(tiny_model: Path, argv) -> None:
    """The draft model is as slow as the target model, so proposals do not pay off.
    The server still proposes a few tokens, to find out whether that has changed."""
    option = f"model:{ensure_model('gqa6')}:4"
    start = partial(start_decode, tiny_model)
    with started(start, partial(start, "--speculate", option, *argv)) as servers:
        plain, drafting = servers
        num_accepted = 0
        num_rejected = 0
        for options in REQUESTS:
            texts, *counts = answers(drafting.url, options, _MAX_TOKENS)
            assert texts == answers(plain.url, options, _MAX_TOKENS)[0]
            num_accepted += counts[0]
            num_rejected += counts[1]
        metrics = drafting.metrics()
        for outcome, count in (
            ("proposed", num_accepted + num_rejected),
            ("accepted", num_accepted),
        ):
            name = f'baton_speculative_{outcome}_tokens_total{{drafter="model"}}'
            assert metrics[name] == count
        assert num_accepted + num_rejected > 0
        assert_idle(*servers)


def test_missing_draft_model_is_refused_at_the_start(tiny_model: Path) -> None:
    with pytest.raises(AssertionError, match="no/such/model is not a directory"):
        start_decode(tiny_model, "--speculate", "model:no/such/model:4")


def test_draft_model_of_another_vocabulary_is_refused_at_the_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(ensure_model("gqa6"), folder)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|end|>"))
    with pytest.raises(AssertionError, match="has a different vocabulary from"):
        start_decode(tiny_model, "--speculate", f"model:{folder}:4")
