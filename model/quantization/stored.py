"""Quantised weights as safetensors files hold them, turned into our own order."""

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
from model.quantization.quantized import Quantized
from model.sizes import StoredTensor

_FP8: Final = "F8_E4M3"  # beside scales of its own
_FLOATS: Final = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    _FP8: torch.float8_e4m3fn,
}  # fmt: skip
_DTYPES: Final = _FLOATS | {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
_SCALES: Final = (
    ".weight_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".activation_scale",
)
_AHEAD_BYTES: Final = 1 << 28  # of a file, read while what is before is used
_PER_WORD: Final = 8  # codes of 4 bits in an int32
_MX_GROUP: Final = 32  # columns of MXFP4 that share an exponent
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the next code is
# By how weights are stored: the end of their name, and the ends of what belongs to them.
_NAMES: Final = {
    "packed": (
        ".weight_packed",
        (".weight_scale", ".weight_zero_point", ".weight_shape"),
    ),
    "gptq": (".qweight", (".qzeros", ".scales")),
    "awq": (".qweight", (".qzeros", ".scales")),
    "mxfp4": ("_blocks", ("_scales",)),
}
_ORDERS: Final = (".weight_g_idx", ".g_idx")  # which group a column is of


@dataclass(frozen=True)
class StoredWeights:
    """The weights of some files; `take` brings a tensor to where it is unpacked and used."""

    tensors: Mapping[str, StoredTensor]
    how: Quantization | None = None
    take: Callable[[Tensor], Tensor] = Tensor.cpu

    def names(self) -> set[str]:
        """Those of all weights, as they were before something was quantised, without what belongs
        to one that is."""
        of_fp8 = [name for name, stored in self.tensors.items() if stored.dtype == _FP8]
        found = set(self.tensors) - {
            name.removesuffix(".weight") + suffix
            for name in of_fp8
            for suffix in _SCALES
        }
        end, others = self._names
        for name in [name for name in found if end and name.endswith(end)]:
            base = name.removesuffix(end)
            found -= {name, *(base + other for other in (*others, *_ORDERS))}
            found.add(base if end == "_blocks" else f"{base}.weight")
            # Some writers give every layer a bias, of zeros where the model has none.
            if (bias := self.tensors.get(f"{base}.bias")) and not mapped(
                name, bias
            ).any():
                found.discard(f"{base}.bias")
        return found

    @property
    def _names(self) -> tuple[str, tuple[str, ...]]:
        return _NAMES.get(self.how.stored if self.how else "", ("", ()))

    def part(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None
    ) -> Tensor:
        """Rows, and for matrices columns, of a tensor whose full shape must be `shape`; on the
        device if that is a GPU, else where the file is mapped."""
        tensor = self._get(name, *shape, of=_FLOATS)[rows.start : rows.stop]
        return self.take(tensor if cols is None else tensor[:, cols.start : cols.stop])

    def quantised(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None = None
    ) -> Quantized | None:
        """As `part`, of a matrix that is quantised, or of whole experts [experts, out, in]; None:
        it is not. Raises ModelLoadError for what is missing of it, or of another shape."""
        if (found := self._quantised(name, shape, rows)) is None:
            return None
        return (found if cols is None else found.columns(cols)).each(self.take)

    def _quantised(
        self, name: str, shape: tuple[int, ...], rows: range
    ) -> Quantized | None:
        if (stored := self.tensors.get(name)) is not None:
            return self._fp8(name, shape, rows) if stored.dtype == _FP8 else None
        (end, _), part = self._names, slice(rows.start, rows.stop)
        base = name if end == "_blocks" else name.removesuffix(".weight")
        if not end or base + end not in self.tensors:
            return None
        if end != "_blocks":
            return self._int4(base, shape, rows)
        blocks = (*shape[:-1], shape[-1] // _MX_GROUP)  # of each expert and row
        codes = self._get(base + end, *blocks, _MX_GROUP // 2).flatten(-2)[part]
        scales = self._get(f"{base}_scales", *blocks)[part]
        return Quantized(codes, scales, None, "fp4", _MX_GROUP, torch.float32)

    def _get(
        self, name: str, *shape: int, of: Mapping[str, torch.dtype] = _DTYPES
    ) -> Tensor:
        if (stored := self.tensors.get(name)) is None:
            raise ModelLoadError(f"weight {name} is missing from the model's files")
        if stored.shape != shape:
            told = f"{stored.shape}, the config implies {shape}"
            raise ModelLoadError(f"weight {name} has shape {told}")
        return mapped(name, stored, of)

    def _fp8(self, name: str, shape: tuple[int, ...], rows: range) -> Quantized:
        suffixes = [f"{name}{suffix}" for suffix in ("_scale_inv", "_scale")]
        found = next((each for each in suffixes if each in self.tensors), None)
        if found is None:
            raise ModelLoadError(
                f"weight {name} is in FP8, but there is no {' or '.join(suffixes)}"
            )
        scales = mapped(found, self.tensors[found], _FLOATS).float()
        scales = scales.view(scales.shape[0] if scales.dim() else 1, -1)
        is_whole = tuple(scales.shape) in (
            (1, 1),
            (shape[0], 1),
        )  # all have one, or each row has
        whole = (1 if len(scales) == shape[0] else shape[0], shape[-1])
        block = (None if is_whole or self.how is None else self.how.block) or whole
        wanted = tuple(
            -(-size // max(of, 1)) for size, of in zip(shape, block, strict=False)
        )
        if len(shape) != 2 or tuple(scales.shape) != wanted:
            told = f"{tuple(scales.shape)} scales, and not one for each {block[0]} x {block[1]}"
            raise ModelLoadError(f"weight {name} of shape {shape} has {told} elements")
        own = self._get(name, *shape).view(torch.uint8)[rows.start : rows.stop]
        of_rows = scales[torch.arange(rows.start, rows.stop) // block[0]]
        return Quantized(
            own, of_rows, None, "fp8", min(block[1], shape[1]), torch.float32
        )

    def _int4(self, base: str, shape: tuple[int, ...], rows: range) -> Quantized:
        (height, width), part = shape, slice(rows.start, rows.stop)
        if self.how is None or width % _PER_WORD:
            raise ModelLoadError(
                f"weight {base} of {width} columns cannot be in words of 4 bits"
            )
        group, zeros = min(self.how.group or width, width), None
        num_groups, words = -(-width // group), -(-height // _PER_WORD)

        def get(end: str, *expected: int) -> Tensor:
            return self.take(self._get(base + end, *expected))

        # Two codes a byte, the first in the low half: so words are in our order.
        if self.how.stored == "packed":
            codes = get(".weight_packed", height, width // _PER_WORD)[part].view(
                torch.uint8
            )
            scales = get(".weight_scale", height, num_groups)[part]
            if base + ".weight_zero_point" in self.tensors:
                zeros = _unpacked(get(".weight_zero_point", words, num_groups).t())[
                    :, part
                ].t()
        else:
            order = _AWQ_ORDER if self.how.stored == "awq" else range(_PER_WORD)
            if self.how.stored == "awq":
                each = _unpacked(get(".qweight", width, words), order)[:, part].t()
                codes = each[:, ::2] | each[:, 1::2] << 4
            else:
                codes = get(".qweight", width // _PER_WORD, height)[:, part].t()
                codes = codes.contiguous().view(torch.uint8)
            scales = get(".scales", num_groups, height)[:, part].t()
            zeros = _unpacked(get(".qzeros", num_groups, words), order)[:, part].t()
            zeros = (zeros + self.how.zero_offset) & 15
        end = next((each for each in _ORDERS if base + each in self.tensors), None)
        if end is not None:
            index = get(end, width).long()
            plain = torch.arange(width, device=index.device) // group
            if int(index.max()) >= num_groups:
                raise ModelLoadError(
                    f"weight {base}{end} names group {int(index.max())}"
                )
            if index.min() >= 0 and not torch.equal(
                index, plain
            ):  # columns are groups themselves
                group, scales = 1, scales[:, index]
                zeros = None if zeros is None else zeros[:, index]
        return Quantized(codes, scales, zeros, "int4", group, torch.float32)


def mapped(
    name: str, stored: StoredTensor, of: Mapping[str, torch.dtype] = _DTYPES
) -> Tensor:
    """A tensor where its file is mapped. Raises ModelLoadError for a dtype not `of` these."""
    if (dtype := of.get(stored.dtype)) is None:
        raise ModelLoadError(
            f"weight {name} has dtype {stored.dtype}; supported: {', '.join(of)}"
        )
    if stored.stop - stored.start != stored.size * dtype.itemsize:
        told = f"weight {name} has {stored.stop - stored.start} bytes"
        raise ModelLoadError(f"{stored.path} is not a safetensors file: {told}")
    for part in range(stored.start // _AHEAD_BYTES, stored.stop // _AHEAD_BYTES + 2):
        _read_ahead(stored.path, part)
    return torch.from_numpy(stored.content()).view(dtype).view(stored.shape)


@lru_cache(4096)  # once for each part
def _read_ahead(path: Path, part: int) -> None:
    """Asks for a part of a file, that it be in memory when it is used; waits for nothing."""
    with path.open("rb") as file:
        os.posix_fadvise(
            file.fileno(), part * _AHEAD_BYTES, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED
        )


def _unpacked(words: Tensor, order: Iterable[int] = range(_PER_WORD)) -> Tensor:
    """int32 [n, m] -> uint8 [n, 8 m], codes of 4 bits; `order`: where in a word each is."""
    pairs = words.contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), -1).view(*words.shape, _PER_WORD)
    return codes[..., list(order)].flatten(1)
