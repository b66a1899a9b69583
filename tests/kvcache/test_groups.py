"""How layers are dealt into groups, and what a group needs of a table."""

import pytest

from kvcache.groups import KVGroups, deal


@pytest.mark.parametrize(
    ("windows", "max_len", "groups", "sizes"),
    [
        pytest.param([None] * 32, 8192, (None,), {32}, id="Llama"),
        pytest.param([4096] * 32, 4096, (None,), {32}, id="a window that is never passed"),
        pytest.param([4096] * 32, 32768, (4096,), {32}, id="Mistral"),
        pytest.param([128, None] * 12, 131072, (None, 128), {12}, id="gpt-oss"),
        pytest.param(
            ([1024] * 5 + [None]) * 10 + [1024] * 2,
            131072,
            (None, *[1024] * 6),
            {10, 2},
            id="Gemma 3 27B",
        ),
        pytest.param(
            ([512] * 5 + [None]) * 4 + [512] * 2, 32768, (None, *[512] * 6), {4, 2}, id="Gemma 3 1B"
        ),
        pytest.param([None] * 39 + [64], 65536, (None, 64), {39, 1}, id="one odd layer"),
    ],
)
def test_layers_are_dealt_into_few_groups_that_waste_little(
    windows, max_len, groups, sizes
) -> None:
    found, layers = deal(windows, max_len)
    assert found == KVGroups(groups) and {len(each) for each in layers} == sizes
    assert sorted(sum(layers, ())) == list(range(len(windows)))
    kinds = [{windows[layer] for layer in each} for each in layers]
    assert found.count == 1 or kinds == [{window} for window in groups]
