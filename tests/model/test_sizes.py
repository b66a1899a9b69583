"""A model has the sizes that its config implies. If files contradict the config, an
error names the field.
"""

import json
import math

import pytest
import torch

from model.config import load_config, parse_config
from model.decoder import load_model
from model.errors import ModelLoadError
from model.sizes import check_files, implied_weights, largest_group, weight_bytes
from model.weights import DummySource
from tests.model.random_models import make
from tests.model.test_config import DEEPSEEK, LLAMA, V3

BLOCK = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MODELS = [
    LLAMA,
    {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    {**DEEPSEEK, "num_hidden_layers": 3},
    {**DEEPSEEK, "q_lora_rank": 20, "first_k_dense_replace": 0},
    {**DEEPSEEK, "n_routed_experts": None},
    {**DEEPSEEK, **V3, "n_shared_experts": None},
    {**LLAMA, "architectures": ["Phi3ForCausalLM"]},
    {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], **BLOCK},
    {**LLAMA, "architectures": ["MixtralForCausalLM"], **BLOCK},
    {**LLAMA, "architectures": ["GptOssForCausalLM"], **BLOCK},
    {
        **LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 5,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
        "mlp_only_layers": [1, 2, 9],
    },
]  # fmt: skip


@pytest.mark.parametrize("raw", _MODELS)
def test_model_loads_the_matrices_that_its_config_implies(raw, monkeypatch):
    loaded: dict[str, tuple[int, ...]] = {}
    make_part = DummySource.part

    def part(self, name, shape, rows, cols):
        loaded[name] = shape
        return make_part(self, name, shape, rows, cols)

    monkeypatch.setattr(DummySource, "part", part)
    config = parse_config(raw)
    load_model(config, "", dtype=torch.float32, load_format="dummy")
    matrices = {name: shape for name, shape in loaded.items() if len(shape) > 1}
    assert sum(map(math.prod, matrices.values())) == weight_bytes(
        config, 1, keep_quantised=False
    )
    for group in implied_weights(config):
        assert matrices[group.name] == tuple(size.value for size in group.shape)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for architecture, options in (
        ("LlamaForCausalLM", {}),
        ("DeepseekV2ForCausalLM", {}),
    ):
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make(architecture, made[architecture], shard="100KB", **options)
    return made


@pytest.mark.parametrize(
    ("architecture", "field", "message"),
    [
        (
            "LlamaForCausalLM",
            "vocab_size",
            r"vocab_size is 10{12}, but model\.embed_.* 131 rows",
        ),
        (
            "LlamaForCausalLM",
            "hidden_size",
            r"hidden_size is 10{12}, .* has 64 columns in ",
        ),
        (
            "LlamaForCausalLM",
            "num_hidden_layers",
            r"is 10{12}, but the files in .* have weights of 2 layers: correct",
        ),
        (
            "LlamaForCausalLM",
            "intermediate_size",
            r"intermediate_size is 10{12}, .*96 rows",
        ),
        (
            "LlamaForCausalLM",
            "head_dim",
            r"_heads 8 x head_dim 10{12} is 80{12}, .*q_proj",
        ),
        (
            "LlamaForCausalLM",
            "num_attention_heads",
            r"num_attention_heads 10{12} x head_dim 8 is",
        ),
        (
            "DeepseekV2ForCausalLM",
            "kv_lora_rank",
            r"\(kv_lora_rank 10{12} \+ qk_rope_head_dim 8\)",
        ),
        (
            "DeepseekV2ForCausalLM",
            "qk_nope_head_dim",
            r"\(qk_nope_head_dim 10{12} \+ v_head_dim",
        ),
        (
            "DeepseekV2ForCausalLM",
            "n_routed_experts",
            r"n_routed_experts is 10{12}, .* 8 rows",
        ),
        (
            "DeepseekV2ForCausalLM",
            "n_shared_experts",
            r" 24 x n_shared_experts 10{12} is",
        ),
    ],
)
def test_field_that_the_files_contradict_is_named(
    folders, architecture, field, message
):
    folder = folders[architecture]
    check_files(load_config(folder), folder)
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=rf"^config\.json: .*{message}"):
        check_files(parse_config({**raw, field: 10**12}), folder)


def test_largest_group_of_matrices_is_described_with_its_fields():
    config = parse_config({**LLAMA, "num_hidden_layers": 10**12})
    assert str(largest_group(config)) == (
        "model.layers.0.mlp.gate_proj.weight (intermediate_size 96 by hidden_size 64) "
        "in each of num_hidden_layers 1000000000000"
    )
    assert weight_bytes(config, 1, keep_quantised=False) > 96 * 64 * 3 * 10**12


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"data_offsets": [0], "shape": [], "dtype": ""}}',
        b'{"a": {"data_offsets": [0, 0], "shape": ["x"], "dtype": ""}}',
        b'{"a": {"data_offsets": [0, 0], "shape": [], "dtype": []}}',
    ],
)
def test_invalid_safetensors_header_is_refused(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="is not a safetensors file"):
        check_files(parse_config(LLAMA), tmp_path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(
        ModelLoadError, match=r"is not a safetensors file: .*Git LFS .*git lfs pull"
    ):
        check_files(parse_config(LLAMA), tmp_path)
