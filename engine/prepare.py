"""Derives the configuration of an engine from settings and model files, or reports why
the engine cannot start.

This module makes all checks that need no torch, before any engine process starts.
"""

import logging
import secrets
from pathlib import Path
from typing import NamedTuple

from attention.support import UnsupportedPool
from engine.config import EngineConfig
from engine.generation_config import read_generation_config
from engine.geometry import (
    check_attention,
    check_geometry,
    check_scales,
    check_staging,
    check_weights,
    read_config,
)
from engine.speculation.draft_model import check_requested_draft_model
from engine.speculation.states.state_model import requested_state_model
from engine.text.tokenizer import Tokenizer
from model.config import ModelConfig
from model.files.kv_scales import resolve_scales
from model.sizes import fingerprint
from protocol.ipc.wire import bind
from protocol.openai.sampling import GenerationConfig
from protocol.settings.machine import available_cores, has_gpu
from protocol.settings.settings import EngineSettings
from protocol.version import system_fingerprint

logger = logging.getLogger("baton.serve")


class StartFailure(Exception):
    """The server cannot start, or its engine has failed later (engine/serve.py). The
    message gives the operator the reason."""


class Prepared(NamedTuple):
    """A checked configuration.

    Attributes:
        defaults: the values of request fields that a client omits.
    """

    config: EngineConfig
    model_config: ModelConfig
    defaults: GenerationConfig


def prepare(settings: EngineSettings, secret: bytes, model_dir: Path) -> Prepared:
    """Makes the engine's configuration, and checks it against the model and the
    machine.

    Raises:
        StartFailure, ValueError, OSError: the options are wrong for this model or for
            this machine.
    """
    model_config = read_config(model_dir, settings)
    defaults = _request_defaults(settings, model_dir)
    config = engine_config(settings, secret, model_dir, model_config)
    check_weights(config, model_config)
    layout = check_geometry(config, model_config)
    try:
        check_attention(config, model_config)
    except UnsupportedPool:
        # If the machine has no GPU, the ranks report this later, in a clearer message.
        if config.device != "cuda" or has_gpu():
            raise
    # Check the staging memory and the port before the ranks spend minutes on loading
    # the weights.
    check_staging(config, layout)
    if settings.node_rank == 0:
        bind(settings.host, settings.side_channel_port, "--side-channel-port").close()
    config = config.model_copy(
        update={"scales": _kv_scales(settings, model_dir, model_config)}
    )
    check_scales(config, model_config)
    check_requested_draft_model(config, model_config)
    requested_state_model(config, model_config)
    return Prepared(config, model_config, defaults)


def read_for_answers(prepared: Prepared) -> tuple[Tokenizer, str]:
    """Returns the tokenizer and the `system_fingerprint` of responses. Reads the
    weight files for the fingerprint."""
    config = prepared.config
    folder = Path(config.model_dir)
    template = Path(config.chat_template) if config.chat_template else None
    # The tokenizer is read first, so that errors in its files are reported early.
    tokenizer = Tokenizer(folder, template)
    warn_of_unknown_eos(tokenizer)
    model_fingerprint = fingerprint(
        prepared.model_config, folder, load_format=config.load_format, seed=config.seed
    )
    return tokenizer, system_fingerprint(model_fingerprint)


def warn_of_unknown_eos(tokenizer: Tokenizer) -> None:
    """Warns if the model's files name end tokens that the model cannot generate."""
    if not tokenizer.unknown_eos_ids:
        return
    consequence = "no token ends a response"
    if tokenizer.eos_ids:
        eos_ids = ", ".join(map(str, tokenizer.eos_ids))
        consequence = f"responses end with {eos_ids}"
    logger.warning(
        "%s: the end tokens %s are not in the model's vocabulary and are ignored; %s. "
        "Correct eos_token_id in generation_config.json or config.json, or eos_token "
        "in tokenizer_config.json.",
        tokenizer.folder,
        ", ".join(map(str, tokenizer.unknown_eos_ids)),
        consequence,
    )


def engine_config(
    settings: EngineSettings, secret: bytes, model_dir: Path, model_config: ModelConfig
) -> EngineConfig:
    """Makes the engine's configuration. Does not check it or set its `scales`."""
    device = str(settings.device)
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    dtype = str(settings.dtype)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    elif dtype == "auto":
        # On a GPU, the attention kernels and all matrix products need a 16-bit type.
        # Models in full precision and quantized models (GGUF) name no 16-bit type.
        dtype = "float16" if model_config.dtype == "float16" else "bfloat16"
    ranks_per_node = settings.tp // settings.nnodes
    fields = type(settings).model_fields.keys() & EngineConfig.model_fields.keys()
    options = {name: getattr(settings, name) for name in fields}
    options |= {
        "engine_id": f"{settings.role}-{secrets.token_hex(8)}",
        "incarnation": secrets.token_hex(8),  # unique among all starts of all engines
        "model_dir": str(model_dir),
        "device": device,
        "devices": _devices(settings, device),
        "dtype": dtype,
        "max_num_batched_tokens": settings.batched_tokens_for(device),
        "max_num_seqs": settings.num_seqs_for(device),
        "threads": settings.threads or max(1, available_cores() // ranks_per_node),
        "cluster_secret": secret,
        "side_channel_host": settings.host,
        "side_channel_advertise": settings.advertised_side_channel_host or "",
        "transfer": settings.transfer_for(device),
    }
    return EngineConfig(**options)


def _request_defaults(settings: EngineSettings, model_dir: Path) -> GenerationConfig:
    """Returns and logs the model's defaults for request fields. They replace OpenAI's
    defaults."""
    if settings.generation_config == "none":
        return GenerationConfig()
    defaults = read_generation_config(model_dir)
    fields = defaults.model_dump(exclude_unset=True)
    if fields:
        logger.info(
            "Defaults of request fields, from the model's generation_config.json: %s. "
            "Use --generation-config none for OpenAI's defaults.",
            ", ".join(f"{name} {value:g}" for name, value in fields.items()),
        )
    return defaults


def _kv_scales(
    settings: EngineSettings, model_dir: Path, model_config: ModelConfig
) -> tuple[float, ...]:
    """Returns the scales of FP8 KV, and logs them; empty if KV is not FP8."""
    if settings.kv_cache_dtype == "auto":
        return ()
    scales = resolve_scales(
        settings.kv_scales, model_config, model_dir, load_format=settings.load_format
    )
    logger.info(
        "KV is stored as %s, with scales of %g to %g",
        settings.kv_cache_dtype,
        min(scales),
        max(scales),
    )
    return scales


def _devices(settings: EngineSettings, device: str) -> list[int]:
    """Returns the GPU numbers of the ranks.

    Raises:
        StartFailure: --devices does not name one GPU for each rank, or is set although
            the device is the CPU.
    """
    if settings.devices and device != "cuda":
        numbers = ",".join(map(str, settings.devices))
        raise StartFailure(
            f"--devices {numbers} names GPUs, but this server runs on the CPU "
            f"(--device {settings.device}): leave --devices out, or run `baton doctor` "
            "to find out why no GPU is usable"
        )
    num_ranks = settings.tp // settings.nnodes
    if not settings.devices:
        return list(range(num_ranks))
    if len(settings.devices) != num_ranks:
        where = " on each node" if settings.nnodes > 1 else ""
        raise StartFailure(
            f"--devices names {len(settings.devices)} GPUs ({settings.devices}), but "
            f"there are {num_ranks} ranks{where}: name one GPU for each rank{where}, "
            "or change --tp"
        )
    return list(settings.devices)
