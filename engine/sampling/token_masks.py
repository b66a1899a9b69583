"""Masks of the tokens that a draw may choose.

A mask is int32 [W]: bit t % 32 of word t // 32 is set if token t may be drawn.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]

WORD_BITS: Final = 32  # tokens per word of a mask


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    """Return a mask, int32 [W], in which the bits of `token_ids` are set."""
    bits = np.zeros(num_words * WORD_BITS, dtype=np.bool_)
    bits[[token_id for token_id in token_ids if token_id < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def is_set(mask: Int32s, token_id: int) -> bool:
    """Whether a mask, int32 [W], allows a token."""
    word, bit = divmod(token_id, WORD_BITS)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)


def step_masks(rows: Sequence[Int32s | None], vocab_size: int) -> Int32s:
    """Return the masks of the R draws of a step: int32 [R, ceil(V / 32)].

    Args:
        rows: the mask of each draw, int32 [W]; None: every token is allowed.
        vocab_size: V, the number of the model's logits.
    """
    # A mask in `rows` may be wider than the result, because the tokenizer may have more
    # tokens than the model has logits.
    num_words = -(-vocab_size // WORD_BITS)
    masks = np.full((len(rows), num_words), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            masks[index] = row[:num_words]
    return masks
