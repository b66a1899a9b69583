"""How layers are dealt into groups."""

import pytest

from kvcache.groups import KVGroups, deal

GEMMA = ([1024] * 5 + [None]) * 10 + [1024] * 2  # 3, of 27B


@pytest.mark.parametrize(
    ("windows", "max_len", "groups", "sizes"),
    [
        ([None] * 32, 8192, (None,), {32}),
        ([4096] * 32, 4096, (None,), {32}),  # never passed
        ([4096] * 32, 32768, (4096,), {32}),
        ([128, None] * 12, 131072, (None, 128), {12}),  # gpt-oss
        (GEMMA, 131072, (None, *[1024] * 6), {10, 2}),
        ([None] * 39 + [64], 65536, (None, 64), {39, 1}),
    ],
)
def test_layers_are_dealt_into_few_groups_that_waste_little(windows, max_len, groups, sizes):
    found, layers = deal(windows, max_len)
    assert found == KVGroups(groups) and {len(each) for each in layers} == sizes
    assert sorted(sum(layers, ())) == list(range(len(windows)))
    kinds = [{windows[layer] for layer in each} for each in layers]
    assert found.count == 1 or kinds == [{window} for window in groups]
