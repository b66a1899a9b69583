"""A rank's device and weights, at start; the attention kernels compile meanwhile."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from attention.registry import backend_class, compile_modules
from engine.config import EngineConfig
from engine.geometry import check_attention, wanted_of
from engine.process.host_memory import free_host_bytes
from engine.worker.memory import check_weights_fit, fitting
from model.base import CausalLM
from model.config import ModelConfig
from model.files import num_weights
from model.parallel import Parallel
from model.registry import load_model
from model.sizes import num_elements

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_STREAM_PRIORITY = -1


def load(
    config: EngineConfig, model_config: ModelConfig, parallel: Parallel, device: torch.device
) -> CausalLM:
    """The weights of one rank on its device; compiled kernels are there when it returns."""
    # What cannot attend is refused before minutes are spent on loading weights.
    check_attention(config, model_config)
    backend_class(config.attention_backend, config.device, model_config.kv_components)
    compiling = _compile_beside(config, model_config, device)
    _check_weights_fit(config, model_config, device)
    fix = f"use a larger --tp than {config.tp}, or free the GPU"
    with fitting(f"a model with weights in {config.dtype}", device, fix):
        model = load_model(
            model_config,
            config.model_dir,
            dtype=DTYPES[config.dtype],
            device=device,
            parallel=parallel,
            load_format=config.load_format,
            seed=config.seed,
            pack=config.pack_weights,
        )
    compiling.result()
    return model


def _compile_beside(config: EngineConfig, model: ModelConfig, device: torch.device) -> Future[None]:
    """Has what is missing of the attention kernels compiled while weights are loaded."""
    pool = ThreadPoolExecutor(1, "compile")
    done = pool.submit(
        compile_modules,
        config.attention_backend,
        wanted_of(config, model, model.num_heads // config.tp),
        device,
        appends=config.dcp > 1,
        free_bytes=free_host_bytes(),
    )
    pool.shutdown(wait=False)
    return done


def _check_weights_fit(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Of a GPU; a machine's memory is looked at before its ranks are started."""
    if config.device != "cuda":
        return
    is_dummy = config.load_format == "dummy"
    elements = num_elements(model) if is_dummy else num_weights(Path(config.model_dir))
    free, total = torch.cuda.mem_get_info(device)
    needed = elements // config.tp * DTYPES[config.dtype].itemsize  # more: some are whole
    check_weights_fit(needed, free, total, config=config, device=str(device))


def check_devices(config: EngineConfig) -> None:
    """Every rank looks at all ranks' GPUs, before they wait for each other.

    Raises:
        ValueError: one is not there.
    """
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
    index = config.devices[rank]
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ValueError(
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, whose memory other processes "
            "cannot map: KV could not be pulled from here; unset it"
        )
    torch.cuda.set_device(index)
    # Above the pulls of this process (their streams have priority 0), so that they slow no step.
    torch.cuda.set_stream(torch.cuda.Stream(index, priority=_STREAM_PRIORITY))  # type: ignore[no-untyped-call, unused-ignore]
    return torch.device("cuda", index)
