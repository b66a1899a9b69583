"""Loads weights from mapped safetensors files, or makes dummy weights from a seed.

On the CPU, a stored tensor in the data type of the computation stays mapped from its
file. It takes no additional memory, and two engines on one host share the mapping.
"""

import math
import queue
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from model.architectures.quantization import AT_LOAD, Quantization
from model.errors import ModelLoadError
from model.files import kv_scales
from model.files.safetensors_files import StoredTensor
from model.quantization import products
from model.quantization.quantized import Quantized, Weight, quantise
from model.quantization.stored import MXFP4_GROUP, StoredWeights
from protocol.process.logging import get_logger

_log = get_logger(__name__)

# Suffixes of tensors that this loader ignores. Some exporters save buffers that follow
# from the config. kv_scales.py reads the scales of FP8 KV.
_IGNORED_SUFFIXES: Final = (
    "rotary_emb.inv_freq",
    "self_attn.masked_bias",
    *kv_scales.SUFFIXES,
)
_UPLOAD_THREADS: Final = 8
# Pinned buffers in addition to one for each thread.
_EXTRA_SLOTS: Final = 4
# Threads copy tensors of at least this size, in parts of at least this size. Smaller
# tensors are copied without threads.
_MIN_PART_BYTES: Final = 1 << 20
_SLOT_BYTES: Final = 1 << 23
_new_event: Any = torch.cuda.Event
# Elements of dummy weights that are made at a time: an int64 scratch tensor of 128 MiB.
_HASH_CHUNK: Final = 1 << 24


class DummySource:
    """Random weights, made from the name of each weight and a seed.

    An element of a weight has the same value in all parts that contain it, so ranks
    agree. Elements of matrices are uniformly distributed with variance 1 / columns, so
    that the size of activations is independent of the depth. Weights of norms are 1,
    and other vectors are small.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device | str,
        quantization: Quantization | None = None,
    ) -> None:
        self._seed = seed
        self._device = device
        self._has_mxfp4_experts = (
            quantization is not None and quantization.stored == "mxfp4"
        )

    def names(self) -> set[str]:
        """Returns an empty set, since any weight can be made."""
        return set()

    def quantised(
        self, name: str, shape: tuple[int, ...], rows: range, cols: range | None
    ) -> Quantized | None:
        """Returns a part of stacked experts in MXFP4, or None for other weights.

        Dummy weights in other formats are not quantised.
        """
        if not self._has_mxfp4_experts or len(shape) != 3:
            return None
        width = shape[-1]
        codes = self._bytes(f"{name}_blocks", (*shape[:-1], width // 2), rows)
        groups_shape = (*shape[:-1], width // MXFP4_GROUP)
        # Codes have a standard deviation of 2.9. A random half of the scales is halved,
        # which multiplies the standard deviation by 0.8.
        exponent = 127 - round(math.log2(2.9 * 0.8 * math.sqrt(width)))
        scales = exponent - (self._bytes(f"{name}_scales", groups_shape, rows) & 1)
        weight = Quantized(codes, scales, None, "fp4", MXFP4_GROUP, torch.float32)
        return weight if cols is None else weight.columns(cols)

    def _bytes(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        """Returns random bytes, uint8, of some rows of a tensor."""
        columns = range(math.prod(shape[1:]))
        stream = zlib.crc32(f"{self._seed}/{name}".encode())
        chunks = []
        for row in rows:
            bits = self._bits(range(row, row + 1), columns, len(columns), stream)
            chunks.append((bits >> 8).to(torch.uint8))
        return torch.cat(chunks).view(len(rows), *shape[1:])

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
        chunks = []
        for start in range(rows.start, rows.stop, step):
            chunk_rows = range(start, min(start + step, rows.stop))
            chunks.append(self._uniform(chunk_rows, columns, width, stream, scale))
        flat = torch.cat(chunks) if len(chunks) > 1 else chunks[0]
        row_shape = shape[1:] if cols is None else (len(cols),)
        return flat.reshape(len(rows), *row_shape)

    def _uniform(
        self, rows: range, cols: range, width: int, stream: int, scale: float
    ) -> Tensor:
        bits = self._bits(rows, cols, width, stream)
        # float32 is exact for 24 bits, so every device and rank computes the same
        # value.
        return (bits >> 8).to(torch.float32).sub_(1 << 23).mul_(scale / (1 << 23))

    def _bits(self, rows: range, cols: range, width: int, stream: int) -> Tensor:
        """Returns int64 [rows, cols]: a 32-bit hash of each element's position."""
        row = torch.arange(rows.start, rows.stop, device=self._device)[:, None]
        col = torch.arange(cols.start, cols.stop, device=self._device)
        bits = (row * width + col).mul_(0x9E3779B1).add_(stream)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> shift).mul_(factor)
        return bits.bitwise_and_(0xFFFFFFFF).bitwise_xor_(bits >> 16)


class Upload:
    """Copies mapped tensors to a GPU, for use by the thread that created this object.

    Threads of a pool copy parts of a tensor to pinned buffers. The GPU reads these
    buffers while the threads continue. Without pinned memory, a single thread would
    copy everything. For the CPU, tensors stay mapped and are not copied.

    Args:
        copies: whether to copy tensors for the CPU, too.
    """

    def __init__(self, device: torch.device, *, copies: bool = False) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        bind_stream = None
        if is_gpu:
            # All threads use the stream of the current thread. A thread that used
            # another device would create a CUDA context on that device.
            stream = torch.cuda.current_stream(device)
            bind_stream = partial(torch.cuda.set_stream, stream)
        self._pool = ThreadPoolExecutor(_UPLOAD_THREADS, "weights", bind_stream)
        self._copies = copies or is_gpu
        # Pinned buffers. Each has an event that marks the end of the last copy from it.
        self._slots = queue.SimpleQueue[Any]()
        if self._copies:
            for _ in range(_UPLOAD_THREADS + _EXTRA_SLOTS):
                slot = torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
                self._slots.put((slot, _new_event() if is_gpu else None))

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on the device of the upload.

        On a GPU, the copy may still run when this method returns. Work that is then
        added to the stream runs after the copy.
        """
        is_contiguous = tensor.is_contiguous()
        has_contiguous_rows = is_contiguous or tensor.stride(-1) == 1
        # Some tensors are not mapped, because they were uploaded before they were
        # unpacked, such as 4-bit codes.
        is_mapped = tensor.device.type == "cpu" and has_contiguous_rows
        if not self._copies or tensor.nbytes < _MIN_PART_BYTES or not is_mapped:
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        last_dim = -1 if is_contiguous else -2  # the last of the flattened dimensions
        source = tensor.flatten(0, last_dim).view(torch.uint8)
        target = out.flatten(0, last_dim).view(torch.uint8)
        part_bytes = max(_MIN_PART_BYTES, tensor.nbytes // _UPLOAD_THREADS)
        part_bytes = min(part_bytes, _SLOT_BYTES)
        rows = max(1, part_bytes * len(source) // tensor.nbytes)
        copies = self._pool.map(
            self._copy, torch.split(source, rows), torch.split(target, rows)
        )
        list(copies)  # waits for the threads, and raises their errors
        return out

    def _copy(self, source: Tensor, target: Tensor) -> None:
        slot, copy_end = self._slots.get()
        try:
            if copy_end is not None:
                copy_end.synchronize()
            with torch.inference_mode():
                staged = slot[: source.nbytes].view(source.shape)
                np.copyto(staged.numpy(), source.numpy())
                target.copy_(staged, non_blocking=True)
                if copy_end is not None:
                    copy_end.record()
        finally:
            # The slot is returned even after an error, because threads may wait for it.
            self._slots.put((slot, copy_end))


class WeightLoader:
    """Loads a rank's parts of the weights, and records which weights were not used.

    Args:
        pack: layers may copy a weight into a faster order (layers.Linear).
        on_load: called with the name of each weight when it is first loaded or ignored.
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
        self.pack = pack
        self.dtype = dtype
        self.device = torch.device(device)
        self._quantises = quantization is not None and quantization.stored == AT_LOAD
        self._source = source
        self._used: set[str] = set()
        # For each reason to dequantise: bytes of the weights before and after.
        self._dequantised_bytes: defaultdict[str, tuple[int, int]] = defaultdict(
            lambda: (0, 0)
        )

    @classmethod
    def open(
        cls,
        tensors: Mapping[str, StoredTensor] | None,
        quantization: Quantization | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int = 0,
        pack: bool = False,
        on_load: Callable[[str], None] | None = None,
    ) -> "WeightLoader":
        """Returns a loader of the tensors of files.

        Args:
            tensors: the tensors by name; None: random weights, made from names and
                `seed`.
        """
        source: StoredWeights | DummySource = DummySource(seed, device, quantization)
        if tensors is not None:
            upload = Upload(torch.device(device))
            source = StoredWeights(tensors, quantization, upload)
        return cls(
            source,
            dtype=dtype,
            device=device,
            pack=pack,
            quantization=quantization,
            on_load=on_load,
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
        """Loads a part of a weight to the device of this rank.

        A quantised weight is dequantised.

        Args:
            shape: the shape that the complete weight must have.
            rows, cols: the part; None: all.
            dtype: data type of the result; None: that of the loader.

        Raises:
            ModelLoadError: the weight is missing, or has another shape or an
                unsupported data type.
        """
        self._record_use(name)
        if rows is None:
            rows = range(shape[0])
        dtype = dtype or self.dtype
        weight = self._source.quantised(name, shape, rows, cols)
        if weight is not None:
            reason = "a kind of product without a kernel"
            return self._dequantise(weight, reason).to(dtype)
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
        """Loads a part of the matrix of a linear layer.

        The matrix stays quantised, or is quantised at load if the config requires that,
        provided that a kernel can multiply by it. Otherwise the result is a tensor as
        from `load`.

        Args:
            transposed: whether the file stores the matrix as [..., in, out]. This does
                not apply to a matrix that is quantised in the file.
        """
        self._record_use(name)
        if rows is None:
            rows = range(shape[0])
        weight = self._source.quantised(name, shape, rows, cols)
        if weight is None:
            if not (self._quantises or len(shape) > 2):
                return self.load(name, shape, rows=rows, cols=cols)
            stored_shape = shape
            if transposed:
                stored_shape = (*shape[:-2], shape[-1], shape[-2])
            # Complete rows are loaded and quantised, even if this rank needs only some
            # columns. So the scales are the same for every number of ranks.
            matrix = self.load(name, stored_shape, rows=rows)
            if transposed:
                matrix = matrix.mT
            if not self._quantises:
                return matrix if cols is None else matrix[..., cols.start : cols.stop]
            weight = quantise(matrix)
            if cols is not None:
                weight = weight.columns(cols)
        weight = weight.to(self.device, self.dtype)
        reason = products.unsupported_reason(weight)
        return weight if reason is None else self._dequantise(weight, reason)

    def _record_use(self, name: str) -> None:
        if self._on_load and name not in self._used:
            self._on_load(name)
        self._used.add(name)

    def _dequantise(self, weight: Quantized, reason: str) -> Tensor:
        matrix = weight.to(self.device, self.dtype).dequantise()
        before, after = self._dequantised_bytes[reason]
        before += sum(part.nbytes for part in weight.parts)
        after += matrix.nbytes
        self._dequantised_bytes[reason] = (before, after)
        return matrix

    def has(self, name: str) -> bool:
        return name in self._source.names()

    def ignore(self, *names: str) -> None:
        """Declares weights that the model does not need.

        A name that ends in a dot stands for all names with this prefix.
        """
        prefixes = tuple(name for name in names if name.endswith("."))
        ignored_names = set(names).difference(prefixes)
        if prefixes:
            ignored_names |= {
                name for name in self._source.names() if name.startswith(prefixes)
            }
        for name in ignored_names:
            self._record_use(name)

    def finish(self) -> None:
        """Logs the memory of dequantised weights, and checks that all weights were
        used.

        Raises:
            ModelLoadError: the files hold weights that were neither loaded nor ignored.
        """
        for reason, (before, after) in self._dequantised_bytes.items():
            _log.warning(
                "quantised weights are dequantised at load (%s): in %s they take %.3f "
                "GiB, not %.3f",
                reason,
                str(self.dtype).removeprefix("torch."),
                after / 2**30,
                before / 2**30,
            )
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
