"""MTP layers and EAGLE-3: drafters that read hidden states of the engine's model.

This module reads and checks the files of these drafters, without torch, before any
engine process starts.
"""

import dataclasses
from pathlib import Path

from engine.config import EngineConfig
from engine.geometry import check_attention
from engine.speculation.draft_model import (
    DraftModelError,
    DraftModelSpec,
    check_windows,
    naming_draft_model,
)
from model.config import ModelConfig
from model.drafters.eagle3_config import load_eagle3_config
from model.drafters.mtp_weights import mtp_config, mtp_names
from model.files.safetensors_files import read_headers
from model.sizes import check_parallelism
from protocol.settings.speculation import Speculation

_STATE_KINDS = ("mtp", "eagle3")


def requested_state_model(
    config: EngineConfig, target: ModelConfig
) -> DraftModelSpec | None:
    """Returns the drafter that --speculate names; None if it names no drafter that
    reads hidden states. A prefill server runs such a drafter, too, and decode servers
    pull the draft KV. Only the server that computes a prompt has the hidden states of
    the prompt.

    Args:
        config: the engine's configuration.
        target: the model that the engine serves.

    Raises:
        ModelError, DraftModelError: the engine cannot use the drafter. The message
            names the option, the reason and the fix.
    """
    speculation = config.speculation
    if speculation.kind not in _STATE_KINDS:
        return None
    return read_state_model(config, target, speculation)


def read_state_model(
    config: EngineConfig, target: ModelConfig, speculation: Speculation
) -> DraftModelSpec:
    """Reads the files of an MTP layer or an EAGLE-3 drafter, and checks that the ranks
    of the engine can serve it.

    Raises:
        ModelError, DraftModelError: the engine cannot use the drafter.
    """
    kind = speculation.kind
    if config.dcp > 1:
        raise DraftModelError(
            f"--speculate {kind} needs the hidden states of all tokens on every rank, "
            f"but the ranks divide the tokens with --dcp {config.dcp}: use --dcp 1, "
            "or --speculate ngram:4"
        )
    check_windows(target, config.model_dir, kind)
    folder = config.model_dir
    name = "mtp: the MTP layer of this model"
    if kind == "eagle3":
        folder = speculation.folder
        name = f"eagle3: the drafter {folder}"
    with naming_draft_model(name):
        model_config = _read_config(config, target, folder, kind)
        draft_config = config.model_copy(
            update={
                "model_dir": folder,
                "kv_cache_dtype": "auto",
                "scales": (),
            }
        )
        check_parallelism(
            model_config, config.tp, ep=1 if kind == "eagle3" else config.ep
        )
        check_attention(draft_config, model_config)
    return DraftModelSpec(
        draft_config, model_config, 1, speculation.max_proposals, name
    )


def _read_config(
    config: EngineConfig, target: ModelConfig, folder: str, kind: str
) -> ModelConfig:
    """The config of the drafter's layer, with `max_position` of the target."""
    is_dummy = config.load_format == "dummy"
    if kind == "mtp":
        mtp_names(target, None if is_dummy else read_headers(Path(folder)))
        return mtp_config(target)
    layer = load_eagle3_config(Path(folder), target, load_format=config.load_format)
    return dataclasses.replace(layer.model, max_position=target.max_position)
