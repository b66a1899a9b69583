"""Random configs are read as transformers reads them, or refused for listed reasons."""

import pytest

from tests.model.as_transformers import compare
from tests.model.random_configs import random_config

QUICK_SEEDS = 12
SLOW_SEEDS = 600
SEEDS_PER_TEST = 50


def check(seeds, tmp_path) -> None:
    disagreements = {}
    for seed in seeds:
        comparison = compare(random_config(seed), tmp_path / str(seed))
        if comparison.verdict == "disagreement":
            disagreements[seed] = comparison.details
    assert disagreements == {}


@pytest.mark.parametrize("seed", range(QUICK_SEEDS))
def test_few_random_configs_are_read_as_by_transformers(seed, tmp_path):
    check([seed], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK_SEEDS, SLOW_SEEDS, SEEDS_PER_TEST))
def test_random_configs_are_read_as_by_transformers(first, tmp_path):
    check(range(first, first + SEEDS_PER_TEST), tmp_path)
