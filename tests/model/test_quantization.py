"""Quantised weights: what files hold, what is made at load, and products by them."""

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
from model.moe import Experts
from model.parallel import Parallel
from model.quantization.quantized import Quantized, quantise, stacked
from model.quantization.stored import StoredWeights
from model.sizes import fingerprint, weight_bytes
from model.weights import WeightLoader
from tests.model.dense import DenseAttention
from tests.model.quantised_files import FORMATS, fp8, mxfp4, rewrite, save_plain
from tests.model.random_models import load, make

IDS = torch.arange(3, 19)
WIDE = {"intermediate_size": 192}  # of several groups for each of two ranks


def logits_of(model, ids: Tensor = IDS) -> Tensor:
    """[T, vocab]: of each token of a sequence."""
    with torch.inference_mode():
        at = torch.arange(len(ids), device=ids.device)
        return model.logits(
            model.forward(ids, at, DenseAttention(model.attention_spec))
        )


@pytest.fixture(params=FORMATS)
def quantised(request, tmp_path):
    """A checkpoint in each format, and its exact weights."""
    make(
        "Qwen2ForCausalLM", tmp_path, **WIDE
    )  # biases of q, k and v, and none of the others
    return tmp_path, rewrite(tmp_path, *FORMATS[request.param])


def test_a_quantised_model_is_the_plain_one_that_it_stands_for(
    quantised, tmp_path_factory
):
    folder, exact = quantised
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(folder, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(folder)), logits_of(load(plain)))
    assert (
        len({fingerprint(load_config(where), where) for where in (folder, plain)}) == 2
    )


def test_a_rank_s_part_of_a_quantised_weight_is_that_of_the_whole(quantised):
    folder, exact = quantised
    source = StoredWeights(read_headers(folder), load_config(folder).quantization)
    up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
    for part in (range(96), range(96, 192), range(36, 70)):
        rows = source.quantised(up, (192, 64), part)
        cols = source.quantised(down, (64, 192), range(64)).columns(part)
        both = [(rows, exact[up][part.start : part.stop]), (cols, exact[down][:, part])]
        for found, expected in both:
            assert found.shape == expected.shape
            torch.testing.assert_close(
                found.dequantise().double(), expected, rtol=1e-6, atol=0
            )
    with pytest.raises(ModelLoadError, match=r"q_proj.* shape "):
        source.quantised("model.layers.0.self_attn.q_proj.weight", (64, 128), range(64))


def scheme(strategy, **weights):
    return {
        "weights": {"type": "float", "num_bits": 8, "strategy": strategy, **weights}
    }


ROWS, BLOCKS = scheme("channel"), scheme("block", block_structure=[24, 40])
MX = scheme("group", group_size=32)
ACTIVATIONS = {"weights": None, "input_activations": {"type": "float", "num_bits": 8}}


@pytest.mark.parametrize(
    "groups", [(ROWS, BLOCKS), (BLOCKS, ROWS), (ACTIVATIONS, ROWS, BLOCKS)]
)
def test_groups_of_layers_in_fp8_may_have_scales_for_blocks_or_for_rows(
    tmp_path, tmp_path_factory, groups
):
    """As writers do that leave attention's weights by rows, or attention in FP8 a group itself."""
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    by_name = {f"group_{n}": group for n, group in enumerate(groups)}
    how = {"quant_method": "compressed-tensors", "config_groups": by_name}
    by_blocks, by_rows = fp8((24, 40), "_scale"), fp8((1, 999), "_scale")
    of_mlp = WIDE["intermediate_size"]
    exact = rewrite(
        tmp_path, how, lambda w: (by_blocks if of_mlp in w.shape else by_rows)(w)
    )
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(tmp_path, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load(plain)))


@pytest.mark.parametrize(("name", "key"), [
    ("fp8 rows", "compression_config"), ("packed", "compression_config"), ("fp8 tensors", "FP8"),
    ("fp8 rows", "FP8_PER_CHANNEL_PER_TOKEN"),
])  # fmt: skip
def test_how_weights_are_quantised_is_read_where_others_than_transformers_write_it(
    tmp_path, name, key
):
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    rewrite(tmp_path, *FORMATS[name])
    expected, wanted = load_config(tmp_path), logits_of(load(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    how = raw.pop("quantization_config")
    raw |= {key: how} if key == "compression_config" else {}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if key != "compression_config":  # as ModelOpt exports it
        found = {
            "quant_algo": key,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
        nested = {
            "producer": {"name": "modelopt", "version": "0.15.1"},
            "quantization": found,
        }
        modelopt = nested if key == "FP8" else found
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert load_config(tmp_path) == expected
    torch.testing.assert_close(logits_of(load(tmp_path)), wanted)
    if key == "FP8":
        found["quant_algo"] = "NVFP4"
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
        with pytest.raises(
            UnsupportedModel, match=r"NVFP4.*modelopt and compressed-tensors"
        ):
            load_config(tmp_path)


def test_what_is_missing_of_a_quantised_weight_is_named(quantised):
    folder, _ = quantised
    tensors = load_file(folder / "model.safetensors")
    of_up = "model.layers.0.mlp.up_proj"
    scale = next(
        n for n in tensors if n.startswith(of_up) and "scale" in n and "input" not in n
    )
    del tensors[scale]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"up_proj\.(weight is in FP8|.*scales? is missing)"
    ):
        load(folder)


@pytest.mark.parametrize(("scales", "told"), [
    (torch.tensor([1.0, 2.0, 3.0]), r" has \(3, 1\) scales, and not one for"),
    (torch.ones(192, 2, dtype=torch.uint8), r"weight_scale has dtype U8; supported: F64, F32"),
])  # fmt: skip
def test_scales_that_are_not_understood_are_told(tmp_path, scales, told):
    """Three of a fused matrix, say: which rows each is of, nobody tells; or exponents, as of MX."""
    make("Qwen2ForCausalLM", tmp_path, **WIDE)
    rewrite(tmp_path, *FORMATS["fp8 tensors"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"up_proj.*{told}"):
        load(tmp_path)


def test_gpt_oss_in_mxfp4_is_the_plain_model_that_it_stands_for(
    tmp_path, tmp_path_factory
):
    make("GptOssForCausalLM", tmp_path)
    exact = rewrite(tmp_path, {"quant_method": "mxfp4"}, mxfp4, of="_proj")
    plain = tmp_path_factory.mktemp("plain")
    shutil.copytree(tmp_path, plain, dirs_exist_ok=True)
    save_plain(plain, exact)
    torch.testing.assert_close(logits_of(load(tmp_path)), logits_of(load(plain)))


def quantised_parts(*heights: int, width: int = 64) -> list[Quantized]:
    return [quantise(torch.randn(height, width)) for height in heights]


def test_layers_multiply_by_what_stays_quantised_as_by_what_it_stands_for():
    parts, x = quantised_parts(48, 16, 32), torch.randn(5, 64)
    biases = [torch.randn(part.shape[0]) for part in parts]
    linears = [Linear(part, bias) for part, bias in zip(parts, biases, strict=True)]
    plain = [F.linear(x, p.dequantise(), b) for p, b in zip(parts, biases, strict=True)]
    for found, expected in zip(Columns(linears)(x), plain, strict=True):
        torch.testing.assert_close(found, expected)
    hidden = torch.randn(5, 48)
    expected = hidden + plain[0]
    found = RowParallelLinear(parts[0], biases[0], Parallel())(x, hidden)
    torch.testing.assert_close(found, expected)
    gate_up = stacked(4, iter(quantised_parts(64, 64, 64, 64)))
    down = stacked(4, iter(quantised_parts(64, 64, 64, 64, width=32)))
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized)
    weights, chosen = torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    found = Experts(gate_up, down)(x, weights, chosen)
    expected = Experts(gate_up.dequantise(), down.dequantise())(x, weights, chosen)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_rows_quantised_at_load_are_off_by_half_a_step_at_most(scale):
    weight = torch.randn(50, 96) * scale * torch.rand(50, 1)
    weight[7] = 0
    error = (quantise(weight).dequantise() - weight).abs()
    most = weight.abs().amax(1, keepdim=True)
    assert (
        error <= torch.maximum(weight.abs() * 2**-4, most * 2**-9 / 448) * 1.001
    ).all()


def test_weights_quantised_at_load_do_not_depend_on_how_many_ranks_share_them(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    config = load_config(tmp_path, quantization="fp8")
    source, how = StoredWeights(read_headers(tmp_path)), config.quantization
    loader = WeightLoader(source, dtype=torch.float32, device="cpu", quantization=how)
    name, shape = "model.layers.0.self_attn.o_proj.weight", (64, 64)
    whole = loader.matrix(name, shape)
    assert not torch.equal(whole, loader.load(name, shape))
    for half in (range(32), range(32, 64)):
        assert torch.equal(loader.matrix(name, shape, cols=half), whole[:, half])
        assert torch.equal(
            loader.matrix(name, shape, rows=half), whole[half.start : half.stop]
        )
    plain, ours = load(tmp_path), load_model(config, tmp_path, dtype=torch.float32)
    found, expected = logits_of(ours), logits_of(plain)
    assert 0.001 < (found - expected).norm() / expected.norm() < 0.1


def test_what_is_quantised_at_load_is_another_model_and_takes_fewer_bytes(tmp_path):
    make("LlamaForCausalLM", tmp_path)
    plain, ours = load_config(tmp_path), load_config(tmp_path, quantization="fp8")
    assert fingerprint(plain, tmp_path) != fingerprint(ours, tmp_path)
    vocabulary = 2 * 131 * 64
    linear = weight_bytes(plain, 1, keep_quantised=True) - vocabulary
    assert weight_bytes(ours, 2, keep_quantised=True) == linear + 2 * vocabulary
    assert weight_bytes(ours, 2, keep_quantised=False) == weight_bytes(
        plain, 2, keep_quantised=True
    )


def test_what_is_quantised_already_is_not_quantised_again(quantised):
    with pytest.raises(
        ModelLoadError,
        match=r"--quantization fp8: .*already stored quantised.*leave the option out",
    ):
        load_config(quantised[0], quantization="fp8")


def test_what_dequantised_weights_cost_is_in_the_log(quantised, caplog):
    load(quantised[0])
    told = (
        "dequantised at load (no kernel for torch.float32 on cpu): in float32 they take"
    )
    assert sum(told in line for line in caplog.messages) == 1


@pytest.mark.parametrize(("quantization", "told"), [
    ({"quant_method": "bitsandbytes"}, "bitsandbytes.*awq.*gptq.*mxfp4"),
    ({"quant_method": "gptq", "bits": 8}, "gptq of 8 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of 4 bits, gemv"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero_point"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size is \[0\]"),
    ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "awq of 4 bits, gemv"),
    ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int-quantized"),
    ({**FORMATS["fp8 rows"][0], "config_groups": {"MX": MX}}, "tensors None of float8 by 32"),
    ({**FORMATS["packed"][0], "format": "marlin-24"}, "tensors marlin-24 of int4 by 32"),
    ({**FORMATS["fp8 rows"][0], "transform_config": {"config_groups": {"R1": {}}}},
     "with transform_config"),
    ({**FORMATS["fp8 rows"][0], "sparsity_config": {"format": "sparse-24-bitmask"}},
     "compressed-tensors with sparse-24-bitmask"),
])  # fmt: skip
def test_other_quantised_weights_are_refused_by_name(tmp_path, quantization, told):
    make("LlamaForCausalLM", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "quantization_config": quantization})
    )
    with pytest.raises(ValueError, match=told):
        load_config(tmp_path)
