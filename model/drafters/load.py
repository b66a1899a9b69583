"""Loads drafters that read hidden states of their target."""

from collections.abc import Callable
from pathlib import Path

import torch

from model.decoder import CausalLM
from model.drafters.draft_model import DraftModel
from model.drafters.eagle3 import Eagle3Model
from model.drafters.eagle3_config import eagle3_tensors, load_eagle3_config
from model.drafters.mtp import MTPModel
from model.drafters.mtp_weights import mtp_names
from model.errors import ModelError
from model.files.safetensors_files import StoredTensor, read_headers
from model.sizes import check_parallelism
from model.weights import WeightLoader


def load_mtp(
    target: CausalLM,
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    pack: bool = False,
    on_load: Callable[[str], None] | None = None,
) -> DraftModel:
    """Loads this rank's part of the MTP layer that ships with a model.

    Args:
        target: the loaded model.
        model_dir: the directory of the model.

    For the other arguments see `load_model`.

    Raises:
        ModelError: the model has no MTP layer, or its files do not fit the config.
    """
    config = target.config
    tensors: dict[str, StoredTensor] = {}
    if load_format == "dummy":
        names = mtp_names(config, None)
    else:
        tensors = read_headers(Path(model_dir))
        names = mtp_names(config, tensors)
    # The loader gets only the tensors of the MTP layer, so that `finish` reports only
    # unused tensors of this layer.
    layer_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(names.prefix)
    }
    loader = WeightLoader.open(
        None if load_format == "dummy" else layer_tensors,
        config.quantization,
        dtype=dtype,
        device=device,
        seed=seed,
        pack=pack,
        on_load=on_load,
    )
    try:
        with torch.inference_mode():
            draft = MTPModel(loader, names, target, tensors)
        # Copies of the model's embedding and head need not be loaded.
        copies = [name for name in (names.embedding, names.head) if name]
        loader.ignore(*(f"{name}.weight" for name in copies))
        loader.finish()
    except ModelError as error:
        raise type(error)(f"--speculate mtp: {error}") from error
    return draft


def load_eagle3(
    target: CausalLM,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    pack: bool = False,
    on_load: Callable[[str], None] | None = None,
) -> DraftModel:
    """Loads this rank's part of an EAGLE-3 drafter.

    Args:
        target: the loaded model.
        folder: the directory of the drafter's checkpoint.

    For the other arguments see `load_model`.

    Raises:
        ModelError: the drafter does not fit its target or the number of ranks, or its
            files do not fit its config.
    """
    config = load_eagle3_config(folder, target.config, load_format=load_format)
    tensors: dict[str, StoredTensor] = {}
    parallel = target.parallel
    try:
        check_parallelism(config.model, parallel.size, parallel.dcp)
        if load_format != "dummy":
            tensors = eagle3_tensors(folder)
        loader = WeightLoader.open(
            None if load_format == "dummy" else tensors,
            config.model.quantization,
            dtype=dtype,
            device=device,
            seed=seed,
            pack=pack,
            on_load=on_load,
        )
        with torch.inference_mode():
            draft = Eagle3Model(loader, config, target, tensors)
        # d2t is read without the loader, and t2d follows from d2t.
        loader.ignore("d2t", "t2d")
        loader.finish()
    except ModelError as error:
        raise type(error)(f"--speculate eagle3:{folder}: {error}") from error
    return draft
