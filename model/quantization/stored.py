"""Quantised weights in the formats of safetensors files, converted to `Quantized`."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model.architectures.quantization import Quantization
from model.errors import ModelLoadError
from model.files.safetensors_files import StoredTensor
from model.quantization.quantized import Quantized

_FP8: Final = "F8_E4M3"
_FLOATS: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    _FP8: torch.float8_e4m3fn,
}
_DTYPES: Final = _FLOATS | {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
# Suffixes that replace ".weight" in the names of the tensors that belong to an FP8
# weight.
_FP8_SUFFIXES: Final = (
    ".weight_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".activation_scale",
)
# A file is read ahead in parts of this size, while the preceding bytes are used.
_READ_AHEAD_BYTES: Final = 1 << 28
_CODES_PER_WORD: Final = 8  # codes of 4 bits in an int32
MXFP4_GROUP: Final = 32  # columns of MXFP4 that share an exponent
# AWQ shuffles the codes of an int32 word: code i is in the 4 bits at position
# _AWQ_ORDER[i].
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
# For each `Quantization.stored`: the suffix of a weight's name, and the suffixes of the
# tensors that belong to the weight.
_SUFFIXES: Final = {
    "packed": (
        ".weight_packed",
        (".weight_scale", ".weight_zero_point", ".weight_shape"),
    ),
    "gptq": (".qweight", (".qzeros", ".scales")),
    "awq": (".qweight", (".qzeros", ".scales")),
    "mxfp4": ("_blocks", ("_scales",)),
}
# Suffixes of the names of tensors with the index of each column's group.
_GROUP_INDEX_SUFFIXES: Final = (".weight_g_idx", ".g_idx")


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a model's files.

    Attributes:
        quantization: how the weights are quantised. None: the only quantised format is
            FP8 with one scale for each tensor or row.
        upload: copies a tensor to the device where it is unpacked and used.
    """

    tensors: Mapping[str, StoredTensor]
    quantization: Quantization | None = None
    upload: Callable[[Tensor], Tensor] = Tensor.cpu

    def names(self) -> set[str]:
        """Returns the names that the weights would have without quantisation.

        Scales, zero points and the like are not included.
        """
        names = set(self.tensors)
        for name, stored in self.tensors.items():
            if stored.dtype == _FP8:
                base = name.removesuffix(".weight")
                names -= {base + suffix for suffix in _FP8_SUFFIXES}
        weight_suffix, other_suffixes = self._suffixes
        if not weight_suffix:
            return names
        related_suffixes = (*other_suffixes, *_GROUP_INDEX_SUFFIXES)
        for name in [name for name in names if name.endswith(weight_suffix)]:
            base = name.removesuffix(weight_suffix)
            names.discard(name)
            names -= {base + suffix for suffix in related_suffixes}
            names.add(base if weight_suffix == "_blocks" else f"{base}.weight")
            # Some writers store a bias of zeros in layers without a bias.
            bias = self.tensors.get(f"{base}.bias")
            if bias and not map_tensor(name, bias).any():
                names.discard(f"{base}.bias")
        return names

    @property
    def _suffixes(self) -> tuple[str, tuple[str, ...]]:
        stored = self.quantization.stored if self.quantization else ""
        return _SUFFIXES.get(stored, ("", ()))

    def part(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None
    ) -> Tensor:
        """Returns the given rows of a tensor.

        If `cols` is given, the tensor must be a matrix, and only these columns of the
        rows are returned. The result is on the device of `upload`. On the CPU, the
        result stays mapped from its file.

        Args:
            shape: the shape that the complete tensor must have.
        """
        tensor = self._map(name, shape, dtypes=_FLOATS)[rows.start : rows.stop]
        if cols is not None:
            tensor = tensor[:, cols.start : cols.stop]
        return self.upload(tensor)

    def quantised(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None = None
    ) -> Quantized | None:
        """Returns rows and columns of a quantised matrix, or complete experts.

        Experts have the shape [experts, out, in]; `rows` selects some of them.

        Returns:
            The part, or None if the weight is not quantised.

        Raises:
            ModelLoadError: a tensor that belongs to the weight is missing or has
                another shape.
        """
        weight = self._quantised_rows(name, shape, rows)
        if weight is None:
            return None
        if cols is not None:
            weight = weight.columns(cols)
        return weight.map_parts(self.upload)

    def _quantised_rows(
        self, name: str, shape: tuple[int, ...], rows: range
    ) -> Quantized | None:
        stored = self.tensors.get(name)
        if stored is not None:
            return self._fp8(name, shape, rows) if stored.dtype == _FP8 else None
        suffix, _ = self._suffixes
        base = name if suffix == "_blocks" else name.removesuffix(".weight")
        if not suffix or base + suffix not in self.tensors:
            return None
        if suffix == "_blocks":
            return self._mxfp4(base, shape, rows)
        return self._int4(base, shape, rows)

    def _map(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: Mapping[str, torch.dtype] = _DTYPES,
    ) -> Tensor:
        """Checks that a tensor has this shape, and maps the tensor from its file."""
        stored = self.tensors.get(name)
        if stored is None:
            raise ModelLoadError(f"weight {name} is missing from the model's files")
        if stored.shape != shape:
            raise ModelLoadError(
                f"weight {name} has shape {stored.shape}, the config implies {shape}"
            )
        return map_tensor(name, stored, dtypes)

    def _upload_map(self, name: str, *shape: int) -> Tensor:
        return self.upload(self._map(name, shape))

    def _mxfp4(self, base: str, shape: tuple[int, ...], rows: range) -> Quantized:
        num_groups = shape[-1] // MXFP4_GROUP
        blocks_shape = (*shape[:-1], num_groups, MXFP4_GROUP // 2)
        blocks = self._map(f"{base}_blocks", blocks_shape)
        codes = blocks.flatten(-2)[rows.start : rows.stop]
        scales = self._map(f"{base}_scales", (*shape[:-1], num_groups))
        scales = scales[rows.start : rows.stop]
        return Quantized(codes, scales, None, "fp4", MXFP4_GROUP, torch.float32)

    def _fp8(self, name: str, shape: tuple[int, ...], rows: range) -> Quantized:
        scales = self._fp8_scales(name)
        block = (1 if len(scales) == shape[0] else shape[0], shape[-1])
        has_block_scales = tuple(scales.shape) not in ((1, 1), (shape[0], 1))
        if has_block_scales and self.quantization and self.quantization.block:
            block = (self.quantization.block[0], self.quantization.block[1])
        expected_shape = tuple(
            -(-size // max(block_size, 1))
            for size, block_size in zip(shape, block, strict=False)
        )
        if len(shape) != 2 or tuple(scales.shape) != expected_shape:
            raise ModelLoadError(
                f"weight {name} of shape {shape} has scales of shape "
                f"{tuple(scales.shape)}; expected one scale for each "
                f"{block[0]} x {block[1]} block"
            )
        codes = self._map(name, shape).view(torch.uint8)[rows.start : rows.stop]
        row_scales = scales[torch.arange(rows.start, rows.stop) // block[0]]
        group = min(block[1], shape[1])
        return Quantized(codes, row_scales, None, "fp8", group, torch.float32)

    def _fp8_scales(self, name: str) -> Tensor:
        """Returns the scales of an FP8 weight, float32 [blocks of rows, groups]."""
        candidates = [f"{name}_scale_inv", f"{name}_scale"]
        for candidate in candidates:
            if candidate in self.tensors:
                scales = map_tensor(candidate, self.tensors[candidate], _FLOATS).float()
                return scales.view(scales.shape[0] if scales.dim() else 1, -1)
        raise ModelLoadError(
            f"weight {name} is in FP8, but there is no {' or '.join(candidates)}"
        )

    def _int4(self, base: str, shape: tuple[int, ...], rows: range) -> Quantized:
        _, width = shape
        if self.quantization is None or width % _CODES_PER_WORD:
            raise ModelLoadError(
                f"weight {base} has {width} columns, but a weight in 4 bits needs a "
                f"multiple of {_CODES_PER_WORD}"
            )
        group = min(self.quantization.group or width, width)
        num_groups = -(-width // group)
        if self.quantization.stored == "packed":
            codes, scales, zeros = self._compressed_tensors_parts(
                base, shape, rows, num_groups
            )
        else:
            codes, scales, zeros = self._gptq_or_awq_parts(
                base, shape, rows, num_groups, self.quantization
            )
        index = self._group_index(base, width, num_groups)
        if index is not None:
            default_index = torch.arange(width, device=index.device) // group
            if index.min() >= 0 and not torch.equal(index, default_index):
                # The groups are not contiguous, so each column becomes its own group.
                group = 1
                scales = scales[:, index]
                zeros = None if zeros is None else zeros[:, index]
        return Quantized(codes, scales, zeros, "int4", group, torch.float32)

    def _group_index(self, base: str, width: int, num_groups: int) -> Tensor | None:
        """Returns the stored group of each column, int64 [width], or None."""
        for suffix in _GROUP_INDEX_SUFFIXES:
            if base + suffix in self.tensors:
                index = self._upload_map(base + suffix, width).long()
                max_group = int(index.max())
                if max_group >= num_groups:
                    raise ModelLoadError(
                        f"weight {base}{suffix} names group {max_group}, but there are "
                        f"{num_groups} groups"
                    )
                return index
        return None

    def _compressed_tensors_parts(
        self, base: str, shape: tuple[int, ...], rows: range, num_groups: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns codes, scales and zeros of some rows of a compressed-tensors
        weight."""
        height, width = shape
        part = slice(rows.start, rows.stop)
        row_words = width // _CODES_PER_WORD
        words = self._upload_map(f"{base}.weight_packed", height, row_words)
        # Each byte of a word holds two codes, the first in the low half, as in
        # `Quantized`.
        codes = words[part].view(torch.uint8)
        scales = self._upload_map(f"{base}.weight_scale", height, num_groups)[part]
        zeros = None
        zeros_name = f"{base}.weight_zero_point"
        if zeros_name in self.tensors:
            column_words = -(-height // _CODES_PER_WORD)
            packed_zeros = self._upload_map(zeros_name, column_words, num_groups)
            zeros = _unpack(packed_zeros.t())[:, part].t()
        return codes, scales, zeros

    def _gptq_or_awq_parts(
        self,
        base: str,
        shape: tuple[int, ...],
        rows: range,
        num_groups: int,
        quantization: Quantization,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns codes, scales and zeros of some rows of a gptq or awq weight.

        Both formats store the transposed matrix.
        """
        height, width = shape
        part = slice(rows.start, rows.stop)
        column_words = -(-height // _CODES_PER_WORD)
        order: Iterable[int] = range(_CODES_PER_WORD)
        if quantization.stored == "awq":
            order = _AWQ_ORDER
            words = self._upload_map(f"{base}.qweight", width, column_words)
            unpacked = _unpack(words, order)[:, part].t()
            codes = unpacked[:, ::2] | unpacked[:, 1::2] << 4
        else:
            row_words = width // _CODES_PER_WORD
            words = self._upload_map(f"{base}.qweight", row_words, height)
            codes = words[:, part].t().contiguous().view(torch.uint8)
        scales = self._upload_map(f"{base}.scales", num_groups, height)[:, part].t()
        packed_zeros = self._upload_map(f"{base}.qzeros", num_groups, column_words)
        zeros = _unpack(packed_zeros, order)[:, part].t()
        zeros = (zeros + quantization.zero_offset) & 15
        return codes, scales, zeros


def map_tensor(
    name: str, stored: StoredTensor, dtypes: Mapping[str, torch.dtype] = _DTYPES
) -> Tensor:
    """Maps a tensor from its file.

    Raises:
        ModelLoadError: the tensor's data type is not one of `dtypes`, or the number of
            its bytes is wrong.
    """
    dtype = dtypes.get(stored.dtype)
    if dtype is None:
        raise ModelLoadError(
            f"weight {name} has dtype {stored.dtype}; supported: {', '.join(dtypes)}"
        )
    num_bytes = stored.stop - stored.start
    expected_bytes = stored.size * dtype.itemsize
    if num_bytes != expected_bytes:
        raise ModelLoadError(
            f"{stored.path} is not a safetensors file: weight {name} has {num_bytes} "
            f"bytes, expected {expected_bytes}"
        )
    first_part = stored.start // _READ_AHEAD_BYTES
    last_part = stored.stop // _READ_AHEAD_BYTES + 1
    for part in range(first_part, last_part + 1):
        _read_ahead(stored.path, part)
    return torch.from_numpy(stored.content()).view(dtype).view(stored.shape)


@lru_cache(4096)  # each part needs to be requested only once
def _read_ahead(path: Path, part: int) -> None:
    """Makes the operating system read a part of a file into memory, without waiting."""
    with path.open("rb") as file:
        os.posix_fadvise(
            file.fileno(),
            part * _READ_AHEAD_BYTES,
            _READ_AHEAD_BYTES,
            os.POSIX_FADV_WILLNEED,
        )


def _unpack(words: Tensor, order: Iterable[int] = range(_CODES_PER_WORD)) -> Tensor:
    """Unpacks int32 [n, m] to codes of 4 bits, uint8 [n, 8 m].

    Args:
        order: the position of each code within its word; position 0 is the lowest 4
            bits.
    """
    word_bytes = words.contiguous().view(torch.uint8)
    halves = torch.stack((word_bytes & 15, word_bytes >> 4), -1)
    codes = halves.view(*words.shape, _CODES_PER_WORD)
    return codes[..., list(order)].flatten(1)
