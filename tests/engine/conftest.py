"""Fixtures of the engine's tests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.text.grammar import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from protocol.messages import Grammar
from tests.make_models import ensure_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and <end>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    config = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


@pytest.fixture(params=[0, 1])
def depth(request: pytest.FixtureRequest) -> int:
    """Whether a step may be under way while the next one is planned and launched."""
    return int(request.param)


@contextmanager
def compiling(*compiled: Grammar) -> Iterator[GrammarCompiler]:
    """For the tiny model, whose logits are 512 wide; it has compiled these."""
    compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    for grammar in compiled:
        compiler.compiled(grammar).exception()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiling() as made:
        yield made


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Other servers' blocks have fewer tokens than sequences here, as they do elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("core.tables", "worker.memory"):
            patch.setattr(f"engine.{module}.MAX_BLOCK_SIZE_TOKENS", 8)
        yield
