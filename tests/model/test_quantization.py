"""Quantised weights: formats of files, quantisation at load, and products."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import load_config
from model.decoder import load_model
from model.errors import ModelLoadError, UnsupportedModel
from model.files.safetensors_files import read_headers
from model.layers import Columns, Linear, RowParallelLinear
from model.mixture.experts import Experts
from model.parallel import Parallel
from model.quantization.packed_fp4 import pack
from model.quantization.quantized import Quantized, quantise, stacked
from model.quantization.stored import StoredWeights
from model.sizes import fingerprint, weight_bytes
from model.weights import WeightLoader
from tests.model.dense import DenseAttention
from tests.model.quantised_files import FORMATS, fp8_writer, mxfp4, rewrite, save_plain
from tests.model.random_models import load, make

IDS = torch.arange(3, 19)
# This size is so large that each of two ranks has several quantisation groups.
WIDE = {"intermediate_size": 192}


def logits_of(model, ids: Tensor = IDS) -> Tensor:
    """Returns the logits of each token of a sequence, [T, vocab]."""
    with torch.inference_mode():
        positions = torch.arange(len(ids), device=ids.device)
        attention = DenseAttention(model.attention_spec)
        return model.logits(model.forward(ids, positions, attention))


@pytest.fixture(params=FORMATS)
def quantised(request, tmp_path):
    """A checkpoint in each format, and its exact weights."""
    # Qwen2 has biases, but only of q, k and v.
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    return tmp_path, rewrite(tmp_path, *FORMATS[request.param])


def test_quantised_model_computes_the_logits_of_its_exact_weights(
    quantised, tmp_path_factory
):
    folder, exact = quantised
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(folder)), logits_of(load(plain)))
    assert fingerprint(load_config(folder), folder) != fingerprint(
        load_config(plain), plain
    )


def test_part_of_a_quantised_weight_equals_that_part_of_the_exact_weight(quantised):
    folder, exact = quantised
    source = StoredWeights(read_headers(folder), load_config(folder).quantization)
    up = "model.layers.0.mlp.up_proj.weight"
    down = "model.layers.0.mlp.down_proj.weight"
    for part in (range(96), range(96, 192), range(36, 70)):
        rows = source.quantised(up, (192, 64), part)
        cols = source.quantised(down, (64, 192), range(64)).columns(part)
        for weight, expected in (
            (rows, exact[up][part.start : part.stop]),
            (cols, exact[down][:, part]),
        ):
            assert weight.shape == expected.shape
            torch.testing.assert_close(
                weight.dequantise().double(), expected, rtol=1e-6, atol=0
            )
    with pytest.raises(ModelLoadError, match=r"q_proj.* shape "):
        source.quantised("model.layers.0.self_attn.q_proj.weight", (64, 128), range(64))


def scheme(strategy, **weights):
    return {
        "weights": {"type": "float", "num_bits": 8, "strategy": strategy, **weights}
    }


ROWS = scheme("channel")
BLOCKS = scheme("block", block_structure=[24, 40])
MX = scheme("group", group_size=32)
ACTIVATIONS = {"weights": None, "input_activations": {"type": "float", "num_bits": 8}}


@pytest.mark.parametrize(
    "groups", [(ROWS, BLOCKS), (BLOCKS, ROWS), (ACTIVATIONS, ROWS, BLOCKS)]
)
def test_groups_of_layers_in_fp8_may_have_scales_for_blocks_or_for_rows(
    tmp_path, tmp_path_factory, groups
):
    """Some writers scale attention weights by rows, and all other weights by blocks.

    Some writers also add a group that quantizes only activations.
    """
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    config_groups = {f"group_{n}": group for n, group in enumerate(groups)}
    config = {"quant_method": "compressed-tensors", "config_groups": config_groups}
    write_blocks = fp8_writer((24, 40), "_scale")
    write_rows = fp8_writer((1, 999), "_scale")

    def write(weight):
        is_mlp = WIDE["intermediate_size"] in weight.shape
        return write_blocks(weight) if is_mlp else write_rows(weight)

    exact = rewrite(tmp_path, config, write)
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(tmp_path, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load(plain)))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fp8 rows", "compression_config"),
        ("packed", "compression_config"),
        ("fp8 tensors", "FP8"),
        ("fp8 rows", "FP8_PER_CHANNEL_PER_TOKEN"),
    ],
)
def test_quantization_configs_of_other_writers_are_read(tmp_path, name, key):
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    rewrite(tmp_path, *FORMATS[name])
    expected_config = load_config(tmp_path)
    expected_logits = logits_of(load(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    quantization_config = raw.pop("quantization_config")
    if key == "compression_config":
        raw[key] = quantization_config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    # ModelOpt writes the configuration to a separate file.
    if key != "compression_config":
        modelopt_config = {
            "quant_algo": key,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
        nested = {
            "producer": {"name": "modelopt", "version": "0.15.1"},
            "quantization": modelopt_config,
        }
        modelopt = nested if key == "FP8" else modelopt_config
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert load_config(tmp_path) == expected_config
    torch.testing.assert_close(logits_of(load(tmp_path)), expected_logits)
    if key == "FP8":
        modelopt_config["quant_algo"] = "NVFP4"
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
        with pytest.raises(
            UnsupportedModel, match=r"NVFP4.*modelopt and compressed-tensors"
        ):
            load_config(tmp_path)


def test_missing_scale_of_a_quantised_weight_is_named(quantised):
    folder, _ = quantised
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.mlp.up_proj"
    scale = next(
        name
        for name in tensors
        if name.startswith(prefix) and "scale" in name and "input" not in name
    )
    del tensors[scale]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"up_proj\.(weight is in FP8|.*scales? is missing)"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            torch.tensor([1.0, 2.0, 3.0]),
            r" scales of shape \(3, 1\); expected one scale for",
        ),
        (
            torch.ones(192, 2, dtype=torch.uint8),
            r"weight_scale has dtype U8; supported: F64, F32",
        ),
    ],
)
def test_scales_of_unknown_meaning_are_refused(tmp_path, scales, message):
    """It is unknown to which rows of a fused matrix three scales belong. Stored
    exponents are not scales.
    """
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    rewrite(tmp_path, *FORMATS["fp8 tensors"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"up_proj.*{message}"):
        load(tmp_path)


def test_gpt_oss_in_mxfp4_computes_the_logits_of_its_exact_weights(
    tmp_path, tmp_path_factory
):
    make("GptOssForCausalLM", tmp_path)
    exact = rewrite(tmp_path, {"quant_method": "mxfp4"}, mxfp4, suffix="_proj")
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(tmp_path, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load(plain)))


def quantised_parts(*heights: int, width: int = 64) -> list[Quantized]:
    return [quantise(torch.randn(height, width)) for height in heights]


def test_layers_multiply_by_quantised_as_by_dequantised_weights():
    parts = quantised_parts(48, 16, 32)
    x = torch.randn(5, 64)
    biases = [torch.randn(part.shape[0]) for part in parts]
    linears = [Linear(part, bias) for part, bias in zip(parts, biases, strict=True)]
    plain = [
        F.linear(x, part.dequantise(), bias)
        for part, bias in zip(parts, biases, strict=True)
    ]
    for output, expected in zip(Columns(linears)(x), plain, strict=True):
        torch.testing.assert_close(output, expected)
    hidden = torch.randn(5, 48)
    expected = hidden + plain[0]
    output = RowParallelLinear(parts[0], biases[0], Parallel())(x, hidden)
    torch.testing.assert_close(output, expected)
    gate_up = stacked(4, iter(quantised_parts(64, 64, 64, 64)))
    down = stacked(4, iter(quantised_parts(64, 64, 64, 64, width=32)))
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized)
    weights = torch.rand(5, 2)
    chosen = torch.randint(0, 4, (5, 2))
    output = Experts(gate_up, down)(x, weights, chosen)
    expected = Experts(gate_up.dequantise(), down.dequantise())(x, weights, chosen)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_rows_quantised_at_load_have_errors_within_half_a_step(scale):
    weight = torch.randn(50, 96) * scale * torch.rand(50, 1)
    weight[7] = 0
    error = (quantise(weight).dequantise() - weight).abs()
    row_max = weight.abs().amax(1, keepdim=True)
    half_step = torch.maximum(weight.abs() * 2**-4, row_max * 2**-9 / 448)
    assert (error <= half_step * 1.001).all()


def test_weights_quantised_at_load_are_independent_of_the_number_of_ranks(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    config = load_config(tmp_path, quantization="fp8")
    loader = WeightLoader(
        StoredWeights(read_headers(tmp_path)),
        dtype=torch.float32,
        device="cpu",
        quantization=config.quantization,
    )
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = (64, 64)
    matrix = loader.matrix(name, shape)
    assert not torch.equal(matrix, loader.load(name, shape))
    for half in (range(32), range(32, 64)):
        assert torch.equal(loader.matrix(name, shape, cols=half), matrix[:, half])
        assert torch.equal(
            loader.matrix(name, shape, rows=half), matrix[half.start : half.stop]
        )
    expected = logits_of(load(tmp_path))
    logits = logits_of(load_model(config, tmp_path, dtype=torch.float32))
    assert 0.001 < (logits - expected).norm() / expected.norm() < 0.1


def test_model_quantised_at_load_has_another_fingerprint_and_fewer_bytes(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    plain = load_config(tmp_path)
    quantised_config = load_config(tmp_path, quantization="fp8")
    assert fingerprint(plain, tmp_path) != fingerprint(quantised_config, tmp_path)
    vocabulary = 2 * 131 * 64
    linear = weight_bytes(plain, 1, keep_quantised=True) - vocabulary
    assert (
        weight_bytes(quantised_config, 2, keep_quantised=True)
        == linear + 2 * vocabulary
    )
    assert weight_bytes(quantised_config, 2, keep_quantised=False) == weight_bytes(
        plain, 2, keep_quantised=True
    )


def test_stored_quantised_weights_are_not_quantised_again(quantised):
    with pytest.raises(
        ModelLoadError,
        match=r"--quantization fp8: .*already stored quantised.*leave the option out",
    ):
        load_config(quantised[0], quantization="fp8")


def test_memory_of_dequantised_weights_is_logged(quantised, caplog):
    load(quantised[0])
    message = (
        "dequantised at load (no kernel for torch.float32 on cpu): in float32 they take"
    )
    assert sum(message in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes.*awq.*gptq.*mxfp4"),
        ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of 4 bits, gemv"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero_point"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size is \[0\]"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "awq of 4 bits, gemv"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized"},
            "int-quantized",
        ),
        (
            {**FORMATS["fp8 rows"][0], "config_groups": {"MX": MX}},
            "tensors None of float8 by 32",
        ),
        (
            {**FORMATS["packed"][0], "format": "marlin-24"},
            "tensors marlin-24 of int4 by 32",
        ),
        (
            {
                **FORMATS["fp8 rows"][0],
                "transform_config": {"config_groups": {"R1": {}}},
            },
            "with transform_config",
        ),
        (
            {
                **FORMATS["fp8 rows"][0],
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "compressed-tensors with sparse-24-bitmask",
        ),
    ],
)
def test_unsupported_quantization_is_refused_by_name(tmp_path, quantization, message):
    make("LlamaForCausalLM", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "quantization_config": quantization})
    )
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize(("num_rows", "width"), [(6, 64), (64, 256), (130, 320)])
def test_packed_mxfp4_words_hold_the_bits_of_bfloat16_numbers(num_rows, width):
    """Shifts and masks of a word give its numbers, divided by 2^126, in the documented
    order.
    """
    codes = torch.randint(0, 256, (2, num_rows, width // 2), dtype=torch.uint8)
    scales = torch.full((2, num_rows, width // 32), 127, dtype=torch.uint8)
    weight = Quantized(codes, scales, None, "fp4", 32, torch.bfloat16)
    packed = pack(weight)
    # Blocks are [experts, blocks of rows, blocks of columns, row, word]; `words` is
    # [experts, out, chunk, thread, half of the chunk's columns].
    rows = packed.words.transpose(2, 3).flatten(3).flatten(1, 2)
    words = rows.view(2, len(rows[0]), -1, 4, 2).long() & 0xFFFFFFFF
    numbers = torch.zeros(*words.shape[:3], 2, 2, 2, 4, 2, dtype=torch.bfloat16)
    rotated = words >> 6 | words << 26
    registers = (
        words & 0x81C081C0,
        words << 6 & 0x81C081C0,
        rotated & 0x81C081C0,
        words << 4 & 0x81808180 | words >> 4 & 0x00400040,
    )
    for register, bits in enumerate(registers):
        for upper_half in range(2):
            half_word = bits >> 16 * upper_half & 0xFFFF
            signed = torch.where(half_word > 0x7FFF, half_word - 0x10000, half_word)
            values = signed.to(torch.int16).view(torch.bfloat16)
            # `numbers` is [experts, out, chunk, w, half, upper, thread, b] (see
            # packed_fp4.py).
            place = numbers[:, :, :, :, register >> 1, register & 1, :, upper_half]
            place.copy_(values.transpose(-1, -2))
    actual = numbers.flatten(2).float() * 2.0**126
    assert packed.shape == (2, num_rows, width)
    assert torch.equal(actual[:, :num_rows, :width], weight.dequantise().float())
    assert not actual[..., width:].any(), "the padding is not zero"
    assert not actual[:, num_rows:].any(), "the padding is not zero"
    scales = packed.scales.transpose(2, 3).flatten(3).flatten(1, 2)
    assert torch.equal(scales[:, :num_rows, : width // 32], weight.scales)
