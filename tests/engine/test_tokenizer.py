"""The tokenizer and the chat template agree with transformers on the same directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.text.chat_template import BrokenTemplate, ChatTemplate
from engine.text.grammar_compile import build_vocabulary
from engine.text.tokenizer import Tokenizer, TokenizerNotFound
from protocol.errors import InvalidRequest
from tests.make_models import trained_models

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|begin|>system\\nBe brief. ' + strftime_now('%Y') + '<|end|>' }}
    {%- endif %}
    {{- '<|begin|>' + message['role'] + '\\n' + message['content'] + '<|end|>' + '\\n' }}
    {%- if message.name is defined %}{{ message | tojson }}{% endif %}
    {% if loop.last %}{% continue %}{% endif %}
    {% generation %}{% if loop.index == 2 %}{{ bos_token }}{% endif %}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}
"""  # noqa: E501

TEXTS = [
    "Hello world", "  two  spaces\n\n\ttab 12345 x=3.14",
    "Ünïcödé 你好 🙂👩‍👩‍👧 e\u0301",
    "<|begin|>user\nhi<|end|> <extra>x", "</s> x <s>", "a" * 300, "",
]  # fmt: skip
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'Hi "you" <b>&'}],
    [
        {"role": "system", "content": "Sys"},
        {"role": "user", "content": " a ", "name": "Zoë <i>"},
        {"role": "assistant", "content": "yo\n"},
        {"role": "user", "content": "<|end|>"},
    ],
]


def train(
    tokenizer: tokenizers.Tokenizer, special: list[str], alphabet: list[str]
) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, he said hello world"] * 5, trainer
    )


def write_byte_level(folder: Path) -> None:
    """Write a tokenizer like Llama 3's and Qwen's: byte-level, with ChatML."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, ["<|begin|>", "<|end|>"], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_tokens(["<extra>", "ß→"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "pad_token": "<|pad|>",  # only tokenizer_config.json has this token
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentencepiece_style(folder: Path) -> None:
    """Write a tokenizer like Llama 2's: ▁ for spaces, byte tokens, a leading <s>."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = ["<unk>", "<s>", "</s>"]
    train(tokenizer, special + [f"<0x{byte:02X}>" for byte in range(256)], [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    saved = json.loads(tokenizer.to_str())
    # The trainer made the byte tokens special. In released models, byte tokens are
    # ordinary tokens.
    saved["added_tokens"] = [
        token for token in saved["added_tokens"] if token["content"] in special
    ]
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


MAKERS = {
    "byte-level": write_byte_level,
    "sentencepiece-like": write_sentencepiece_style,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, write in MAKERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        write(folders[name])
    return folders


def assert_equal_to_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    if ours.chat_template is None:
        return
    for messages in CHATS:
        text = ours.render_chat(messages)
        assert text == theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert ours.encode(
            text, add_special_tokens=False
        ) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


@pytest.mark.parametrize("name", [*MAKERS, *trained_models()])
def test_result_equals_transformers(folders, name):
    assert_equal_to_transformers({**folders, **trained_models()}[name])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "unit",
    [
        "the cat sat, ",
        " ",
        "hello",
        "0",
        "<|end|>",
        "<extra>",
        "e\u0301",
        "你",
        "🙂",
        "\r\n",
    ],
)
def test_lower_bound_never_exceeds_the_token_count(folders, name, unit):
    tokenizer = Tokenizer(folders[name])
    text = unit * (100_000 // len(unit))
    count = len(tokenizer.encode(text))
    for limit in (0, count // 3, count - 1, count):
        bound = tokenizer.min_num_tokens(text, limit)
        assert (limit < bound <= count) if limit <= count // 3 else bound == 0


@pytest.mark.parametrize("name", MAKERS)
def test_many_ids_decode_the_same_as_few(folders, name):
    tokenizer = Tokenizer(folders[name])
    few = tokenizer.encode("Hello, wörld! ")
    text = tokenizer.decode_all(few * 3)
    many = few * 3000
    assert tokenizer.decode_all(many) == tokenizer._tokenizer.decode(many, False)
    assert tokenizer.decode_all(many).startswith(text)


def test_byte_table_agrees_with_decode(folders):
    tokenizer = Tokenizer(folders["byte-level"])
    assert tokenizer.token_bytes is not None
    for token_id in range(tokenizer.vocab_size):
        if token_id not in tokenizer.special_ids:
            text = tokenizer.token_bytes[token_id].decode("utf-8", "replace")
            assert text == tokenizer.decode([token_id]), token_id


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("byte-level", "<|end|>", "<|end|>"),
        ("byte-level", "ß→", "ß→"),
        # This tokenizer adds a space before each text.
        ("sentencepiece-like", "the cat</s>", " the cat</s>"),
    ],
)
def test_token_is_shown_by_its_text(folders, kind, text, shown):
    tokenizer = Tokenizer(folders[kind])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(tokenizer.token_text(i).text for i in ids) == shown


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-like"])
def test_part_of_a_character_is_shown_by_its_bytes(folders, kind):
    tokenizer = Tokenizer(folders[kind])
    shown = [
        tokenizer.token_text(i) for i in tokenizer.encode("€", add_special_tokens=False)
    ]
    raw = b"".join(token.raw for token in shown)
    assert raw.decode().strip() == "€"
    parts = [token.text for token in shown if token.text.startswith("bytes:")]
    assert parts[-2:] == [r"bytes:\x82", r"bytes:\xac"]


# -- end of sequence -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, None, None),
    ],
)
def test_eos_comes_from_the_file_with_the_highest_precedence(
    tmp_path, generation, config, expected
):
    write_byte_level(tmp_path)
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == (expected or tuple(tokenizer.encode("<|end|>")))


@pytest.mark.parametrize(
    ("config", "eos", "expected", "unknown"),
    [
        ({"vocab_size": 300}, [5, 300], (5,), (300,)),
        ({"vocab_size": 300}, 100_000, (), (100_000,)),
        # The id 99,999 is in the padding of the model's vocabulary.
        ({"vocab_size": 100_000}, [5, 5, 99_999], (5, 99_999), ()),
        ({"text_config": {"vocab_size": 300}}, [-1, 5], (5,), (-1,)),
        # Without `vocab_size`, the limit is the size of the tokenizer's vocabulary.
        ({}, [5, 1 << 40], (5,), (1 << 40,)),
    ],
)
def test_end_tokens_beyond_the_models_vocabulary_are_left_out(
    tmp_path, config, eos, expected, unknown
):
    write_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.unknown_eos_ids) == (expected, unknown)
    vocabulary = build_vocabulary(tokenizer)  # raises for ids beyond the vocabulary
    assert vocabulary.eos_token == 5 or not expected


def test_end_token_that_only_the_tokenizer_has_is_left_out(tmp_path):
    """The token is added after the vocabulary, so the model has no logit for it."""
    write_byte_level(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    saved["eos_token"] = "<|other end|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(saved))
    (added_id,) = Tokenizer(tmp_path).eos_ids
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": added_id}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.unknown_eos_ids) == ((), (added_id,))


def test_given_chat_template_replaces_the_models(tmp_path):
    write_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own")
    other = tmp_path / "other"
    other.write_text("{{ messages[0].content }}!")
    tokenizer = Tokenizer(tmp_path, other)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert tokenizer.digest != Tokenizer(tmp_path).digest
    (tmp_path / "chat_template.jinja").write_bytes(other.read_bytes())
    assert tokenizer.digest == Tokenizer(tmp_path).digest
    other.write_text("a\n{% if %}")
    with pytest.raises(
        BrokenTemplate, match=r"other cannot be read: .* line 2; correct"
    ):
        Tokenizer(tmp_path, other)
    with pytest.raises(BrokenTemplate, match="gone cannot be read: No such file"):
        Tokenizer(tmp_path, tmp_path / "gone")


# -- missing or broken files -----------------------------------------------------------

_CONFIG = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("tokenizer.json", None, TokenizerNotFound,
         r"found: tekken\.json, tokenizer\.model\); .*same vocabulary.*"
         r"save_pretrained"),
        ("tokenizer.json", "{", TokenizerNotFound, r"tokenizer\.json"),
        (_CONFIG, "{", TokenizerNotFound, r"tokenizer_config\.json"),
        ("config.json", {"eos_token_id": "</s>"}, TokenizerNotFound,
         r'config\.json is "</s>", expected a token id'),
        ("config.json", {"eos_token_id": [1, None]}, TokenizerNotFound,
         r"config\.json is \[1, null\], expected a token id"),
        (_CONFIG, {"chat_template": "a\n{% for"}, BrokenTemplate,
         r"tokenizer_config\.json cannot be read: .*unexpected .*, line 2; correct"),
        (_CONFIG, {"chat_template": "{{ x | nope }}"}, BrokenTemplate,
         "No filter named 'nope'"),
        (_CONFIG, {"chat_template": [{"name": "default"}]}, BrokenTemplate,
         "KeyError: 'template'"),
        ("additional_chat_templates/tool_use.jinja", "{% for", BrokenTemplate,
         r"tool_use\.jinja cannot be read: .*unexpected .*, line 1; correct"),
        ("chat_template.json", "{}", BrokenTemplate,
         r"template\.json cannot be read: .*'chat_template'"),
        *[(_CONFIG, {"added_tokens_decoder": tokens}, TokenizerNotFound,
           r"tokenizer_config\.json has a token with a value of the wrong type")
          for tokens in ({"x": {"content": "a"}}, {"1": {}}, {"1": None}, [1])],
    ],
)  # fmt: skip
def test_missing_or_broken_files_are_named(tmp_path, name, content, error, message):
    write_byte_level(tmp_path)
    for vocabulary in ("tekken.json", "tokenizer.model"):
        (tmp_path / vocabulary).write_bytes(b"x")
    if content is None:
        (tmp_path / name).unlink()
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # This file is read if the tokenizer's other files have no template.
    if name == "chat_template.json":
        (tmp_path / _CONFIG).unlink()
    with pytest.raises(error, match=message):
        Tokenizer(tmp_path)


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path):
    write_byte_level(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("q" * 50)) == 50
    assert len(Tokenizer(tmp_path).encode("q")) == 1


# -- templates -------------------------------------------------------------------------


def render(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source).render(messages, {"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # This template drops the message's text.
        ("{{ messages[0].role }}", "continue_final_message"),
        (None, "no chat template"),
        ("{{ raise_exception('Roles must alternate') }}", "must alternate"),
    ],
)
def test_template_refusal_has_a_message_for_the_client(tmp_path, template, message):
    write_byte_level(tmp_path)
    (tmp_path / _CONFIG).write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match=message):
        tokenizer.render_chat(messages, continue_final_message=True)


_SEVERAL = [
    {"name": n, "template": f"config's {n}"} for n in ("tool_use", "rag", "default")
]
_TOOL_USE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("listed", "files"),
    [
        (_SEVERAL, {}),
        (_SEVERAL[1:], {}),
        (_SEVERAL, {"chat_template.jinja": "a file"}),
        (_SEVERAL, {"chat_template.json": '{"chat_template": "not this"}'}),
        (
            "one",
            {"chat_template.jinja": "a file", _TOOL_USE: "{{ tools | length }} tools"},
        ),
        (None, {"chat_template.json": '{"chat_template": "a processor\'s"}'}),
    ],
)
def test_template_choice_equals_transformers(tmp_path, listed, files):
    write_byte_level(tmp_path)
    config = json.loads((tmp_path / _CONFIG).read_text())
    (tmp_path / _CONFIG).write_text(json.dumps({**config, "chat_template": listed}))
    (tmp_path / _TOOL_USE).parent.mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        actual = ours.render_chat(messages, tools=tools)
        if listed is None:  # AutoTokenizer does not read chat_template.json
            assert actual == "a processor's"
        else:
            assert actual == theirs.apply_chat_template(
                messages, tools=tools, tokenize=False
            )


@pytest.mark.parametrize("content", ["Well, ", "Well,", " a b "])
@pytest.mark.parametrize("strips", [False, True])
def test_message_is_continued_as_transformers_does(tmp_path, content, strips):
    write_byte_level(tmp_path)
    path = tmp_path / "chat_template.jinja"
    shown = "m.content | trim" if strips else "m.content"
    path.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ " + shown + " }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{{ shout }}{{ bos_token }}"
    )
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content},
    ]
    variables = {"shout": True, "bos_token": "<b>"}  # replaces the model's bos_token
    for options in (
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
    ):
        actual = ours.render_chat(messages, **options, variables=variables)
        assert actual == theirs.apply_chat_template(
            messages, tokenize=False, **options, **variables
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_template_cannot_leave_its_sandbox_nor_crash_the_server(source):
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source, {"role": "user", "content": ""})


def test_developer_message_is_a_system_message_for_templates_without_that_role():
    message = {"role": "developer", "content": ""}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{# developer #}{{ messages[0].role }}", message) == "developer"
    assert message["role"] == "developer"


def test_date_in_a_prompt_does_not_depend_on_the_time_zone_of_the_server():
    assert render("{{ strftime_now('%z') }}") == "+0000"
