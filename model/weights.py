"""Where weights come from: safetensors files, mapped, or a function of name and seed.

On the CPU a tensor whose dtype already fits is used where the file is mapped, so that weights cost
no memory of their own and two engines on one host share them.
"""

import math
import queue
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from model import kv_scales
from model.architectures.quantization import AT_LOAD, Quantization
from model.errors import ModelLoadError
from model.quantization import products
from model.quantization.quantized import Quantized, Weight, quantise
from model.quantization.stored import StoredWeights
from protocol.process.logging import get_logger

_log = get_logger(__name__)

# Buffers that some exporters saved, which follow from the config; scales of FP8 KV are read by
# kv_scales.py, where they are wanted.
_IGNORED_SUFFIXES: Final = (
    "rotary_emb.inv_freq",
    "self_attn.masked_bias",
    *kv_scales.SUFFIXES,
)
# Of an upload: threads, buffers beside one for each, the least part of a tensor, and the largest.
_THREADS, _MORE_SLOTS, _PART_BYTES, _SLOT_BYTES = 8, 4, 1 << 20, 1 << 23
_new_event: Any = torch.cuda.Event
_HASH_CHUNK: Final = (
    1 << 24
)  # elements made at a time: bounds the int64 scratch to 128 MiB each


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

    def quantised(self, *_part: object) -> None:
        return None

    def part(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None
    ) -> Tensor:
        if "norm" in name:
            return torch.ones(len(rows), device=self._device)
        width = math.prod(shape[1:])
        scale = math.sqrt(3.0 / shape[-1]) if len(shape) > 1 else 0.02
        columns = range(width) if cols is None else cols
        stream = zlib.crc32(f"{self._seed}/{name}".encode())
        step = max(1, _HASH_CHUNK // len(columns))
        parts = [
            self._uniform(
                range(start, min(start + step, rows.stop)),
                columns,
                width,
                stream,
                scale,
            )
            for start in range(rows.start, rows.stop, step)
        ]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        return flat.reshape(len(rows), *(shape[1:] if cols is None else (len(cols),)))

    def _uniform(
        self, rows: range, cols: range, width: int, stream: int, scale: float
    ) -> Tensor:
        row = torch.arange(rows.start, rows.stop, device=self._device)[:, None]
        col = torch.arange(cols.start, cols.stop, device=self._device)
        bits = (row * width + col).mul_(0x9E3779B1).add_(stream)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> shift).mul_(factor)
        bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> 16)
        # 24 bits are exact in float32, so every device and rank computes the same value.
        return (bits >> 8).to(torch.float32).sub_(1 << 23).mul_(scale / (1 << 23))


class Upload:
    """Brings mapped tensors to a GPU, for the thread that made it: others copy a part each into
    pinned memory, from where it goes on meanwhile. From pageable memory one thread would. On a
    CPU tensors stay mapped, unless it `copies` there, too."""

    def __init__(self, device: torch.device, *, copies: bool = False) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        # The stream of whoever uses them; a thread that enters another device would make a context.
        bind = (
            partial(torch.cuda.set_stream, torch.cuda.current_stream(device))
            if on_gpu
            else None
        )
        self._pool = ThreadPoolExecutor(_THREADS, "weights", bind)
        self._slots = queue.SimpleQueue[
            Any
        ]()  # with the end of the last copy out of each
        for _ in range(_THREADS + _MORE_SLOTS if copies or on_gpu else 0):
            slot = torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
            self._slots.put((slot, _new_event() if on_gpu else None))
        self._copies = not self._slots.empty()

    def __call__(self, tensor: Tensor) -> Tensor:
        is_flat = tensor.is_contiguous()
        is_mapped = tensor.device.type == "cpu" and (is_flat or tensor.stride(-1) == 1)
        if not self._copies or tensor.nbytes < _PART_BYTES or not is_mapped:
            return tensor.to(self._device)  # words of 4 bits are there, for one
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        last = -1 if is_flat else -2  # of the dimensions that are split as one
        parts = [each.flatten(0, last).view(torch.uint8) for each in (tensor, out)]
        nbytes = min(max(_PART_BYTES, tensor.nbytes // _THREADS), _SLOT_BYTES)
        rows = max(1, nbytes * len(parts[0]) // tensor.nbytes)
        list(self._pool.map(self._copy, *(torch.split(each, rows) for each in parts)))
        return out  # there, for what is put on the stream from now on

    def _copy(self, source: Tensor, target: Tensor) -> None:
        slot, copied = self._slots.get()
        try:
            if copied is not None:
                copied.synchronize()
            with torch.inference_mode():
                staged = slot[: source.nbytes].view(source.shape)
                np.copyto(staged.numpy(), source.numpy())
                target.copy_(staged, non_blocking=True)
                if copied is not None:
                    copied.record()
        finally:  # whoever waits for it ends as well
            self._slots.put((slot, copied))


class WeightLoader:
    """Hands out a rank's parts of the weights and knows which were never asked for.

    Args:
        pack: whoever multiplies by a weight may keep a reordered copy of it (layers.Linear).
        on_load: told the name of each weight when it is first asked for, or ignored.
    """

    def __init__(
        self,
        source: StoredWeights | DummySource,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        pack: bool = False,
        quantization: Quantization | None = None,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        self._on_load = on_load
        self.pack, self.dtype, self.device = pack, dtype, torch.device(device)
        self.quantises = quantization is not None and quantization.stored == AT_LOAD
        self._source = source
        self._used: set[str] = set()
        # By reason: bytes of quantised weights, and those that they take instead.
        self._dequantised_bytes: defaultdict[str, tuple[int, int]] = defaultdict(
            lambda: (0, 0)
        )

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
        self._note(name)
        rows, dtype = range(shape[0]) if rows is None else rows, dtype or self.dtype
        if (found := self._source.quantised(name, shape, rows, cols)) is not None:
            return self._dequantised(found, "a kind of product without a kernel").to(
                dtype
            )
        part = self._source.part(name, shape, rows, cols)
        return part.to(self.device, dtype).contiguous()

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        cols: range | None = None,
        transposed: bool = False,
    ) -> Weight:
        """As `load`, of a matrix of a linear layer: it stays quantised, or becomes so, where there
        is a kernel to multiply by it. `transposed`: [..., in, out] where it is not quantised."""
        self._note(name)
        rows = range(shape[0]) if rows is None else rows
        found = self._source.quantised(name, shape, rows, cols)
        if found is None:
            if not (self.quantises or len(shape) > 2):
                return self.load(name, shape, rows=rows, cols=cols)
            lies = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
            # By whole rows, whatever part of them this rank has: so all geometries are alike.
            whole = self.load(name, lies, rows=rows)
            whole = whole.mT if transposed else whole
            if not self.quantises:
                return whole if cols is None else whole[..., cols.start : cols.stop]
            found = quantise(whole) if cols is None else quantise(whole).columns(cols)
        found = found.to(self.device, self.dtype)
        why = products.problem(found)
        return found if why is None else self._dequantised(found, why)

    def _note(self, name: str) -> None:
        if self._on_load and name not in self._used:
            self._on_load(name)
        self._used.add(name)

    def _dequantised(self, part: Quantized, why: str) -> Tensor:
        found = part.to(self.device, self.dtype).dequantise()
        before, after = self._dequantised_bytes[why]
        before += sum(each.nbytes for each in part.parts)
        self._dequantised_bytes[why] = before, after + found.nbytes
        return found

    def has(self, name: str) -> bool:
        return name in self._source.names()

    def ignore(self, *names: str) -> None:
        """Declares weights that the model knows and does not need; those whose names begin with
        one that ends in a dot, too."""
        for name in names:
            self._note(name)
        if folders := tuple(name for name in names if name.endswith(".")):
            self._used |= {
                name for name in self._source.names() if name.startswith(folders)
            }

    def finish(self) -> None:
        """Tells what quantised weights cost that are kept otherwise. Raises ModelLoadError if the
        files hold weights that nobody asked for."""
        for why, (before, after) in self._dequantised_bytes.items():
            told = "quantised weights are dequantised at load (%s): in %s they take %.3f GiB, not %.3f"
            dtype = str(self.dtype).removeprefix("torch.")
            _log.warning(told, why, dtype, after / 2**30, before / 2**30)
        unused = sorted(self._source.names() - self._used)
        if unused := [name for name in unused if not name.endswith(_IGNORED_SUFFIXES)]:
            shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            raise ModelLoadError(
                f"{len(unused)} weights are not used by this architecture: {shown}"
            )
