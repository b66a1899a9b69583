"""Where weights come from: safetensors files, mapped, or a function of name and seed.

On the CPU a tensor whose dtype already fits is used where the file is mapped, so that weights cost
no memory of their own and two engines on one host share them.
"""

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model import kv_scales
from model.errors import ModelLoadError
from model.sizes import read_headers

# Buffers that some exporters saved, which follow from the config; scales of FP8 KV are read by
# kv_scales.py, where they are wanted.
_IGNORED_SUFFIXES: Final = ("rotary_emb.inv_freq", "self_attn.masked_bias", *kv_scales.SUFFIXES)
_FP8: Final = "F8_E4M3"  # beside scales of its own
_SCALES: Final = (".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale")
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    _FP8: torch.float8_e4m3fn,
}
_HASH_CHUNK: Final = 1 << 24  # elements made at a time: bounds the int64 scratch to 128 MiB each


class SafetensorsSource:
    """A directory's model.safetensors, or the shards that its index names."""

    def __init__(
        self,
        folder: Path,
        fp8_block: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",  # where weights in FP8 are dequantised
    ) -> None:
        self._tensors, self._fp8_block, self._device = read_headers(folder), fp8_block, device

    def names(self) -> set[str]:
        """Without what belongs to a weight in FP8."""
        of_fp8 = {name for name, stored in self._tensors.items() if stored.dtype == _FP8}
        return set(self._tensors) - {
            name.removesuffix(".weight") + suffix for name in of_fp8 for suffix in _SCALES
        }

    def part(self, name: str, shape: tuple[int, ...], rows: range, cols: range | None) -> Tensor:
        """Rows, and for matrices columns, of a tensor whose full shape must be `shape`."""
        if (stored := self._tensors.get(name)) is None:
            raise ModelLoadError(f"weight {name} is missing from the model's files")
        if stored.shape != shape:
            raise ModelLoadError(
                f"weight {name} has shape {stored.shape}, the config implies {shape}"
            )
        if stored.dtype not in _DTYPES:
            raise ModelLoadError(
                f"weight {name} has dtype {stored.dtype}; supported: float32, bfloat16, "
                "float16, float8_e4m3fn"
            )
        dtype = _DTYPES[stored.dtype]
        if stored.stop - stored.start != stored.size * dtype.itemsize:
            raise ModelLoadError(
                f"{stored.path} is not a safetensors file: weight {name} has "
                f"{stored.stop - stored.start} bytes"
            )
        tensor = torch.from_numpy(stored.content()).view(dtype).view(shape)[rows.start : rows.stop]
        tensor = tensor if cols is None else tensor[:, cols.start : cols.stop]
        if stored.dtype != _FP8:
            return tensor
        scales = self._scales(name, shape, rows, cols or range(shape[-1]))
        return tensor.contiguous().to(self._device).float().mul_(scales)

    def _scales(self, name: str, shape: tuple[int, ...], rows: range, cols: range) -> Tensor:
        """Of each element of a part of an FP8 weight; they are by tensor, row or block."""
        names = [f"{name}{suffix}" for suffix in ("_scale_inv", "_scale")]
        stored = next((self._tensors[each] for each in names if each in self._tensors), None)
        if stored is None or stored.dtype not in _DTYPES:
            raise ModelLoadError(f"weight {name} is in FP8, but there is no {' or '.join(names)}")
        scales = torch.from_numpy(stored.content()).view(_DTYPES[stored.dtype]).float()
        scales = scales.view(stored.shape[0] if stored.shape else 1, -1)
        whole = (shape[0] // scales.shape[0], shape[-1])  # where each row has one, or all
        block = self._fp8_block or whole
        wanted = tuple(-(-size // max(of, 1)) for size, of in zip(shape, block, strict=False))
        if len(shape) != 2 or tuple(scales.shape) != wanted:
            told = f"{tuple(scales.shape)} scales, and not one for each {block[0]} x {block[1]}"
            raise ModelLoadError(f"weight {name} of shape {shape} has {told} elements")
        row, col = (torch.arange(part.start, part.stop) for part in (rows, cols))
        row, col, scales = (each.to(self._device) for each in (row, col, scales))
        return scales[row[:, None] // block[0], col // block[1]]


class DummySource:
    """Weights made from (name, seed) alone: element i does not depend on which part is asked for.

    Matrices are uniform with variance 1 / columns, so that activations keep their size through
    any depth; vectors named as norms are 1, other vectors small.
    """

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self._seed = seed
        self._device = device

    def names(self) -> set[str]:
        return set()  # any can be made

    def part(self, name: str, shape: tuple[int, ...], rows: range, cols: range | None) -> Tensor:
        if "norm" in name:
            return torch.ones(len(rows), device=self._device)
        width = math.prod(shape[1:])
        scale = math.sqrt(3.0 / shape[-1]) if len(shape) > 1 else 0.02
        columns = range(width) if cols is None else cols
        stream = zlib.crc32(f"{self._seed}/{name}".encode())
        step = max(1, _HASH_CHUNK // len(columns))
        parts = [
            self._uniform(range(start, min(start + step, rows.stop)), columns, width, stream, scale)
            for start in range(rows.start, rows.stop, step)
        ]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        return flat.reshape(len(rows), *(shape[1:] if cols is None else (len(cols),)))

    def _uniform(self, rows: range, cols: range, width: int, stream: int, scale: float) -> Tensor:
        row = torch.arange(rows.start, rows.stop, device=self._device)[:, None]
        col = torch.arange(cols.start, cols.stop, device=self._device)
        bits = (row * width + col).mul_(0x9E3779B1).add_(stream)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> shift).mul_(factor)
        bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> 16)
        # 24 bits are exact in float32, so every device and rank computes the same value.
        return (bits >> 8).to(torch.float32).sub_(1 << 23).mul_(scale / (1 << 23))


class WeightLoader:
    """Hands out a rank's parts of the weights and knows which were never asked for.

    Args:
        pack: whoever multiplies by a weight may keep a reordered copy of it (layers.Linear).
        on_load: told the name of each weight when it is first asked for.
    """

    def __init__(
        self,
        source: SafetensorsSource | DummySource,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        pack: bool = False,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        self._on_load = on_load
        self.pack, self.dtype, self.device = pack, dtype, torch.device(device)
        self._source = source
        self._used: set[str] = set()

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The part of weight `name` (of full shape `shape`) in `dtype`, else in our dtype, on our
        device.

        Raises:
            ModelLoadError: missing, or of another shape or an unsupported dtype.
        """
        if self._on_load and name not in self._used:
            self._on_load(name)
        self._used.add(name)
        rows = range(shape[0]) if rows is None else rows
        part = self._source.part(name, shape, rows, cols)
        return part.to(self.device, dtype or self.dtype).contiguous()

    def empty(self, *shape: int) -> Tensor:
        """In our dtype, on our device, for parts to be put together in."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def ignore(self, *names: str) -> None:
        """Declares weights that the model knows and does not need; those whose names begin with
        one that ends in a dot, too."""
        self._used |= set(names)
        if folders := tuple(name for name in names if name.endswith(".")):
            self._used |= {name for name in self._source.names() if name.startswith(folders)}

    def finish(self) -> None:
        """Raises ModelLoadError if the files hold weights that nobody asked for."""
        unused = sorted(
            name
            for name in self._source.names() - self._used
            if not name.endswith(_IGNORED_SUFFIXES)
        )
        if unused:
            shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            raise ModelLoadError(
                f"{len(unused)} weights are not used by this architecture: {shown}"
            )
