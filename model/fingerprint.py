"""Whether two servers hold the same model: a digest of its maths and of samples of its weights.

It does not depend on where the files lie, how they are sharded, or who serves them with which
dtype or parallelism. No torch here.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from model.config import ModelConfig
from model.files import read_header, weight_files

_SAMPLE_BYTES: Final = 256
_SAMPLES_PER_TENSOR: Final = 4
_ROW_BYTES: Final = 16  # of each token's row of an embedding or a head


def fingerprint(
    config: ModelConfig, model_dir: str | Path, *, load_format: str = "auto", seed: int = 0
) -> str:
    """32 hex digits, equal for equal config and weights.

    A fine-tune differs in nearly every element it trained, so samples of each tensor tell it
    apart; hashing whole files would take longer than loading them. But one may have trained the
    rows of a few tokens only: of what has a row for each token, all rows are looked at.

    Args:
        model_dir: as `hub.resolve_model` returns it; not read when load_format is "dummy".
        seed: of dummy weights.
    """
    digest = hashlib.blake2b(config.semantic_json.encode(), digest_size=16)
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    paths, vocab = weight_files(Path(model_dir)), config.vocab_size
    entries = {name: entry for path in paths for name, entry in _read(path, vocab)}
    for name in sorted(entries):
        digest.update(name.encode() + entries[name])
    return digest.hexdigest()


def _read(path: Path, vocab_size: int) -> Iterator[tuple[str, bytes]]:
    """Name, dtype with shape, and samples of each tensor in a safetensors file."""
    with path.open("rb") as file:
        header, start = read_header(path, file)
        for name, tensor in header.items():
            described = json.dumps([tensor["dtype"], tensor["shape"]]).encode()
            first, end = (start + offset for offset in tensor["data_offsets"])
            samples = _samples(file, first, end)
            if len(tensor["shape"]) == 2 and tensor["shape"][0] >= vocab_size:
                samples += _row_samples(path, first, end, tensor["shape"][0])
            yield name, described + samples


def _row_samples(path: Path, first: int, end: int, num_rows: int) -> bytes:
    rows = np.memmap(path, np.uint8, "r", offset=first, shape=(num_rows, (end - first) // num_rows))
    return rows[:, :_ROW_BYTES].tobytes()


def _samples(file: BinaryIO, first: int, end: int) -> bytes:
    step = math.ceil(max(1, end - first) / _SAMPLES_PER_TENSOR)
    found = b""
    for start in range(first, end, step):
        file.seek(start)
        found += file.read(min(_SAMPLE_BYTES, end - start))
    return found
