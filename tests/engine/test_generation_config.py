"""Request fields default to values of generation_config.json, else to OpenAI's."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.generation_config import read_generation_config
from engine.prepare import warn_of_unknown_eos
from engine.text.tokenizer import Tokenizer
from model.errors import ModelLoadError
from protocol.openai.sampling import GenerationConfig
from tests.engine.test_tokenizer import write_byte_level
from tests.rigs.http_server import CONTEXT, READY, serving, text_script

LARGE_VOCABULARY = replace(READY, vocab_size=4096)

FILE_CONTENT = {
    "eos_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "repetition_penalty": 1,
    "max_new_tokens": 9,
    "transformers_version": "5.0.0",
}


def write_and_read(folder: Path, content: Any) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_generation_config(folder)


def test_generation_config_sets_defaults_of_request_fields(tmp_path):
    assert read_generation_config(tmp_path).model_fields_set == set()
    defaults_in_file = write_and_read(tmp_path, FILE_CONTENT).model_dump(
        exclude_unset=True
    )
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
    assert defaults_in_file == {name: FILE_CONTENT[name] for name in names}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, "`temperature` is -1; it must be a number from 0 to 2."),
        (
            {"temperature": True},
            "`temperature` is true; it must be a number from 0 to 2.",
        ),
        ({"temperature": float("inf")}, "`temperature` is Infinity; it must be"),
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0; it must be an integer from 1"),
        ([], "attribute"),
    ],
)
def test_invalid_value_is_refused_at_start(tmp_path, content, message):
    with pytest.raises(ModelLoadError) as refused:
        write_and_read(tmp_path, content)
    error_text = str(refused.value)
    assert message in error_text and "generation_config.json" in error_text
    assert "--generation-config none" in error_text


@pytest.mark.parametrize(
    ("content", "used"),
    [
        ({"temperature": 3}, {"temperature": 3}),
        ({"repetition_penalty": 200.5}, {"repetition_penalty": 200.5}),
        ({"top_p": 1.5}, {"top_p": 1}),  # 1 is no limit
        # With top_p 0, only the most likely token may be drawn.
        ({"top_p": 0, "top_k": 5}, {"top_p": 1e-6, "top_k": 5}),
        ({"top_k": 1 << 40}, {"top_k": (1 << 31) - 1}),
        ({"max_new_tokens": 1 << 40}, {"max_new_tokens": (1 << 31) - 1}),
    ],
)
def test_value_beyond_request_limits_is_served_with_a_warning(
    tmp_path, caplog, content, used
):
    """The values have the same effect as in transformers."""
    config = write_and_read(tmp_path, content)
    assert config.model_dump(exclude_unset=True) == used
    name = next(iter(content))
    assert f"`{name}` is {content[name]}" in caplog.text


async def test_end_token_beyond_the_vocabulary_still_allows_grammars(tmp_path, caplog):
    write_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 99_999]})
    )
    tokenizer = Tokenizer(tmp_path)
    warn_of_unknown_eos(tokenizer)
    assert "generation_config.json" in caplog.text and "99999" in caplog.text
    script = text_script(tokenizer, "1")
    async with serving(tokenizer, script, ready=LARGE_VOCABULARY) as server:
        response = await server.post(guided_regex="[0-9]")
        assert response.status_code == 200, response.text
        assert server.engine.added[0].stop_token_ids == [5]


async def test_request_fields_override_defaults_at_every_endpoint(tokenizer, tmp_path):
    config = write_and_read(tmp_path, FILE_CONTENT)
    async with serving(tokenizer, config=config) as server:
        text = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "max_tokens": 3}
        await server.post()
        await server.post(**text)
        await server.chat()
        await server.chat(**text)
        request = {"prompt": None, "input": "Hi"}
        answer = (await server.post("/v1/responses", **request)).json()
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
        await server.post("/v1/responses", **request, temperature=0)
        used_values = [
            (
                add.sampling.temperature,
                add.sampling.top_p,
                add.sampling.top_k,
                add.max_tokens,
            )
            for add in server.engine.added
        ]
    defaults = (0.6, 0.95, 20, 9)
    from_client = (0.0, 1.0, 20, 3)
    assert used_values == [
        defaults,
        from_client,
        defaults,
        from_client,
        defaults,
        (0.0, 0.95, 20, 9),
    ]


async def test_context_bounds_the_models_limit(tokenizer):
    config = GenerationConfig(max_new_tokens=1000)
    async with serving(tokenizer, config=config) as server:
        assert (await server.post()).status_code == 200
        assert [add.max_tokens for add in server.engine.added] == [CONTEXT - 2]
