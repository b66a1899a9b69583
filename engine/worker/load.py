"""Opens the device of a rank, loads the weights, and compiles the attention kernels at
the same time.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from attention.registry import backend_class, compile_modules
from engine.config import EngineConfig
from engine.geometry import attention_spec, check_attention
from engine.worker.memory import MemoryTooSmall, explaining_oom
from model.architectures.quantization import AT_LOAD, Quantization
from model.config import ModelConfig
from model.decoder import CausalLM, StepModel, load_model
from model.files.safetensors_files import StoredTensor, read_headers
from model.parallel import Parallel
from model.sizes import tp_sizes, weight_bytes
from protocol.ipc.wire import CannotListen
from protocol.settings.machine import free_host_bytes

_STREAM_PRIORITY = -1  # a higher priority than CUDA's default, which is 0
_REPORT_INTERVAL_S = 3.0

# A function that loads the model of one rank to its device, such as `load`.
LoadModel = Callable[
    [EngineConfig, ModelConfig, Parallel, torch.device, Callable[[str], None]],
    StepModel,
]


class CannotStart(Exception):
    """The engine cannot start because of an option, the model or this machine. The
    message explains the reason to the user."""


@contextmanager
def explaining_failures() -> Iterator[None]:
    """Converts errors that have a message for the user to CannotStart. All other errors
    are defects of Baton and pass unchanged."""
    try:
        yield
    except (ValueError, MemoryTooSmall, CannotListen) as error:
        raise CannotStart(str(error)) from error


def describe_failure(error: BaseException) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextmanager
def compiling_kernels(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    report: Callable[[str], None],
) -> Iterator[None]:
    """Compiles the attention kernels of a model while the caller loads its weights.

    Args:
        report: called with descriptions of the progress.

    Raises:
        UnsupportedPool: the attention backend cannot serve the model.
    """
    # Check the backend before minutes are spent on loading weights.
    check_attention(config, model_config)
    backend_class(config.attention_backend, config.device, model_config.kv_components)
    pool = ThreadPoolExecutor(1, "compile")
    compiling = pool.submit(
        compile_modules,
        config.attention_backend,
        attention_spec(config, model_config, model_config.num_heads // config.tp),
        device,
        free_bytes=free_host_bytes(),
    )
    pool.shutdown(wait=False)
    yield
    if not compiling.done():
        report("compiling kernels")
    compiling.result()


def load(
    config: EngineConfig,
    model_config: ModelConfig,
    parallel: Parallel,
    device: torch.device,
    report: Callable[[str], None],
) -> CausalLM:
    """Loads the weights of one rank to its device.

    Args:
        report: called with descriptions of the progress.

    Raises:
        MemoryTooSmall: the weights do not fit.
    """
    # On a CPU, the memory was checked before the ranks were started (check_weights in
    # engine/geometry.py).
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        check_weights_fit(model_config, free_bytes, total_bytes, config, str(device))
    is_dummy = config.load_format == "dummy"
    fix = f"use a larger --tp than {config.tp}, or free the GPU"
    with explaining_oom(f"a model with weights in {config.dtype}", device, fix):
        return load_model(
            model_config,
            config.model_dir,
            dtype=getattr(torch, config.dtype),
            device=device,
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
            pack=config.pack_weights,
            on_load=LoadProgress(
                {} if is_dummy else read_headers(Path(config.model_dir)), report
            ),
        )


class LoadProgress:
    """Reports periodically how many of a model's weights are loaded. The loader calls
    this object with the name of each weight, just before it loads the weight.

    Args:
        stored: the tensors of the model's files, by name; empty for dummy weights.
        report: called with descriptions of the progress.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Count by module: a quantized weight is stored as several tensors, and none of
        # these tensors has the name of the weight.
        self._num_bytes: Counter[str] = Counter()
        for name, tensor in stored.items():
            self._num_bytes[_module(name)] += tensor.stop - tensor.start
        self._num_tensors = Counter(map(_module, stored))
        self._total_bytes = self._num_bytes.total()
        self._total_tensors = len(stored)
        self._loaded_bytes = 0
        self._loaded_tensors = 0
        self._report = report
        self._clock = clock
        self._started_s = clock()
        self._reported_s = self._started_s - _REPORT_INTERVAL_S

    def __call__(self, name: str) -> None:
        now = self._clock()
        if now - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now
            self._report(f"loading weights{self._progress(now - self._started_s)}")
        # Count this weight in advance. It will be loaded before the next call, and
        # reports are made only during calls.
        module = _module(name)
        self._loaded_bytes += self._num_bytes.pop(module, 0)
        if self._total_bytes:
            self._loaded_tensors += self._num_tensors.pop(module, 0)
        else:
            self._loaded_tensors += 1

    def _progress(self, elapsed_s: float) -> str:
        if not self._total_bytes:
            return f": {self._loaded_tensors} tensors"
        loaded_gib = self._loaded_bytes / 2**30
        total_gib = self._total_bytes / 2**30
        progress = (
            f": {loaded_gib:.2f} of {total_gib:.2f} GiB, "
            f"{self._loaded_tensors} of {self._total_tensors} tensors"
        )
        if not self._loaded_bytes:
            return progress
        remaining_s = elapsed_s * (total_gib / loaded_gib - 1)
        return f"{progress}, about {remaining_s:.0f} s left"


def _module(name: str) -> str:
    """The name of the module that a weight belongs to."""
    return name.rpartition(".")[0] or name


def check_weights_fit(
    model: ModelConfig,
    free_bytes: int,
    total_bytes: int,
    config: EngineConfig,
    device: str,
) -> None:
    """Raises MemoryTooSmall if a rank's weights are larger than the free memory of its
    GPU, before minutes are spent on loading them."""

    def rank_bytes(model: ModelConfig) -> int:
        """The bytes of one rank's weights; a lower bound, because some weights are not
        divided among the ranks."""
        itemsize = getattr(torch, config.dtype).itemsize
        return weight_bytes(model, itemsize, keep_quantised=True) // config.tp

    needed_bytes = rank_bytes(model)
    if needed_bytes <= free_bytes:
        return
    fixes = []
    min_ranks = needed_bytes * config.tp / max(free_bytes, 1)
    sufficient_sizes = [n for n in tp_sizes(model, config.ep) if n >= min_ranks]
    if sufficient_sizes:
        fixes.append(f"--tp {sufficient_sizes[0]} or more")
    smaller = replace(model, quantization=Quantization(AT_LOAD))
    if model.quantization is None and rank_bytes(smaller) <= free_bytes:
        fixes.append("--quantization fp8")
    fix = ", or ".join(fixes or ["larger GPUs"])
    needed_gib = needed_bytes / 2**30
    free_gib = free_bytes / 2**30
    total_gib = total_bytes / 2**30
    raise MemoryTooSmall(
        f"the model's weights in {config.dtype} take {needed_gib:.2f} GiB on each of "
        f"{config.tp} rank(s), but {device} has {free_gib:.2f} of its {total_gib:.2f} "
        f"GiB free: {needed_gib - free_gib:.2f} GiB are missing; use {fix}, or free "
        "the GPU"
    )


def check_devices(config: EngineConfig) -> None:
    """Raises ValueError if this machine lacks the GPU of any of its ranks. Every rank
    checks the GPUs of all these ranks, so that all fail together: if one rank failed
    alone, the others would wait for it.
    """
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError(
            "--device is cuda, but torch finds no GPU on this machine: use --device cpu"
        )
    count = torch.cuda.device_count()
    for rank, index in enumerate(config.devices, config.node_ranks.start):
        if index >= count:
            raise ValueError(
                f"rank {rank} is to run on GPU {index}, but this machine has {count} "
                "GPU(s), numbered from 0: choose GPUs with --devices, or use a smaller "
                "--tp"
            )


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """Returns the device of a rank. If it is a GPU, makes the GPU and a new stream with
    a high priority current in this thread."""
    if config.device != "cuda":
        return torch.device(config.device)
    check_devices(config)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            raise ValueError(
                f"{name} requests expandable segments, which other processes cannot "
                f"map, so they could not pull KV from this server: unset {name}"
            )
    device = torch.device("cuda", config.device_of(rank))
    torch.cuda.set_device(device)
    # Steps have a higher priority than the pulls of this process, which use streams of
    # priority 0. So pulls do not slow down steps.
    stream = torch.cuda.Stream(  # type: ignore[no-untyped-call, unused-ignore]
        device, priority=_STREAM_PRIORITY
    )
    torch.cuda.set_stream(stream)
    return device
