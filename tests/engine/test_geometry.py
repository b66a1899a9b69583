"""Options that the model or the machine does not allow are refused before any rank
starts."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from attention.support import StepLimits, UnsupportedPool
from engine.config import EngineConfig
from engine.geometry import (
    InvalidGeometry,
    check_attention,
    check_geometry,
    check_staging,
    check_weights,
    step_limits,
)
from model.config import load_config, parse_config
from model.errors import InvalidParallelism, ModelLoadError
from model.sizes import implied_weights, weight_bytes
from tests.make_models import ensure_model
from tests.rigs.engines import make_config

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
_MODEL = parse_config({"architectures": ["LlamaForCausalLM"], **_SIZES, **_HEADS})
_LATENTS = {
    "num_attention_heads": 48,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
}
_LATENT_MODEL = parse_config(
    {"architectures": ["DeepseekV2ForCausalLM"], **_SIZES, **_LATENTS}
)
_CONFIG = make_config(role="decode")


def _config_with(**values: object) -> EngineConfig:
    return _CONFIG.model_copy(update=values)


@pytest.mark.parametrize(
    ("tp", "dcp", "heads"),
    [
        (1, 1, 4),
        (2, 1, 2),
        (4, 1, 1),
        (8, 1, 1),
        (2, 2, 4),
        (4, 2, 2),
        (8, 2, 1),
        (8, 8, 4),
    ],
)
def test_layout_has_the_heads_of_a_rank_or_of_ranks_that_share_tokens(tp, dcp, heads):
    config = _config_with(tp=tp, dcp=dcp, block_size=16, kv_layout="LBCNHD")
    layout = check_geometry(config, _MODEL)
    assert (layout.num_heads, layout.num_layers, layout.num_components) == (heads, 2, 2)
    assert (layout.order, layout.block_size, layout.head_dim) == ("LBCNHD", 16, 16)
    assert config.tokens_per_block == 16 * dcp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, r"--tp 3 .* 8 query heads; use 1 or 2 or 4 or 8"),
        (
            {"max_model_len": 513},
            "--max-model-len is 513 .* use --max-model-len 512 or less, .* with "
            "--hf-overrides",
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_with_values_that_do(
    options, message
):
    with pytest.raises((InvalidParallelism, InvalidGeometry), match=message):
        check_geometry(_config_with(**options), _MODEL)


def test_staging_memory_below_two_blocks_is_refused_with_the_required_size():
    config = _config_with(tp=2)
    layout = check_geometry(config, _MODEL)
    min_bytes = 2 * layout.block_bytes
    check_staging(config.model_copy(update={"staging_bytes": min_bytes}), layout)
    too_small = config.model_copy(update={"staging_bytes": min_bytes - 1})
    message = rf"--staging-bytes is {min_bytes - 1}.*bytes {min_bytes} "
    with pytest.raises(InvalidGeometry, match=message):
        check_staging(too_small, layout)


# -- models that the attention backend of a rank cannot serve --------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"head_dim of 16, only 64, 128, 256: use --attention-backend torch"),
        (
            {"dtype": "float32"},
            r"queries of float32 over KV of float32: use --dtype bfloat16",
        ),
        ({"device": "cpu", "attention_backend": "flashinfer"}, r"GPU memory only"),
    ],
)
def test_model_that_the_attention_backend_cannot_serve_is_refused(options, message):
    config = _config_with(**{"device": "cuda", "dtype": "bfloat16", **options})
    with pytest.raises(UnsupportedPool, match=message):
        check_attention(config, _MODEL)
    check_attention(config.model_copy(update={"attention_backend": "torch"}), _MODEL)


@pytest.mark.parametrize(
    ("tp", "dcp", "refused_heads"),
    [
        (1, 1, 48),
        (2, 1, 24),
        (3, 1, None),
        (3, 3, 48),
        (6, 1, None),
        (6, 2, None),
        (6, 3, 24),
    ],
)
def test_backend_is_checked_with_the_heads_of_a_rank_and_of_ranks_that_share_tokens(
    tp, dcp, refused_heads
):
    config = _config_with(device="cuda", dtype="bfloat16", tp=tp, dcp=dcp)
    if refused_heads is None:
        check_attention(config, _LATENT_MODEL)
        return
    with pytest.raises(UnsupportedPool, match=f"for {refused_heads} query heads"):
        check_attention(config, _LATENT_MODEL)


@pytest.mark.parametrize(
    ("options", "rank_limits", "group_limits"),
    [
        ({}, StepLimits(80, 2048, 512), StepLimits(80, 80, 0)),
        ({"max_num_batched_tokens": 8}, StepLimits(80, 80, 512), StepLimits(80, 80, 0)),
        ({"speculate": "off"}, StepLimits(64, 2048, 512), StepLimits(64, 64, 0)),
        (
            {"speculate": "ngram:4"},
            StepLimits(128, 2048, 512, has_proposals=True),
            StepLimits(128, 128, 0, has_proposals=True),
        ),
    ],
)
def test_step_limits_follow_from_the_options(options, rank_limits, group_limits):
    """Proposals need rows in addition to the rows of 64 sequences."""
    config = _config_with(**options)
    assert step_limits(config, _LATENT_MODEL, is_for_dcp_group=False) == rank_limits
    assert step_limits(config, _LATENT_MODEL, is_for_dcp_group=True) == group_limits


def test_steps_over_latents_that_are_too_large_for_a_plan_are_refused():
    config = _config_with(
        device="cuda", dtype="bfloat16", tp=3, max_num_batched_tokens=65536
    )
    check_attention(config, _LATENT_MODEL)
    with pytest.raises(
        UnsupportedPool, match=r"lower --max-num-batched-tokens or --max-num-seqs"
    ):
        check_attention(
            config.model_copy(update={"max_num_batched_tokens": 200_000}), _LATENT_MODEL
        )


def test_dummy_weights_that_exceed_the_memory_are_refused():
    config = _config_with(load_format="dummy")
    needed_bytes = 4 * weight_bytes(_MODEL, 1, keep_quantised=False)
    check_weights(config, _MODEL, needed_bytes)
    bfloat16 = _config_with(load_format="dummy", dtype="bfloat16")
    check_weights(bfloat16, _MODEL, needed_bytes // 2)
    message = r"take 0\.0 GiB in float32, .* use a smaller model"
    with pytest.raises(InvalidGeometry, match=message):
        check_weights(config, _MODEL, needed_bytes - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_absurd_size_in_config_json_is_refused_on_any_device(device):
    model = dataclasses.replace(_MODEL, vocab_size=10**12)
    message = (
        r"953,674\.3 GiB .*embed_tokens\.weight \(vocab_size 10{12} by "
        r".*correct config\.json"
    )
    with pytest.raises(InvalidGeometry, match=message):
        check_weights(_config_with(load_format="dummy", device=device), model)


def test_weights_in_files_take_memory_only_if_they_are_packed_or_converted():
    folder = ensure_model("gqa")
    model = load_config(folder)
    mapped = _config_with(model_dir=str(folder), pack_weights=False)
    check_weights(mapped, model, 0)
    with pytest.raises(InvalidGeometry, match="--no-pack-weights"):
        check_weights(_config_with(model_dir=str(folder)), model, 0)
    check_weights(
        _config_with(model_dir=str(folder)),
        model,
        4 * weight_bytes(model, 1, keep_quantised=False),
    )
    with pytest.raises(InvalidGeometry, match="use --dtype float32: files"):
        check_weights(_config_with(model_dir=str(folder), dtype="bfloat16"), model, 0)
    with pytest.raises(ModelLoadError, match="num_hidden_layers is 9, but"):
        check_weights(mapped, dataclasses.replace(model, num_layers=9))


def test_small_tensors_of_another_dtype_do_not_count_as_a_copy_of_the_weights(tmp_path):
    """For example, the scales of FP8 KV are small tensors of another dtype."""
    model = dataclasses.replace(_MODEL, num_layers=1)
    shapes = {
        weight.name: [size.value for size in weight.shape]
        for weight in implied_weights(model)
    }
    tensors = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    check_weights(_config_with(model_dir=str(tmp_path), dtype="bfloat16"), model, 4)
    with pytest.raises(InvalidGeometry, match="use --dtype bfloat16: files"):
        check_weights(_config_with(model_dir=str(tmp_path)), model, 4)
