"""The memory of drafters, which follows from their configs.

This file does not import torch. As in `model/sizes.py`, only matrices are counted. The
KV of a drafter is as large as the KV of a model with the drafter's config.
"""

from collections.abc import Iterator

from model.config import ModelConfig
from model.drafters.eagle3_config import Eagle3Config
from model.drafters.mtp_weights import mtp_config
from model.sizes import MatrixGroup, bits_per_element, implied_weights

# The input projections of attention. In an EAGLE-3 drafter, these projections have
# twice as many columns: one half is for embeddings, the other half for states.
_ATTENTION_INPUTS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def mtp_weight_bytes(
    config: ModelConfig, itemsize: int, *, keep_quantised: bool
) -> int:
    """Returns the bytes of the matrices of a model's MTP layer.

    The embedding and the head belong to the model and are not counted. See
    `bits_per_element` for the other arguments.

    Args:
        config: the config of the model.
    """
    # The projection of the concatenated embedding and state.
    bits: float = 8 * itemsize * 2 * config.hidden_size**2
    for group in _layer_groups(mtp_config(config)):
        bits += group.elements * bits_per_element(
            config, group.name, itemsize, keep_quantised=keep_quantised
        )
    return int(bits) // 8


def eagle3_weight_bytes(
    config: Eagle3Config, itemsize: int, *, keep_quantised: bool, has_embedding: bool
) -> int:
    """Returns the bytes of the matrices of an EAGLE-3 drafter.

    Args:
        has_embedding: whether the drafter has its own embedding, instead of using the
            target's.
    """
    model = config.model
    num_rows = config.captured_size + config.draft_vocab_size
    if has_embedding:
        num_rows += model.vocab_size
    bits: float = 8 * itemsize * num_rows * model.hidden_size
    for group in _layer_groups(model):
        elements = group.elements
        if group.name.endswith(_ATTENTION_INPUTS):
            elements *= 2
        bits += elements * bits_per_element(
            model, group.name, itemsize, keep_quantised=keep_quantised
        )
    return int(bits) // 8


def _layer_groups(config: ModelConfig) -> Iterator[MatrixGroup]:
    """Yields the matrices of the layer of a drafter, without embedding and head."""
    for group in implied_weights(config):
        if ".layers." in group.name:
            yield group
