"""A rank's device and weights, at start; the attention kernels compile meanwhile."""

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
from engine.geometry import check_attention, wanted_of
from engine.worker.memory import MemoryTooSmall, fitting
from model.architectures.quantization import AT_LOAD, Quantization
from model.config import ModelConfig
from model.decoder import CausalLM, load_model
from model.files.safetensors_files import StoredTensor, read_headers
from model.parallel import Parallel
from model.sizes import tp_sizes, weight_bytes
from protocol.ipc.wire import CannotListen
from protocol.settings.machine import free_host_bytes

_STREAM_PRIORITY = -1
_TELL_EVERY_S = 3.0


class CannotStart(Exception):
    """What an option, the model or this machine does not permit, in a sentence for the user."""


@contextmanager
def starting() -> Iterator[None]:
    """Tells what explains itself, while starting, from our own bugs."""
    try:
        yield
    except (ValueError, MemoryTooSmall, CannotListen) as error:
        raise CannotStart(str(error)) from error


def reason_of(error: BaseException) -> str:
    if isinstance(error, CannotStart):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def load(
    config: EngineConfig,
    model_config: ModelConfig,
    parallel: Parallel,
    device: torch.device,
    tell: Callable[[str], None],
) -> CausalLM:
    """The weights of one rank on its device; compiled kernels are there when it returns. `tell` is
    told how far that is."""
    # What cannot attend is refused before minutes are spent on loading weights.
    check_attention(config, model_config)
    backend_class(config.attention_backend, config.device, model_config.kv_components)
    pool = ThreadPoolExecutor(1, "compile")
    compiling = pool.submit(
        compile_modules,
        config.attention_backend,
        wanted_of(config, model_config, model_config.num_heads // config.tp),
        device,
        free_bytes=free_host_bytes(),
    )
    pool.shutdown(wait=False)
    if (
        device.type == "cuda"
    ):  # a machine's memory is looked at before its ranks are started
        check_weights_fit(
            model_config, *torch.cuda.mem_get_info(device), config, str(device)
        )
    is_dummy = config.load_format == "dummy"
    fix = f"use a larger --tp than {config.tp}, or free the GPU"
    with fitting(f"a model with weights in {config.dtype}", device, fix):
        model = load_model(
            model_config,
            config.model_dir,
            dtype=getattr(torch, config.dtype),
            device=device,
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
            pack=config.pack_weights,
            on_load=LoadProgress(
                {} if is_dummy else read_headers(Path(config.model_dir)), tell
            ),
        )
    if not compiling.done():
        tell("compiling kernels")
    compiling.result()
    return model


class LoadProgress:
    """Tells, from time to time, how many of a model's weights are loaded: call it with each name.

    Args:
        stored: the tensors of its files; none where weights are made up.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A quantised weight is in several tensors, none of which has its name.
        self._sizes: Counter[str] = Counter()
        for name, tensor in stored.items():
            self._sizes[_module(name)] += tensor.stop - tensor.start
        self._of_module = Counter(map(_module, stored))
        self._total, self._tell, self._clock = self._sizes.total(), tell, clock
        self._num_stored = len(stored)
        self._done = self._count = 0
        self._begun = clock()
        self._told = self._begun - _TELL_EVERY_S

    def __call__(self, name: str) -> None:
        now = self._clock()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            self._tell(f"loading weights{self._how_far(now - self._begun)}")
        # What was loaded when the next one is asked for.
        self._done += self._sizes.pop(_module(name), 0)
        self._count += self._of_module.pop(_module(name), 0) if self._total else 1

    def _how_far(self, took_s: float) -> str:
        if not self._total:
            return f": {self._count} tensors"
        done, total = (n / 2**30 for n in (self._done, self._total))
        told = f": {done:.2f} of {total:.2f} GiB, {self._count} of {self._num_stored} tensors"
        if not self._done:
            return told
        return f"{told}, about {took_s * (total / done - 1):.0f} s left"


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def check_weights_fit(
    model: ModelConfig,
    free_bytes: int,
    total_bytes: int,
    config: EngineConfig,
    device: str,
) -> None:
    """Raises MemoryTooSmall before minutes are spent on loading what cannot fit."""

    def of_rank(model: ModelConfig) -> int:  # at least: some are whole on each
        itemsize = getattr(torch, config.dtype).itemsize
        return weight_bytes(model, itemsize, keep_quantised=True) // config.tp

    if (needed_bytes := of_rank(model)) <= free_bytes:
        return
    needed, free, total = (n / 2**30 for n in (needed_bytes, free_bytes, total_bytes))
    least = needed_bytes * config.tp / max(free_bytes, 1)
    fixes = [f"--tp {n} or more" for n in tp_sizes(model, config.ep) if n >= least][:1]
    smaller = replace(model, quantization=Quantization(AT_LOAD))
    if model.quantization is None and of_rank(smaller) <= free_bytes:
        fixes.append("--quantization fp8")
    raise MemoryTooSmall(
        f"the model's weights in {config.dtype} take {needed:.2f} GiB on each of {config.tp} "
        f"rank(s), but {device} has {free:.2f} of its {total:.2f} GiB free: {needed - free:.2f} "
        f"GiB are missing; use {', or '.join(fixes or ['larger GPUs'])}, or free the GPU"
    )


def check_devices(config: EngineConfig) -> None:
    """Every rank looks at all ranks' GPUs, before they wait for each other. Raises ValueError."""
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no GPU here: use --device cpu")
    count = torch.cuda.device_count()
    for rank, index in enumerate(config.devices):
        if index >= count:
            raise ValueError(
                f"rank {rank} is to run on GPU {index}, but this machine has {count} "
                f"(0 to {count - 1}): choose others with --devices, or a smaller --tp"
            )


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank, made current in this thread where it is a GPU."""
    if config.device != "cuda":
        return torch.device(config.device)
    check_devices(config)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ValueError(
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, whose memory other processes "
            "cannot map: KV could not be pulled from here; unset it"
        )
    device = torch.device("cuda", config.devices[rank])
    torch.cuda.set_device(device)
    # Above the pulls of this process (their streams have priority 0), so that they slow no step.
    torch.cuda.set_stream(torch.cuda.Stream(device, priority=_STREAM_PRIORITY))  # type: ignore[no-untyped-call, unused-ignore]
    return device
