"""Converted GGUF files equal the models and tokenizers that the files were made
from.
"""

import json

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from deploy import models
from model.config import load_config
from model.errors import ModelLoadError, ModelNotAvailable, UnsupportedModel
from model.files.gguf import convert_gguf
from model.hub import resolve_model
from tests.model.random_models import SIZES, load, make
from tests.model.test_against_transformers import LLAMA3, check_equal

BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", "Ċ", *BYTES][: 131 - len(MERGES)]
TOKENS += [merge.replace(" ", "") for merge in MERGES]
TEMPLATES = [
    {"name": name, "template": f"of {name}"} for name in ("default", "tool_use")
]
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a q or k projection, as llama.cpp's converter does for Llama
    models.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path,
    reference,
    architecture="llama",
    *,
    extra=(),
    pre="smollm",
    factors=None,
    files=1,
    ends=(),
):
    """Writes a transformers model as llama.cpp's converter does."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_uint16("split.count", files)
    write_vocabulary(writer, pre)
    for name, token_id in ends:
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in reference.named_parameters():
        value = parameter.detach().numpy()
        if architecture == "llama" and (kind := name.split(".")[-2]) in heads:
            value = permute(value, heads[kind])
        writer.add_tensor(gguf_name(name), value)
    for name, value in extra:
        writer.add_tensor(name, value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(writer, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATES)


def convert(path, target):
    target.mkdir()
    convert_gguf(path, target, lambda line: None)
    return load(target)


@pytest.mark.parametrize(
    "architecture, kind, options",
    [
        ("LlamaForCausalLM", "llama", {"head_dim": 8}),
        ("LlamaForCausalLM", "llama", {"head_dim": 8, "tie_word_embeddings": True}),
        ("Qwen2ForCausalLM", "qwen2", {"head_dim": 8}),
        ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    ],
)
def test_converted_model_equals_its_original(architecture, kind, options, tmp_path):
    reference = make(architecture, tmp_path / "hf", **options)
    write_gguf(tmp_path / "m.gguf", reference, kind)
    check_equal(convert(tmp_path / "m.gguf", tmp_path / "out"), reference, num_tokens=8)


def llama3_factors(head_dim: int) -> np.ndarray:
    """Returns rope_freqs as llama.cpp's converter computes them."""
    factors = []
    for inverse in 500000.0 ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / inverse
        smooth = (8192 / wavelength - 1) / 3
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(8.0)
        else:
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_is_recovered_from_its_factors(tmp_path):
    rope = {**LLAMA3, "original_max_position_embeddings": 8192}
    options = {
        "head_dim": 32,
        "rope_parameters": rope,
        "max_position_embeddings": 16384,
    }
    reference = make("LlamaForCausalLM", tmp_path / "hf", **options)
    write_gguf(tmp_path / "m.gguf", reference, factors=llama3_factors(32))
    model = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert model.config.rope.rope_type == "llama3" and model.config.rope.factor == 8.0
    check_equal(model, reference, num_tokens=8)
    write_gguf(tmp_path / "odd.gguf", reference, factors=np.full(16, 3.0, np.float32))
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        convert(tmp_path / "odd.gguf", tmp_path / "odd")


def test_tokenizer_splits_and_joins_as_the_original(tmp_path):
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    write_gguf(tmp_path / "m.gguf", reference)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("<s>hello w12\n</s>")
    # Each digit must be a separate token.
    assert encoded.tokens == ["<s>", "hello", "Ġw", "1", "2", "Ċ", "</s>"]
    assert (
        tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<s>hello w12\n</s>"
    )
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("</s>", "<s>")
    assert config["chat_template"] == TEMPLATES
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


@pytest.mark.parametrize(("pre", "prefix"), [("llama-bpe", ["<s>"]), ("smollm", [])])
def test_llama3_text_begins_with_bos_and_all_end_of_turn_tokens_are_listed(
    pre, prefix, tmp_path, monkeypatch
):
    """GGUF files of Llama 3 do not state that a text begins with the bos token.

    These files also do not list all tokens that end a turn.
    """
    monkeypatch.setattr(
        "tests.model.test_gguf.TOKENS", [*TOKENS[:-2], "<|eot_id|>", "<|eom_id|>"]
    )
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    monkeypatch.setattr("tests.model.test_gguf.MERGES", MERGES[:1])
    write_gguf(tmp_path / "m.gguf", reference, pre=pre)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("he").tokens == [*prefix, "he"]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, len(TOKENS) - 2, len(TOKENS) - 1]


def test_end_of_turn_and_end_of_message_tokens_end_a_generation(tmp_path):
    """In GGUF files of Llama 3, turns and texts end with different tokens."""
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    write_gguf(tmp_path / "m.gguf", reference, ends=[("eot", 4), ("eom", 3)])
    convert(tmp_path / "m.gguf", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 3, 4]


def test_special_tokens_outside_of_the_vocabulary_are_ignored(tmp_path):
    """llama.cpp also ignores such tokens."""
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    token_ids = [
        ("padding", 100_000),
        ("unknown", len(TOKENS)),
        ("eot", 4),
        ("eom", 1 << 31),
    ]
    write_gguf(tmp_path / "m.gguf", reference, ends=token_ids)
    lines: list[str] = []
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", lines.append)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([2, 4], None)
    progress = "\n".join(lines)
    assert "tokenizer.ggml.padding_token_id is 100000" in progress
    assert "eom" in progress
    assert "eot" not in progress


def test_end_of_turn_token_is_used_without_an_end_of_text_token(tmp_path, monkeypatch):
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_eos_token_id", lambda writer, token_id: None
    )
    write_gguf(tmp_path / "m.gguf", reference, ends=[("eot", 4)])
    convert(tmp_path / "m.gguf", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [4]


def test_unsupported_gguf_files_are_refused(tmp_path):
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    write_gguf(tmp_path / "gemma.gguf", reference, "gemma2")
    with pytest.raises(UnsupportedModel, match=r"gemma2.*llama, qwen2, qwen3"):
        convert(tmp_path / "gemma.gguf", tmp_path / "a")
    write_gguf(tmp_path / "split.gguf", reference, pre="tekken")
    with pytest.raises(UnsupportedModel, match=r"tekken.*smollm"):
        convert(tmp_path / "split.gguf", tmp_path / "b")
    extra = [("blk.0.attn_sinks.weight", np.zeros(8, np.float32))]
    write_gguf(tmp_path / "extra.gguf", reference, extra=extra)
    with pytest.raises(ModelLoadError, match="attn_sinks"):
        convert(tmp_path / "extra.gguf", tmp_path / "c")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path / "d")
    wide = [("blk.0.attn_q.bias", np.zeros(64))]
    write_gguf(tmp_path / "wide.gguf", reference, extra=wide)
    with pytest.raises(ModelLoadError, match=r"wide\.gguf is .*Dequantization for F64"):
        convert(tmp_path / "wide.gguf", tmp_path / "e")
    write_gguf(tmp_path / "first.gguf", reference, files=3)
    with pytest.raises(
        UnsupportedModel, match=r"one of 3 files .*llama-gguf-split --merge"
    ):
        convert(tmp_path / "first.gguf", tmp_path / "f")


def test_gguf_file_and_its_directory_resolve_to_the_same_conversion(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "model.gguf"
    write_gguf(path, reference)
    progress_lines: list[str] = []
    folder = resolve_model(str(path), progress=progress_lines.append)
    assert progress_lines and load_config(folder).vocab_size == SIZES["vocab_size"]
    assert resolve_model(str(path.parent), progress=pytest.fail) == folder
    write_gguf(tmp_path / "m" / "other.gguf", reference)
    with pytest.raises(ModelNotAvailable, match=r"model\.gguf, other\.gguf"):
        resolve_model(str(path.parent))


def test_conversion_that_cannot_be_stored_is_one_line_with_the_fix(
    tmp_path, monkeypatch, capsys
):
    reference = make("LlamaForCausalLM", tmp_path / "hf", head_dim=8)
    path = tmp_path / "model.gguf"
    write_gguf(path, reference)
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setenv("BATON_CACHE", str(no_folder))
    capsys.readouterr()  # the progress bars of the files above
    assert models.main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("baton models: error: cannot store a converted")
    assert captured.err.count("\n") == 1 and "BATON_CACHE" in captured.err
