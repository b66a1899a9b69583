"""The tensors of a model directory's safetensors files.

Only the headers of the files are read; the contents of tensors are mapped into memory.
This file does not import torch.
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from model.errors import ModelLoadError

_SINGLE_FILE: Final = "model.safetensors"
# Bytes that are compared at a time.
_COMPARED_BYTES: Final = 1 << 24
_LFS_POINTER_START: Final = b"version "
# In a model that accepts images, the names of the text part's tensors have this prefix.
_TEXT_PREFIX: Final = r"^(model\.)?language_model\."


class StoredTensor(NamedTuple):
    """The location of a tensor: the bytes [start, stop) of a safetensors file."""

    path: Path
    dtype: str  # the name of the data type in the file, such as "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def content(self) -> npt.NDArray[np.uint8]:
        """Maps the bytes of the tensor into memory, copy-on-write."""
        if self.start >= self.stop:
            return np.empty(0, np.uint8)
        length = self.stop - self.start
        return np.memmap(self.path, np.uint8, "c", self.start, (length,))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a directory's safetensors files, by name.

    In a model that accepts images, tensors of the text part get the names that they
    have in a text-only model.

    Raises:
        ModelLoadError: the directory has no safetensors files, the index names a
            missing file, or a file is not a safetensors file or is truncated.
    """
    weight_map = _weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())) or [_SINGLE_FILE]:
        for name, tensor in _read_header(folder / file).items():
            # Several files may have a tensor of this name; the index selects the file.
            if weight_map.get(name, file) == file:
                tensors[re.sub(_TEXT_PREFIX, r"\1", name)] = tensor
    return tensors


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns the file of each weight, or {} for a directory with a single file."""
    if (folder / _SINGLE_FILE).is_file():
        return {}
    index = folder / f"{_SINGLE_FILE}.index.json"
    if not index.is_file():
        raise ModelLoadError(
            f"{folder} has neither {_SINGLE_FILE} nor {index.name}; weights in other "
            "files are not read: convert them with save_pretrained of transformers"
        )
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{index} is not an index of weights: {error}") from error
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index} names {', '.join(missing)}, which {folder} lacks"
        )
    return weight_map


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length_field = file.read(8)
            header_length = int.from_bytes(length_field, "little")
            header = msgspec.json.decode(
                file.read(header_length), type=dict[str, msgspec.Raw]
            )
        header.pop("__metadata__", None)
        entries = {
            name: msgspec.json.decode(raw, type=_HeaderEntry)
            for name, raw in header.items()
        }
    except (msgspec.MsgspecError, MemoryError, OverflowError, RecursionError) as error:
        reason = str(error)
        if length_field == _LFS_POINTER_START:
            reason = "it is a Git LFS pointer to the file: run `git lfs pull`"
        raise ModelLoadError(f"{path} is not a safetensors file: {reason}") from error
    data_start = 8 + header_length
    tensors = {}
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        tensors[name] = StoredTensor(
            path, entry.dtype, entry.shape, data_start + start, data_start + stop
        )
    required_size = max([data_start, *(tensor.stop for tensor in tensors.values())])
    actual_size = path.stat().st_size
    if actual_size < required_size:
        raise ModelLoadError(
            f"{path} has {actual_size} of {required_size} bytes: download it again"
        )
    return tensors


def has_equal_content(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two tensors have the same data type, shape and elements."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    first_bytes = first.content()
    second_bytes = second.content()
    return all(
        np.array_equal(
            first_bytes[start : start + _COMPARED_BYTES],
            second_bytes[start : start + _COMPARED_BYTES],
        )
        for start in range(0, len(first_bytes), _COMPARED_BYTES)
    )


def stored_elements(folder: Path) -> Counter[str]:
    """Returns the number of elements of each data type in the safetensors files.

    Data types have the names that safetensors uses, such as "BF16".
    """
    counts: Counter[str] = Counter()
    for tensor in read_headers(folder).values():
        counts[tensor.dtype] += tensor.size
    return counts
