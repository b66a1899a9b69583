"""How the weights of a model are stored, from its quantization_config."""

from dataclasses import dataclass
from typing import Any, Final

from model.architectures.values import unsupported, wrong
from protocol.short_repr import short_repr

_SUPPORTED: Final = (
    "weights in float32, bfloat16 or float16; fp8, fbgemm_fp8, modelopt and compressed-tensors in "
    "FP8 (e4m3, with a scale for each tensor, row or block); compressed-tensors (pack-quantized), "
    "awq (gemm) and gptq in 4 bits; mxfp4; GGUF files, dequantised at load; --quantization fp8"
)
_MODELOPT: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
AT_LOAD: Final = "fp8 at load"


@dataclass(frozen=True)
class Quantization:
    """How linear weights are quantised.

    Attributes:
        stored: "fp8", "packed" (compressed-tensors, 4 bits), "awq", "gptq", "mxfp4", or AT_LOAD,
            of weights that are stored as they are.
        block: rows and columns of a matrix in FP8 that share a scale; None: its scales tell.
        group: columns that share a scale in 4 bits; None: all.
        zero_offset: added to the zeros that files hold.
    """

    stored: str
    block: tuple[int, ...] | None = None
    group: int | None = None
    zero_offset: int = 0

    @property
    def bits(self) -> float:
        """Of an element, with its share of a scale and a zero, as they are kept."""
        if self.stored in ("fp8", AT_LOAD):
            return 8 + (32 / self.block[1] if self.block else 0)
        return 4 + (
            8 / 32 if self.stored == "mxfp4" else 24 / self.group if self.group else 0
        )


def parse_quantization(found: Any) -> Quantization | None:
    """None where weights are plain. Raises UnsupportedModel for those stored in another way."""
    if not found:
        return None
    if not isinstance(found, dict):
        raise unsupported(f"quantization_config {short_repr(found)}", _SUPPORTED)
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(found)
    if method in ("awq", "gptq"):
        return _of_four_bits(found, method)
    if method == "mxfp4":
        return Quantization("mxfp4")
    algorithm = found.get("quant_algo")
    of_kv = bool(found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"))
    if (
        method == "modelopt"
        and of_kv
        and not algorithm
        and not found.get("config_groups")
    ):
        return None
    is_known = method in ("fp8", "fbgemm_fp8")
    if not is_known and (method != "modelopt" or algorithm not in _MODELOPT):
        raise _refused(algorithm or method or found)
    return Quantization("fp8", block=_block(found.get("weight_block_size")))


def _refused(told: Any) -> Exception:
    return unsupported(f"quantization_config {short_repr(told)}", _SUPPORTED)


def _compressed(found: dict[str, Any]) -> Quantization | None:
    """Of the weights of all groups of layers, which are to be alike; in FP8 some may have a scale
    for each block, and others one for each row or one for all."""
    sparsity = (found.get("sparsity_config") or {}).get("format") or "dense"
    transforms = (found.get("transform_config") or {}).get("config_groups")
    if transforms or sparsity != "dense":
        raise _refused(
            f"compressed-tensors with {'transform_config' if transforms else sparsity}"
        )
    each_group = (found.get("config_groups") or {}).values()
    # A group of null weights is one of inputs alone.
    schemes = [
        weights
        for each in each_group
        if (weights := each.get("weights", {})) is not None
    ]
    kinds = {(each.get("type"), each.get("num_bits")) for each in schemes}
    if not kinds and found.get("kv_cache_scheme"):
        return None  # only a KV cache is
    groups = {each.get("group_size") for each in schemes}
    if kinds == {("float", 8)} and groups <= {None, -1}:
        blocks = (block for each in schemes if (block := each.get("block_structure")))
        return Quantization("fp8", block=_block(next(blocks, None)))
    if (
        kinds != {("int", 4)}
        or found.get("format") != "pack-quantized"
        or len(groups) > 1
    ):
        each = {
            f"{w.get('type')}{w.get('num_bits')} by {w.get('group_size')}"
            for w in schemes
        }
        told = f"compressed-tensors {found.get('format')} of {', '.join(sorted(each))}"
        raise _refused(told.replace(" by None", ""))
    return Quantization("packed", group=_group(groups.pop()))


def _of_four_bits(found: dict[str, Any], method: str) -> Quantization:
    older = (
        "version" if method == "awq" else "checkpoint_format"
    )  # transformers 5 says format
    version = str(found.get(older) or found.get("format") or "")
    known = ("", "gemm") if method == "awq" else ("", "gptq", "gptq_v2")
    if (
        bits := found.get("bits", found.get("w_bit"))
    ) != 4 or version.lower() not in known:
        raise _refused(
            f"{method} of {short_repr(bits)} bits{version and ', '}{version}"
        )
    if method == "awq" and not found.get("zero_point", True):
        raise _refused("awq without zero_point")
    group = _group(found.get("group_size", found.get("q_group_size", 128)))
    less = int(
        method == "gptq" and version.lower() != "gptq_v2"
    )  # as the first kind holds them
    return Quantization(method, group=group, zero_offset=less)


def _group(size: Any) -> int | None:
    return None if size in (None, -1) else _sizes("group_size", [size])[0]


def _block(block: Any) -> tuple[int, ...] | None:
    return None if block is None else _sizes("weight_block_size", block, 2)


def _sizes(name: str, found: Any, count: int = 1) -> tuple[int, ...]:
    if len(found) != count or any(
        not isinstance(size, int) or size < 1 for size in found
    ):
        raise wrong(
            f"{name} is {short_repr(found)}, expected {count} positive integers"
        )
    return tuple(found)
