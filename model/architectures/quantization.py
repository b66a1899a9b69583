"""How the weights of a model are stored, from its quantization_config."""

from typing import Any

from model.architectures.values import unsupported, wrong
from protocol.short_repr import short_repr

_SUPPORTED = (
    "weights in float32, bfloat16, float16 or FP8 (e4m3, with a scale for each tensor, row or "
    "block), and GGUF files, dequantised at load"
)


def parse_block(quantization: Any) -> tuple[int, int] | None:
    """Rows and columns of a matrix in FP8 that share a scale; None where its scales tell, or
    weights are plain.

    Raises:
        UnsupportedModel: weights are stored in another way.
    """
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise unsupported(f"quantization_config {short_repr(quantization)}", _SUPPORTED)
    found, block = quantization, quantization.get("weight_block_size")
    method, algorithm = found.get("quant_method"), found.get("quant_algo")
    of_kv = bool(found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"))
    groups = found.get("config_groups") or {}
    if method == "compressed-tensors":
        weights = [each.get("weights") or {} for each in groups.values()]
        is_known = all((each.get("type"), each.get("num_bits")) == ("float", 8) for each in weights)
        is_known &= bool(weights) or of_kv
        block = next((each.get("block_structure") for each in weights), None)
    else:
        of_modelopt = algorithm == "FP8" or (of_kv and not algorithm and not groups)
        is_known = method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and of_modelopt)
    if not is_known:
        told = short_repr(algorithm or method or found)
        raise unsupported(f"quantization_config {told}", _SUPPORTED)
    if block is None:
        return None
    if len(block) != 2 or any(not isinstance(size, int) or size < 1 for size in block):
        raise wrong(f"weight_block_size is {short_repr(block)}, expected two positive integers")
    return block[0], block[1]
