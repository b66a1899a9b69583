"""The names of the weights of multi-token prediction (MTP) layers.

A checkpoint may contain an MTP layer in addition to its model. This file does not
import torch.
"""

import dataclasses
from collections.abc import Container
from typing import Final, NamedTuple

from model.config import ModelConfig
from model.errors import ModelLoadError


class MTPNames(NamedTuple):
    """The names of the parts of an MTP layer, without the suffix ".weight".

    Attributes:
        token_norm: norm of the embedding of the next token.
        state_norm: norm of the state.
        projection: maps the normalized embedding and the normalized state, in this
            order, to the input of the layer.
        layer: prefix of the decoder layer.
        norm: norm of the output, before the head.
        embedding, head: the MTP layer's own embedding and head, usually copies of the
            model's. None: files with these names have no such matrices.
    """

    token_norm: str
    state_norm: str
    projection: str
    layer: str
    norm: str
    embedding: str | None = None
    head: str | None = None

    @property
    def prefix(self) -> str:
        """The prefix of all names."""
        return self.projection.rpartition(".")[0] + "."


# Names that Qwen3-Next and its successors use.
_QWEN: Final = MTPNames(
    token_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    layer="mtp.layers.0",
    norm="mtp.norm",
)


def _nextn_names(config: ModelConfig) -> MTPNames:
    """Returns the names that DeepSeek-V3 and GLM-4.5 use.

    In the files, the MTP layer has the index after that of the model's last layer.
    """
    prefix = f"model.layers.{config.num_layers}"
    return MTPNames(
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        layer=prefix,
        norm=f"{prefix}.shared_head.norm",
        embedding=f"{prefix}.embed_tokens",
        head=f"{prefix}.shared_head.head",
    )


def mtp_names(config: ModelConfig, stored_names: Container[str] | None) -> MTPNames:
    """Returns the names of a model's first MTP layer.

    Further MTP layers are not used: the first one proposes all tokens.

    Args:
        stored_names: the names of the weights in the model's files; None for dummy
            weights.

    Raises:
        ModelLoadError: the model has no MTP layer.
    """
    nextn = _nextn_names(config)
    if stored_names is None:
        if config.draft_layers:
            return nextn
    else:
        for names in (nextn, _QWEN):
            if f"{names.norm}.weight" in stored_names:
                return names
    fix = "leave the option out, or use another drafter"
    if config.draft_layers:
        raise ModelLoadError(
            f"--speculate mtp: config.json has num_nextn_predict_layers "
            f"{config.draft_layers}, but the files have neither {nextn.norm}.weight "
            f"nor {_QWEN.norm}.weight; {fix}"
        )
    raise ModelLoadError(
        "--speculate mtp: this model has no MTP layer (config.json has no "
        f"num_nextn_predict_layers, and the files have no {_QWEN.norm}.weight); {fix}"
    )


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Returns a config that describes the MTP layer as a model with one layer.

    The layer has no attention window. In a model with a mixture of experts, the MTP
    layer has experts.
    """
    moe = config.moe
    if moe is not None:
        moe = dataclasses.replace(moe, dense_layers=())
    return dataclasses.replace(
        config,
        num_layers=1,
        draft_layers=0,
        moe=moe,
        other_ropes=(),
        layer_ropes=(),
        layer_windows=(),
    )
