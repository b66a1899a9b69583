"""Scales of FP8 KV: from checkpoints, from an option, and errors for invalid scales."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig, load_config, parse_config
from model.errors import UnsupportedModel
from model.files.kv_scales import InvalidScales, resolve_scales
from model.sizes import fingerprint
from tests.model.random_models import load, make
from tests.model.test_config import DEEPSEEK, LLAMA

LAYERS = 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make("LlamaForCausalLM", tmp_path)
    assert load_config(tmp_path).num_layers == LAYERS
    return tmp_path


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> ModelConfig:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return load_config(folder)


def make_scales(
    k: str, v: str, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns scales with the names `k` and `v`: 0.25 and 0.5 of layer 0, 1.25 and 1.5
    of layer 1.

    These numbers are exact in every dtype.
    """
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.full(
            shape, layer + part, dtype=dtype
        )
        for layer in range(LAYERS)
        for name, part in ((k, 0.25), (v, 0.5))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_a_checkpoint_are_read_and_are_not_unused_weights(
    checkpoint, k, v, shape, dtype
):
    plain = fingerprint(load_config(checkpoint), checkpoint)
    unused = {"model.layers.0.self_attn.q_scale": torch.tensor(2.0)}
    config = add(checkpoint, {**make_scales(k, v, shape, dtype), **unused})
    assert resolve_scales(None, config, checkpoint) == (0.25, 0.5, 1.25, 1.5)
    load(checkpoint)
    assert fingerprint(config, checkpoint) != plain


SHARED_SCALES = {
    f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5 + layer)
    for layer in range(LAYERS)
}


@pytest.mark.parametrize(
    ("tensors", "option", "expected"),
    [
        ({}, None, (1.0, 1.0, 1.0, 1.0)),
        (SHARED_SCALES, None, (0.5, 0.5, 1.5, 1.5)),  # one scale for keys and values
        (SHARED_SCALES, 0.25, (0.25, 0.25, 0.25, 0.25)),
        (SHARED_SCALES, {"k_scale": 0.5, "v_scale": 2}, (0.5, 2.0, 0.5, 2.0)),
        (
            SHARED_SCALES,
            {"k_scale": [0.5, 0.25], "v_scale": 2.0},
            (0.5, 2.0, 0.25, 2.0),
        ),
    ],
)
def test_option_overrides_checkpoint_and_the_default_is_1(
    checkpoint, tensors, option, expected
):
    config = add(checkpoint, tensors)
    file = checkpoint / "scales.json"
    file.write_text(json.dumps(option), encoding="utf-8")
    option_text = str(file) if isinstance(option, dict) else option and str(option)
    assert resolve_scales(option_text, config, checkpoint) == expected
    assert resolve_scales(None, config, "nowhere", load_format="dummy") == (1.0,) * 4


def test_latent_of_mla_has_one_scale(tmp_path):
    config = parse_config(DEEPSEEK)
    file = tmp_path / "scales.json"
    assert resolve_scales("0.5", config, tmp_path) == (0.5,) * config.num_layers
    file.write_text('{"k_scale": 1, "v_scale": 1}', encoding="utf-8")
    with pytest.raises(InvalidScales, match=r"object with k_scale$"):
        resolve_scales(str(file), config, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0", "0.0: a scale must be a finite number above 0"),
        ("-0.5", "above 0"),
        ("nan", "finite"),
        ("none.json", "none.json is neither a number nor a readable JSON file"),
        ({"k_scale": 1.0}, "k_scale and v_scale"),
        ([1.0, 1.0], "k_scale and v_scale"),
        ({"k_scale": [1.0] * 3, "v_scale": 1.0}, "k_scale has 3 numbers.*2 layers"),
        ({"k_scale": [1.0, True], "v_scale": 1.0}, "k_scale is true"),
        ({"k_scale": "x", "v_scale": 1.0}, 'k_scale is "x"'),
    ],
)
def test_invalid_option_is_refused_by_name(tmp_path, content, message):
    config = parse_config(LLAMA | {"num_hidden_layers": LAYERS})
    option = content
    if not isinstance(content, str):
        file = tmp_path / "scales.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        option = str(file)
    with pytest.raises(InvalidScales, match=message):
        resolve_scales(option, config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.layers.1.self_attn.v_scale": None},
            r"no model\.layers\.1\.self_attn\.v_scale",
        ),
        (
            {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)},
            r"0\.self_attn\.k_scale is -1",
        ),
        (
            {"model.layers.0.self_attn.k_scale": torch.ones(4)},
            r"shape \(4,\).*--kv-scales",
        ),
    ],
)
def test_checkpoint_with_invalid_scales_is_refused(checkpoint, changes, message):
    scales = {**make_scales("k_scale", "v_scale", (), torch.float32), **changes}
    config = add(checkpoint, {name: t for name, t in scales.items() if t is not None})
    with pytest.raises(InvalidScales, match=message):
        resolve_scales(None, config, checkpoint)


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"bits": 8},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_plain_weights_calibrated_for_fp8_kv_are_supported(quantization):
    assert parse_config(LLAMA | {"quantization_config": quantization}).num_layers
    quantised_weights = {**quantization, "config_groups": {"group_0": {}}}
    with pytest.raises(UnsupportedModel):
        parse_config(LLAMA | {"quantization_config": quantised_weights})
