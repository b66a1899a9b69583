"""Model directories: made once and atomically; their safetensors files found and written."""

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from model.errors import ModelLoadError
from protocol.settings.machine import CannotKeep

_HEADER_ALIGNMENT: Final = 64  # bytes; mapped tensors then start on cache lines
_MARKER: Final = "baton.json"
# What reading a header raises that is JSON of any kind, or none.
_UNREADABLE: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def build_once(target: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Returns `target`, made by `build` if no earlier call made it from the same `key`.

    Processes that ask at once wait for the first; a directory is there whole or not at all.

    Args:
        key: names the inputs and their version; another key builds the directory anew.
        build: fills the empty directory that it is given.

    Raises:
        CannotKeep: nothing can be written there.
    """
    if _is_built(target, key):
        return target
    with _lock_file(target) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_built(target, key):
            return target
        prefix = f".{target.name}.tmp-"
        for stale in target.parent.glob(f"{prefix}*"):  # of a builder that was killed
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            build(scratch)
            (scratch / _MARKER).write_text(json.dumps({"key": key}), encoding="utf-8")
            scratch.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _lock_file(target: Path) -> TextIO:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return open(target.parent / f".{target.name}.lock", "w")
    except OSError as error:
        raise CannotKeep("a converted model", target.parent, error) from error


def _is_built(target: Path, key: str) -> bool:
    with suppress(OSError, ValueError):
        marker = json.loads((target / _MARKER).read_text(encoding="utf-8"))
        return bool(marker["key"] == key)
    return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory: the single one, or those its index names.

    Raises:
        ModelLoadError: none there, or the index names one that is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelLoadError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelLoadError(f"{index} is no index of weights: {error}") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelLoadError(f"{index} names {', '.join(missing)}, which {folder} lacks")
    return [folder / name for name in names]


class StoredTensor(NamedTuple):
    """Where a tensor lies: bytes [start, stop) of a safetensors file."""

    path: Path
    dtype: str  # by its name there
    shape: list[int]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def content(self) -> npt.NDArray[np.uint8]:
        """Its bytes, mapped."""
        if self.start == self.stop:
            return np.empty(0, np.uint8)
        return np.memmap(self.path, np.uint8, "r", self.start, (self.stop - self.start,))


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory's safetensors files, by name; reads their headers only.

    Raises:
        ModelLoadError: a file is no such file, or the end of it is missing.
    """
    return {name: tensor for path in weight_files(folder) for name, tensor in _header_of(path)}


def _header_of(path: Path) -> list[tuple[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            data = 8 + (size := int.from_bytes(file.read(8), "little"))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        found = [
            (
                name,
                StoredTensor(path, t["dtype"], t["shape"], *(data + o for o in t["data_offsets"])),
            )
            for name, t in header.items()
        ]
        wanted = max((data, *(int(tensor.stop) for _, tensor in found)))
        _ = {tensor.dtype: int(tensor.size) for _, tensor in found}
    except _UNREADABLE as error:
        raise ModelLoadError(f"{path} is not a safetensors file: {error}") from error
    if (there := path.stat().st_size) < wanted:
        raise ModelLoadError(f"{path} has {there} of {wanted} bytes: download it again")
    return found


def num_weights(folder: Path) -> int:
    """Elements of all tensors in a directory's safetensors files."""
    return sum(tensor.size for tensor in read_headers(folder).values())


class PlannedTensor(NamedTuple):
    """A float32 tensor to be written; `make` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[Any]]


def write_safetensors(path: Path, tensors: Iterable[PlannedTensor]) -> None:
    """Writes float32 tensors in the order given, holding one at a time in memory."""
    planned = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in planned:
        end = offset + 4 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in planned:
            data = tensor.make()
            assert data.shape == tensor.shape and data.dtype == "float32", tensor.name
            file.write(data.tobytes())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
