"""Derives the configuration of an engine from settings and model files, or the reason
why it cannot start.

Whatever can be checked without torch is checked here, before any process is started.
"""

import json
import logging
import math
import secrets
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

from attention.support import UnsupportedPool
from engine.config import EngineConfig
from engine.geometry import (
    check_attention,
    check_geometry,
    check_scales,
    check_staging,
    check_weights,
    read_config,
)
from engine.text.tokenizer import Tokenizer
from model.config import ModelConfig
from model.errors import ModelLoadError
from model.files.kv_scales import resolve_scales
from model.sizes import fingerprint
from protocol.errors import InvalidRequest
from protocol.ipc.wire import bind
from protocol.openai.requests import validate
from protocol.openai.sampling import MAX_INT31, GenerationConfig
from protocol.settings.machine import available_cores
from protocol.settings.settings import EngineSettings
from protocol.version import system_fingerprint

logger = logging.getLogger("baton.serve")

# For each field: the largest value of a request, and the largest value that is taken
# from generation_config.json. Values above the latter have the same effect: so large a
# temperature or penalty makes all tokens equally likely.
_REQUEST_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (2, 1e6),
    "repetition_penalty": (100, 1e6),
    "top_p": (1, 1),
    "top_k": (MAX_INT31, MAX_INT31),
    "max_new_tokens": (MAX_INT31, MAX_INT31),
}
_GREEDY_TOP_P = 1e-6  # a top_p that allows only the likeliest token


class StartFailure(Exception):
    """The server cannot start. The message explains it to the operator."""


class Prepared(NamedTuple):
    """A checked configuration, and the defaults for fields that a request omits."""

    config: EngineConfig
    model_config: ModelConfig
    defaults: GenerationConfig


def prepare(settings: EngineSettings, secret: bytes, model_dir: Path) -> Prepared:
    """Checks the settings against the model and the machine.

    Raises:
        StartFailure, ValueError, OSError: options, model and machine do not fit
            together.
    """
    model_config = read_config(model_dir, settings)
    defaults = _request_defaults(settings, model_dir)
    config = engine_config(settings, secret, model_dir, model_config)
    check_weights(config, model_config)
    layout = check_geometry(config, model_config)
    try:
        check_attention(config, model_config)
    except UnsupportedPool:
        # If the reason is that there is no GPU, the ranks report it more clearly.
        if config.device != "cuda" or _has_gpu():
            raise
    # These are checked here because loading weights takes long.
    check_staging(config, layout)
    bind(settings.host, settings.side_channel_port, "--side-channel-port").close()
    config = config.model_copy(
        update={"scales": _kv_scales(settings, model_dir, model_config)}
    )
    check_scales(config, model_config)
    return Prepared(config, model_config, defaults)


def read_for_answers(prepared: Prepared) -> tuple[Tokenizer, str]:
    """The tokenizer, and the `system_fingerprint` of responses. This reads the files of
    the weights."""
    config = prepared.config
    folder = Path(config.model_dir)
    template = Path(config.chat_template) if config.chat_template else None
    # The tokenizer comes first, so that its errors are reported early.
    tokenizer = Tokenizer(folder, template)
    warn_of_unknown_eos(tokenizer)
    model_fingerprint = fingerprint(
        prepared.model_config, folder, load_format=config.load_format, seed=config.seed
    )
    return tokenizer, system_fingerprint(model_fingerprint)


def warn_of_unknown_eos(tokenizer: Tokenizer) -> None:
    """Logs the end tokens of the model's files that the model cannot generate."""
    if not tokenizer.unknown_eos_ids:
        return
    consequence = "no token ends a response"
    if tokenizer.eos_ids:
        eos_ids = ", ".join(map(str, tokenizer.eos_ids))
        consequence = f"responses end with {eos_ids}"
    logger.warning(
        "%s: the end tokens %s are beyond the model's vocabulary and are left out; %s. "
        "Correct eos_token_id in generation_config.json or config.json, or eos_token in "
        "tokenizer_config.json.",
        tokenizer.folder,
        ", ".join(map(str, tokenizer.unknown_eos_ids)),
        consequence,
    )


def engine_config(
    settings: EngineSettings, secret: bytes, model_dir: Path, model_config: ModelConfig
) -> EngineConfig:
    device = str(settings.device)
    if device == "auto":
        device = "cuda" if _has_gpu() else "cpu"
    dtype = str(settings.dtype)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    elif dtype == "auto":
        # The attention kernels and all matrix products of a GPU need 16 bits. Files in
        # full precision or quantised (GGUF) name no 16-bit type.
        dtype = "float16" if model_config.dtype == "float16" else "bfloat16"
    fields = type(settings).model_fields.keys() & EngineConfig.model_fields.keys()
    options = {name: getattr(settings, name) for name in fields}
    options |= {
        "engine_id": f"{settings.role}-{secrets.token_hex(8)}",
        "incarnation": secrets.token_hex(8),  # unique to this start of any engine
        "model_dir": str(model_dir),
        "device": device,
        "devices": _devices(settings, device),
        "dtype": dtype,
        "max_num_batched_tokens": settings.batched_tokens_for(device),
        "threads": settings.threads or max(1, available_cores() // settings.tp),
        "cluster_secret": secret,
        "side_channel_host": settings.host,
        "side_channel_advertise": settings.advertised_host or "",
        "transfer": settings.transfer_for(device),
    }
    return EngineConfig(**options)


def _request_defaults(settings: EngineSettings, model_dir: Path) -> GenerationConfig:
    """The defaults for fields that a request omits, in addition to OpenAI's."""
    if settings.generation_config == "none":
        return GenerationConfig()
    defaults = read_generation_config(model_dir)
    fields = defaults.model_dump(exclude_unset=True)
    if fields:
        logger.info(
            "Requests that omit them get %s, from the model's generation_config.json. "
            "Use --generation-config none for OpenAI's defaults.",
            ", ".join(f"{name} {value:g}" for name, value in fields.items()),
        )
    return defaults


def read_generation_config(folder: Path) -> GenerationConfig:
    """The fields of generation_config.json that requests also have; none if there is no
    such file.

    A value beyond the limits of requests that transformers accepts is used, and logged.

    Raises:
        ModelLoadError: another value is not allowed in a request.
    """
    path = folder / "generation_config.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        values: dict[str, Any] = {}
        for name in GenerationConfig.model_fields:
            if content.get(name) is not None:
                values[name] = content[name]
        clamped = _clamp_beyond_limits(values)
        for name, value in clamped.items():
            logger.warning(
                "%s: `%s` is %s, which no request may have; using %s",
                path,
                name,
                values[name],
                value,
            )
        config = validate(GenerationConfig, {**values, **dict.fromkeys(clamped)})
        return config.model_copy(update=clamped)
    except FileNotFoundError:
        return GenerationConfig()
    except (InvalidRequest, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: {error} Correct it, or use --generation-config none."
        ) from error


def _clamp_beyond_limits(values: dict[str, Any]) -> dict[str, float]:
    """Replacements for the values that transformers accepts and requests may not have."""
    clamped: dict[str, float] = {}
    for name, value in values.items():
        if name not in _REQUEST_LIMITS or type(value) not in (int, float):
            continue
        request_limit, max_value = _REQUEST_LIMITS[name]
        if request_limit < value < math.inf:
            clamped[name] = min(value, max_value)
        elif name == "top_p" and value == 0:
            clamped[name] = _GREEDY_TOP_P
    return clamped


def _kv_scales(
    settings: EngineSettings, model_dir: Path, model_config: ModelConfig
) -> tuple[float, ...]:
    """The scales of FP8 KV; empty for another dtype."""
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
    """The GPU of each rank of an engine on `device`."""
    if settings.devices and device != "cuda":
        numbers = ",".join(map(str, settings.devices))
        raise StartFailure(
            f"--devices {numbers} names GPUs and this server runs on the CPU (--device "
            f"{settings.device}; is the driver there, and torch built with CUDA?): leave "
            "it out, or see what `baton doctor` finds"
        )
    if not settings.devices:
        return list(range(settings.tp))
    if len(settings.devices) != settings.tp:
        raise StartFailure(
            f"--devices names {len(settings.devices)} GPUs ({settings.devices}) for "
            f"{settings.tp} ranks: name one for each, or change --tp"
        )
    return list(settings.devices)


def _has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU. Does not load torch."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and b"GPU" in listing.stdout
