"""Fixtures of the engine's tests."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.text.grammar import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from protocol.messages import Grammar
from tests.make_models import ensure_model

# The parts of gpt-oss's chat template that determine answers. Like the original, this
# template refuses some messages and omits others.
HARMONY_TEMPLATE = """
{{- "<|start|>system<|message|>Reasoning: " }}
{{- (reasoning_effort or "medium") + "<|end|>" }}
{%- set has_system = messages[0].role in ["developer", "system"] %}
{%- if has_system or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if has_system %}{{ messages[0].content }}{% endif %}
    {%- if tools %}{{ "namespace functions " + tools | tojson }}{% endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set turns = messages[1:] if has_system else messages %}
{%- set called = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set later = namespace(is_final=false) %}
        {%- for after in turns[loop.index:] %}
            {%- if after.role == "assistant" and "tool_calls" not in after %}
                {%- set later.is_final = true %}
            {%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking") }}
        {%- elif (message.content or message.thinking) and not later.is_final %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name }}
        {{- "<|channel|>commentary json<|message|>" + call.arguments | tojson + "<|call|>" }}
        {%- set called.name = call.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
        {%- set called.name = none %}
    {%- elif message.role == "tool" %}
        {%- if called.name is none %}
            {{- raise_exception("no tool call before") }}
        {%- endif %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary" }}
        {{- "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""  # noqa: E501


def _make_byte_tokenizer(
    folder: Path, special: Sequence[str], **config: Any
) -> Tokenizer:
    """Returns a tokenizer with one token per byte, and the given special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*special])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte, and <end>."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    return _make_byte_tokenizer(
        folder, ["<end>"], eos_token="<end>", chat_template=template
    )


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token per byte, gpt-oss's tags and HARMONY_TEMPLATE."""
    folder = tmp_path_factory.mktemp("harmony")
    tags = "return constrain channel start end message call".split()
    names = [f"<|{tag}|>" for tag in tags]
    ends = {"eos_token_id": [256, 262]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return _make_byte_tokenizer(
        folder, names, eos_token=names[0], chat_template=HARMONY_TEMPLATE
    )


@pytest.fixture(params=[0, 1])
def depth(request: pytest.FixtureRequest) -> int:
    """Number of steps that may be unfinished when the next step is launched."""
    return int(request.param)


@contextmanager
def compiling(*compiled: Grammar) -> Iterator[GrammarCompiler]:
    """Yields a compiler of the tiny model (512 logits) with these compiled grammars."""
    compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    for grammar in compiled:
        compiler.compile(grammar).exception()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with compiling() as made:
        yield made


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Limits the assumed block size of other servers to 8 tokens, because the sequences
    in these tests are short."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("core.tables", "worker.memory"):
            patch.setattr(f"engine.{module}.MAX_BLOCK_SIZE_TOKENS", 8)
        yield
