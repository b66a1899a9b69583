"""Counter-based noise is a pure function of integers.

tests/engine/test_sampler.py tests that draws with this noise follow the softmax and are
independent.
"""

import math

import pytest
import torch

from engine.sampling.counter_rng import gumbel, gumbel_of_vocabulary, row_keys


def keys_of(seed: int, choice: int, positions: list[int]) -> torch.Tensor:
    num = len(positions)
    return row_keys(
        torch.full((num,), seed), torch.full((num,), choice), torch.tensor(positions)
    )


def test_keys_are_those_of_splitmix64():
    """Plain Python integers give the expected keys. The value for 0 is published."""

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert splitmix64(0) == 0xE220A8397B1DCDAF
    cases = [
        (0, 0, 0),
        (2**63 - 1, 3, 77),
        (12345, 0, 2**20),
        (-1, 0, 5),
        (-(2**63), 1, 5),
    ]
    for seed, choice, position in cases:
        expected = splitmix64(splitmix64(splitmix64(seed % 2**64) ^ choice) ^ position)
        key = keys_of(seed, choice, [position])[0]
        assert [int(x) % 2**32 for x in key] == [expected % 2**32, expected >> 32]


def test_token_noise_matches_plain_python_integers():
    def mix(x: int, y: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D + y & 0xFFFFFFFF
        return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF

    keys = keys_of(7, 1, [5, 6])
    ids = [0, 1, 49151, 151935]
    noise = gumbel(keys, torch.tensor(ids))
    for row, (first, second) in enumerate(keys.tolist()):
        for column, token in enumerate(ids):
            hashed = mix(token + 1, 0)
            hashed ^= hashed >> 16
            x = mix(hashed ^ first % 2**32, second % 2**32)
            signed = x - 2**32 if x >= 2**31 else x
            bits = (signed ^ (signed >> 16)) & 0x7FFFFFFF
            u = (bits + 0.5) / 2**31
            assert float(noise[row, column]) == pytest.approx(
                -math.log(-math.log1p(-u)), rel=1e-4, abs=1e-5
            )


@pytest.mark.parametrize("other", [(4, 0, 10), (3, 1, 10), (3, 0, 11)])
def test_noise_is_a_function_of_every_part_of_its_key_and_of_its_token(other):
    noise = gumbel_of_vocabulary(keys_of(3, 0, [10, 11, 12]), 1000)
    ids = torch.tensor([[999, 5, 5], [0, 1, 2], [500, 400, 300]])
    some = gumbel(keys_of(3, 0, [10, 11, 12]), ids)
    assert torch.equal(some, noise.gather(1, ids))
    assert torch.equal(gumbel_of_vocabulary(keys_of(3, 0, [11]), 1000)[0], noise[1])
    assert torch.equal(
        gumbel_of_vocabulary(keys_of(3, 0, [11]), 400)[0], noise[1, :400]
    )
    changed = gumbel_of_vocabulary(keys_of(other[0], other[1], [other[2]]), 1000)
    assert int((changed[0] == noise[0]).sum()) < 3
