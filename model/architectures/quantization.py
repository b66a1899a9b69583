"""How the weights of a model are stored, according to its quantization_config."""

from dataclasses import dataclass
from typing import Any, Final

from model.architectures.values import config_error, unsupported_error
from protocol.short_repr import short_repr

_SUPPORTED: Final = (
    "weights in float32, bfloat16 or float16; fp8, fbgemm_fp8, modelopt and "
    "compressed-tensors in FP8 (e4m3, with a scale for each tensor, row or block); "
    "compressed-tensors (pack-quantized), awq (gemm) and gptq in 4 bits; mxfp4; "
    "GGUF files, dequantised at load; --quantization fp8"
)
_MODELOPT_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
AT_LOAD: Final = "fp8 at load"


@dataclass(frozen=True)
class Quantization:
    """How linear weights are quantised.

    Attributes:
        stored: "fp8", "packed" (compressed-tensors, 4 bits), "awq", "gptq", "mxfp4", or
            AT_LOAD. AT_LOAD means that the files hold plain weights, which are
            quantised to FP8 while they are loaded.
        block: numbers of rows and of columns of an FP8 matrix that share a scale. None:
            there is one scale per row or per tensor, as the files' scales show.
        group: number of columns that share a scale in 4-bit formats. None: all columns.
        zero_offset: number that is added to the zero points in the files.
    """

    stored: str
    block: tuple[int, ...] | None = None
    group: int | None = None
    zero_offset: int = 0

    @property
    def bits(self) -> float:
        """Bits of one element in memory, including its share of scales and zero points.

        Scales per row or per tensor are negligible and not counted.
        """
        if self.stored in ("fp8", AT_LOAD):
            return 8 + (32 / self.block[1] if self.block else 0)
        if self.stored == "mxfp4":
            return 4 + 8 / 32
        return 4 + (24 / self.group if self.group else 0)


def parse_quantization(raw: Any) -> Quantization | None:
    """Reads a quantization_config. Returns None if the weights are plain.

    Raises:
        UnsupportedModel: the weights are stored in a format that is not implemented.
        ModelLoadError: a block or group size is not a positive integer.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise unsupported_error(f"quantization_config {short_repr(raw)}", _SUPPORTED)
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        return _parse_compressed_tensors(raw)
    if method in ("awq", "gptq"):
        return _parse_four_bits(raw, method)
    if method == "mxfp4":
        return Quantization("mxfp4")
    algorithm = raw.get("quant_algo")
    if method == "modelopt" and not algorithm and not raw.get("config_groups"):
        if raw.get("kv_cache_scheme") or raw.get("kv_cache_quant_algo"):
            return None  # only the KV cache is quantised
    is_modelopt_fp8 = method == "modelopt" and algorithm in _MODELOPT_ALGORITHMS
    if method not in ("fp8", "fbgemm_fp8") and not is_modelopt_fp8:
        raise _unsupported_format(algorithm or method or raw)
    return Quantization("fp8", block=_parse_block_shape(raw.get("weight_block_size")))


def _unsupported_format(description: Any) -> Exception:
    return unsupported_error(
        f"quantization_config {short_repr(description)}", _SUPPORTED
    )


def _parse_compressed_tensors(raw: dict[str, Any]) -> Quantization | None:
    """Reads the config of compressed-tensors.

    The weights of all groups of layers must have the same format. In FP8, the shape of
    the scales (for each block, row or tensor) may differ between groups of layers.
    """
    sparsity = (raw.get("sparsity_config") or {}).get("format") or "dense"
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise _unsupported_format("compressed-tensors with transform_config")
    if sparsity != "dense":
        raise _unsupported_format(f"compressed-tensors with {sparsity}")
    # A group of layers with `weights` null has quantised inputs, but plain weights.
    schemes = []
    for config_group in (raw.get("config_groups") or {}).values():
        weights = config_group.get("weights", {})
        if weights is not None:
            schemes.append(weights)
    kinds = {(scheme.get("type"), scheme.get("num_bits")) for scheme in schemes}
    if not kinds and raw.get("kv_cache_scheme"):
        return None  # only the KV cache is quantised
    group_sizes = {scheme.get("group_size") for scheme in schemes}
    if kinds == {("float", 8)} and group_sizes <= {None, -1}:
        blocks = [scheme.get("block_structure") for scheme in schemes]
        blocks = [block for block in blocks if block]
        block = _parse_block_shape(blocks[0] if blocks else None)
        return Quantization("fp8", block=block)
    is_packed = raw.get("format") == "pack-quantized"
    if kinds != {("int", 4)} or not is_packed or len(group_sizes) > 1:
        descriptions = {_describe_scheme(scheme) for scheme in schemes}
        raise _unsupported_format(
            f"compressed-tensors {raw.get('format')} of "
            f"{', '.join(sorted(descriptions))}"
        )
    return Quantization("packed", group=_parse_group(group_sizes.pop()))


def _describe_scheme(scheme: dict[str, Any]) -> str:
    kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
    group_size = scheme.get("group_size")
    return kind if group_size is None else f"{kind} by {group_size}"


def _parse_four_bits(raw: dict[str, Any], method: str) -> Quantization:
    """Reads the config of awq or gptq."""
    # transformers 5 writes the version to the field "format" instead.
    version_field = "version" if method == "awq" else "checkpoint_format"
    version = str(raw.get(version_field) or raw.get("format") or "")
    supported = ("", "gemm") if method == "awq" else ("", "gptq", "gptq_v2")
    bits = raw.get("bits", raw.get("w_bit"))
    if bits != 4 or version.lower() not in supported:
        suffix = f", {version}" if version else ""
        raise _unsupported_format(f"{method} of {short_repr(bits)} bits{suffix}")
    if method == "awq" and not raw.get("zero_point", True):
        raise _unsupported_format("awq without zero_point")
    group = _parse_group(raw.get("group_size", raw.get("q_group_size", 128)))
    # In its first version, the gptq format stores each zero point minus 1.
    zero_offset = 1 if method == "gptq" and version.lower() != "gptq_v2" else 0
    return Quantization(method, group=group, zero_offset=zero_offset)


def _parse_group(group_size: Any) -> int | None:
    if group_size in (None, -1):
        return None
    return _parse_sizes("group_size", [group_size], count=1)[0]


def _parse_block_shape(block: Any) -> tuple[int, ...] | None:
    return None if block is None else _parse_sizes("weight_block_size", block, count=2)


def _parse_sizes(name: str, sizes: Any, *, count: int) -> tuple[int, ...]:
    if len(sizes) != count or any(
        not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise config_error(
            f"{name} is {short_repr(sizes)}, expected {count} positive integers"
        )
    return tuple(sizes)
