"""Writers of quantized checkpoints in each format. Each writer also returns the exact
weights.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.quantization.quantized import Quantized, quantise

GROUP = 32
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# The result of a writer for a weight [out, in]: the stored tensors by name suffix, and
# the exact weight that they represent, in float64.
Written = tuple[dict[str, Tensor], Tensor]


def in_groups(weight: Tensor, size: int) -> Quantized:
    """Quantises [n, out, in] to FP8 with a scale for every `size` columns of a row."""
    weight_groups = quantise(weight.unflatten(2, (-1, size)).flatten(1, 2))
    height = weight.shape[1]
    codes = weight_groups.codes.unflatten(1, (height, -1)).flatten(2)
    scales = weight_groups.scales.unflatten(1, (height, -1)).flatten(2)
    return replace(weight_groups, codes=codes, scales=scales, group=size)


def pack_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs codes of 4 bits [n, 8 m] to int32 [n, m].

    Args:
        order: the indices of the codes in a word, from the lowest bits to the highest.
    """
    parts = codes.view(len(codes), -1, 8)[:, :, list(order)].long()
    packed_words = sum(parts[:, :, place] << 4 * place for place in range(8))
    return (packed_words - (packed_words >> 31 << 32)).to(torch.int32)


def fp8_writer(block: tuple[int, int], suffix: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        height, width = weight.shape
        block_height = min(block[0], height)
        block_width = min(block[1], width)
        scales = torch.rand([-(-height // block_height), -(-width // block_width)])
        row = torch.arange(height) // block_height
        col = torch.arange(width) // block_width
        codes = weight.to(torch.float8_e4m3fn)
        has_single_scale = scales.numel() == 1
        tensors = {
            ".weight": codes,
            f".weight{suffix}": scales.view(()) if has_single_scale else scales,
            ".input_scale": torch.ones(()),
        }
        return tensors, codes.double() * scales.double()[row[:, None], col]

    return write


def _random_int4(
    weight: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns random codes, scales and zero points by row and group, and the exact
    weight.
    """
    height, width = weight.shape
    codes = torch.randint(0, 16, (height, width))
    scales = torch.rand(height, width // GROUP).mul(0.03).half()  # weights around 0.1
    zeros = torch.randint(1, 16, scales.shape)
    index = torch.arange(width) // GROUP if index is None else index
    exact = (codes - zeros[:, index]).double() * scales.double()[:, index]
    return codes, scales, zeros, exact


def packed_writer(*, has_zeros: bool) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        codes, scales, zeros, exact = _random_int4(weight)
        tensors = {
            ".weight_packed": pack_words(codes),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors[".weight_zero_point"] = (
                pack_words(zeros.t().contiguous()).t().contiguous()
            )
        else:
            exact = (codes - 8).double() * scales.double().repeat_interleave(GROUP, 1)
        return tensors, exact

    return write


def awq(weight: Tensor) -> Written:
    codes, scales, zeros, exact = _random_int4(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": pack_words(codes.t().contiguous(), order),
        ".qzeros": pack_words(zeros.t().contiguous(), order),
        ".scales": scales.t().contiguous(),
    }
    return tensors, exact


def gptq_writer(
    *, zero_offset: int, shuffles: bool = False
) -> Callable[[Tensor], Written]:
    """Returns a writer of the GPTQ format.

    Args:
        zero_offset: number that is subtracted from zero points before they are stored.
        shuffles: whether the columns of a group are scattered.
    """

    def write(weight: Tensor) -> Written:
        index = torch.arange(weight.shape[1]) // GROUP
        index = index[torch.randperm(len(index))] if shuffles else index
        codes, scales, zeros, exact = _random_int4(weight, index)
        tensors = {
            ".qweight": pack_words(codes).t().contiguous(),
            ".qzeros": pack_words((zeros - zero_offset).t().contiguous()),
            ".scales": scales.t().contiguous(),
            ".g_idx": index.int(),
            ".bias": torch.zeros(len(weight)).half(),
        }
        return tensors, exact

    return write


def mxfp4(weight: Tensor) -> Written:
    """Writes experts that are given as [experts, in, out].

    This is the order of unquantized experts in files.
    """
    codes = torch.randint(0, 16, weight.mT.shape)
    scales = torch.randint(118, 125, (*codes.shape[:-1], codes.shape[-1] // 32))
    factors = 2.0 ** (scales.double() - 127).repeat_interleave(32, -1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).byte()
    tensors = {"_blocks": blocks.unflatten(-1, (-1, 16)), "_scales": scales.byte()}
    return tensors, (torch.tensor(FP4).double()[codes] * factors).mT


_FP8_GROUPS = {
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}}
}
_INT4_GROUPS = {
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": GROUP}}
    },
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
# The quantization_config and the writer of each format.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 40]},
        fp8_writer((24, 40), "_scale_inv"),
    ),
    "fp8 rows": (
        {"quant_method": "compressed-tensors", **_FP8_GROUPS},
        fp8_writer((1, 999), "_scale"),
    ),
    "fp8 tensors": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8_writer((999, 999), "_scale"),
    ),
    "packed": (
        {"quant_method": "compressed-tensors", **_INT4_GROUPS},
        packed_writer(has_zeros=False),
    ),
    "packed with zeros": (
        {"quant_method": "compressed-tensors", **_INT4_GROUPS},
        packed_writer(has_zeros=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        awq,
    ),
    "gptq": (_GPTQ, gptq_writer(zero_offset=1)),
    "gptq version 2": (
        {**_GPTQ, "checkpoint_format": "gptq_v2"},
        gptq_writer(zero_offset=0),
    ),
    "gptq of transformers 5": (
        {**_GPTQ, "format": "gptq_v2"},
        gptq_writer(zero_offset=0),
    ),
    "gptq with shuffled columns": (
        {**_GPTQ, "desc_act": True},
        gptq_writer(zero_offset=1, shuffles=True),
    ),
}


def rewrite(
    folder: Path,
    config: dict[str, Any],
    write: Callable[[Tensor], Written],
    suffix: str = "_proj.weight",
) -> dict[str, Tensor]:
    """Quantises all weights of a checkpoint with names that end in `suffix`.

    The attention weights of layer 1 stay unquantised.

    Returns:
        All exact weights, by their names in an unquantised checkpoint.
    """
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = exact[name] = weight
        if name.endswith(suffix) and "layers.1.self_attn" not in name:
            tensors, exact[name] = write(weight)
            del stored[name]
            for end, part in tensors.items():
                stored.setdefault(name.removesuffix(".weight") + end, part)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**raw, "quantization_config": config})
    )
    save_file(
        {name: part.contiguous() for name, part in stored.items()},
        folder / "model.safetensors",
    )
    return exact


def save_plain(
    folder: Path, exact: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Replaces a checkpoint with an unquantised one that has the weights `exact`."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw))
    plain = {name: weight.to(dtype).contiguous() for name, weight in exact.items()}
    save_file(plain, folder / "model.safetensors")
