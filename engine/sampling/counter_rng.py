"""Counter-based noise: the Gumbel variate of a token depends only on four integers.

    noise = f(seed, choice, position, token id)

A draw therefore has the same result on any server, in any batch, and before and after a
preemption. "choice" is the index of the choice in its request. splitmix64 (Steele, Lea,
Flood 2014), chained over (seed, choice, position), makes a 64-bit key for each row.
lowbias32 (C. Wellons 2018) hashes each token id to 32 bits. A second pass of lowbias32
mixes the key into this hash: one half of the key before the first multiplication, the
other half before the second. All devices compute the same integers; only the two
logarithms at the end may differ in the last bit.
"""

import functools

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LOWBIAS_1 = 0x7FEB352D
_LOWBIAS_2 = 0x846CA68B - 2**32

# This factor maps a 31-bit integer plus 0.5 to (0, 1). It is slightly less than 2**-31,
# so that the largest product stays below 1 in float32.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)


def row_keys(
    seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Returns a 64-bit key for each row, as int32 [S, 2].

    Args:
        seed, choice, position: int64 [S]. The position is the index that the drawn
            token will have in its sequence.
    """
    key = _splitmix64(seed)
    for counter in (choice, position):
        key = _splitmix64(key ^ counter)
    return key.view(torch.int32).view(-1, 2)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns standard Gumbel noise for each row and token, float32 [S, n], finite.

    Args:
        keys: int32 [S, 2] from `row_keys`.
        token_ids: int64 [S, n], or [n] for the same ids in every row.
    """
    return _gumbel_of_hashes(keys, _lowbias32(token_ids.to(torch.int32)))


def gumbel_of_vocabulary(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns `gumbel` for all token ids below vocab_size, float32 [S, vocab_size]."""
    return _gumbel_of_hashes(keys, _vocabulary_hashes(vocab_size, keys.device))


@functools.lru_cache(maxsize=8)
def _vocabulary_hashes(vocab_size: int, device: torch.device) -> torch.Tensor:
    return _lowbias32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _gumbel_of_hashes(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    first = keys[:, :1]
    second = keys[:, 1:]
    x = _xorshift_(hashes ^ first, 16).mul_(_LOWBIAS_1).add_(second)
    x = _xorshift_(x, 15).mul_(_LOWBIAS_2)
    # This last shift fills the upper bits with the sign bit. They need not be cleared,
    # because all 31-bit results stay equally likely.
    x.bitwise_xor_(x >> 16)
    # Small uniform numbers become large variates, and large variates decide a draw.
    # float32 has full precision for small numbers.
    minus_uniform = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(-_TO_UNIT)
    exponential = minus_uniform.log1p_().neg_()
    return exponential.log_().neg_()


def _lowbias32(x: torch.Tensor) -> torch.Tensor:
    # The input is x + 1, because lowbias32 maps 0 to 0.
    x = _xorshift_(x + 1, 16).mul_(_LOWBIAS_1)
    return _xorshift_(_xorshift_(x, 15).mul_(_LOWBIAS_2), 16)


def _xorshift_(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Computes x ^= x >>> bits for int32, in place. torch's shift fills the upper bits
    with the sign bit, and the mask clears these bits."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    for bits, factor in _SPLITMIX:
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))
