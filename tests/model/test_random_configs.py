"""Random configurations are read as transformers reads them, or refused with a listed reason."""

import pytest

from tests.model.as_transformers import compare
from tests.model.random_configs import random_config

SEEDS_OF_EACH_RUN = 12
SLOW_SEEDS = 600
SEEDS_OF_ONE_TEST = 50


def check(seeds, tmp_path) -> None:
    disagreements = {}
    for seed in seeds:
        comparison = compare(random_config(seed), tmp_path / str(seed))
        if comparison.verdict == "disagreement":
            disagreements[seed] = comparison.details
    assert disagreements == {}


@pytest.mark.parametrize("seed", range(SEEDS_OF_EACH_RUN))
def test_some_random_configurations_are_read_as_transformers_reads_them(seed, tmp_path):
    check([seed], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", range(SEEDS_OF_EACH_RUN, SLOW_SEEDS, SEEDS_OF_ONE_TEST)
)
def test_random_configurations_are_read_as_transformers_reads_them(first, tmp_path):
    check(range(first, first + SEEDS_OF_ONE_TEST), tmp_path)
