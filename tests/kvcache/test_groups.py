"""How layers are dealt into groups."""

import pytest

from kvcache.groups import KVGroups, deal


@pytest.mark.parametrize(
    ("windows", "max_len", "groups", "sizes"),
    [
        ([None] * 32, 8192, (None,), {32}),
        ([4096] * 32, 4096, (None,), {32}),  # never passed
        ([4096] * 32, 32768, (4096,), {32}),
        ([128, None] * 12, 131072, (None, 128), {12}),  # gpt-oss
        (
            ([9] * 5 + [None]) * 10 + [9] * 2,
            9999,
            (None, *[9] * 6),
            {10, 2},
        ),  # Gemma 3 27B
    ],
)
def test_layers_are_dealt_into_few_groups_that_waste_little(
    windows, max_len, groups, sizes
):
    found, layers = deal(windows, max_len)
    assert found == KVGroups(groups) and {len(each) for each in layers} == sizes
    assert sorted(sum(layers, ())) == list(range(len(windows)))
    kinds = [{windows[layer] for layer in each} for each in layers]
    assert found.count == 1 or kinds == [{window} for window in groups]
