"""From settings and model files to what an engine is started with, or the reason why it cannot be.

All that can be known without torch is found wrong here, before any process is started.
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

# The largest value of a request, and the largest one of a generation_config.json, which is no other
# than any above it: a temperature or penalty so large makes all tokens alike.
_REQUEST_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (2, 1e6),
    "repetition_penalty": (100, 1e6),
    "top_p": (1, 1),
    "top_k": (MAX_INT31, MAX_INT31),
    "max_new_tokens": (MAX_INT31, MAX_INT31),
}
_LIKELIEST_ALONE = 1e-6  # a top_p that only the likeliest token is in


class StartFailure(Exception):
    """Why the server cannot start, in a sentence for the operator."""


class Prepared(NamedTuple):
    config: EngineConfig
    model_config: ModelConfig
    defaults: GenerationConfig  # what requests get where they do not say


def prepare(settings: EngineSettings, secret: bytes, model_dir: Path) -> Prepared:
    """What to start.

    Raises:
        StartFailure, ValueError, OSError: options, model and machine do not go together.
    """
    model_config = read_config(model_dir, settings)
    defaults = _request_defaults(settings, model_dir)
    config = engine_config(settings, secret, model_dir, model_config)
    check_weights(config, model_config)
    layout = check_geometry(config, model_config)
    try:
        check_attention(config, model_config)
    except UnsupportedPool:
        if config.device != "cuda" or _has_gpu():
            raise  # else there is more to say: that there is no GPU, say the ranks
    check_staging(config, layout)  # better known before weights are loaded, as the next
    bind(settings.host, settings.side_channel_port, "--side-channel-port").close()
    config = config.model_copy(
        update={"scales": _kv_scales(settings, model_dir, model_config)}
    )
    check_scales(config, model_config)
    return Prepared(config, model_config, defaults)


def read_for_answers(prepared: Prepared) -> tuple[Tokenizer, str]:
    """The tokenizer, and the `system_fingerprint` of answers, for which weights' files are read."""
    config = prepared.config
    folder = Path(config.model_dir)
    template = Path(config.chat_template) if config.chat_template else None
    tokenizer = Tokenizer(folder, template)  # the sooner its mistakes are told
    warn_of_unknown_ends(tokenizer)
    found = fingerprint(
        prepared.model_config, folder, load_format=config.load_format, seed=config.seed
    )
    return tokenizer, system_fingerprint(found)


def warn_of_unknown_ends(tokenizer: Tokenizer) -> None:
    """Logs the end tokens of the model's files that the model cannot generate."""
    if not tokenizer.unknown_eos_ids:
        return
    others = ", ".join(map(str, tokenizer.eos_ids))
    logger.warning(
        "%s: the end tokens %s are beyond the model's vocabulary and are left out; %s. Correct "
        "eos_token_id in generation_config.json or config.json, or eos_token in "
        "tokenizer_config.json.",
        tokenizer.folder,
        ", ".join(map(str, tokenizer.unknown_eos_ids)),
        f"answers end with {others}" if others else "no token ends an answer",
    )


def engine_config(
    settings: EngineSettings, secret: bytes, model_dir: Path, model_config: ModelConfig
) -> EngineConfig:
    device, dtype = str(settings.device), str(settings.dtype)
    if device == "auto":
        device = "cuda" if _has_gpu() else "cpu"
    if dtype == "auto":
        # On a GPU the attention kernels and all products want 16 bits; files of full precision
        # or quantised (GGUF) name none of them.
        on_gpu = "float16" if model_config.dtype == "float16" else "bfloat16"
        dtype = "float32" if device == "cpu" else on_gpu
    fields = type(settings).model_fields.keys() & EngineConfig.model_fields.keys()
    options = {name: getattr(settings, name) for name in fields}
    options |= {
        "engine_id": f"{settings.role}-{secrets.token_hex(8)}",
        "incarnation": secrets.token_hex(8),  # that no other start of any engine has
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
        "itl_target_s": settings.itl_target_for(device),
    }
    return EngineConfig(**options)


def _request_defaults(settings: EngineSettings, model_dir: Path) -> GenerationConfig:
    """What requests get where they do not say, beside OpenAI's defaults."""
    if settings.generation_config == "none":
        return GenerationConfig()
    found = read_generation_config(model_dir)
    if given := found.model_dump(exclude_unset=True):
        told = ", ".join(f"{name} {value:g}" for name, value in given.items())
        logger.info(
            "requests that do not say get %s, of the model's generation_config.json "
            "(--generation-config none: OpenAI's defaults)",
            told,
        )
    return found


def read_generation_config(folder: Path) -> GenerationConfig:
    """What of the file requests can say, too; nothing where there is no such file. A value beyond
    the limits of requests that transformers serves is used all the same, and logged. Raises
    ModelLoadError for any other value that no request may have."""
    path = folder / "generation_config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
        known = {name: found.get(name) for name in GenerationConfig.model_fields}
        given = {name: value for name, value in known.items() if value is not None}
        served = _beyond_requests(given)
        for name, value in served.items():
            logger.warning(
                "%s: `%s` is %s, which no request may have; using %s",
                path,
                name,
                given[name],
                value,
            )
        config = validate(GenerationConfig, {**given, **dict.fromkeys(served)})
        return config.model_copy(update=served)
    except FileNotFoundError:
        return GenerationConfig()
    except (InvalidRequest, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{path}: {error} Correct it, or use --generation-config none."
        ) from error


def _beyond_requests(given: dict[str, Any]) -> dict[str, float]:
    """The values that transformers serves and requests may not have, as they are served here."""
    served: dict[str, float] = {}
    for name, value in given.items():
        if name not in _REQUEST_LIMITS or type(value) not in (int, float):
            continue
        limit, most = _REQUEST_LIMITS[name]
        if limit < value < math.inf:
            served[name] = min(value, most)
        elif name == "top_p" and value == 0:
            served[name] = _LIKELIEST_ALONE
    return served


def _kv_scales(
    settings: EngineSettings, model_dir: Path, model_config: ModelConfig
) -> tuple[float, ...]:
    """What FP8 KV is scaled by, and nothing for another dtype."""
    if settings.kv_cache_dtype == "auto":
        return ()
    scales = resolve_scales(
        settings.kv_scales, model_config, model_dir, load_format=settings.load_format
    )
    found = settings.kv_cache_dtype, min(scales), max(scales)
    logger.info("KV is stored as %s, with scales of %g to %g", *found)
    return scales


def _devices(settings: EngineSettings, device: str) -> list[int]:
    """The GPU of each rank of an engine on `device`."""
    if settings.devices and device != "cuda":
        raise StartFailure(
            f"--devices {','.join(map(str, settings.devices))} names GPUs and this server runs on "
            f"the CPU (--device {settings.device}; is the driver there, and torch built with "
            "CUDA?): leave it out, or see what `baton doctor` finds"
        )
    if not settings.devices:
        return list(range(settings.tp))
    if len(settings.devices) != settings.tp:
        raise StartFailure(
            f"--devices names {len(settings.devices)} GPUs ({settings.devices}) for {settings.tp} "
            "ranks: name one for each, or change --tp"
        )
    return list(settings.devices)


def _has_gpu() -> bool:
    """Whether an NVIDIA GPU is here, without loading torch."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and b"GPU" in found.stdout
