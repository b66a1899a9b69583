"""KV groups: layers are divided by attention window into groups of equal size."""

import pytest

from kvcache.groups import KVGroups, make_groups


@pytest.mark.parametrize(
    ("windows", "max_len", "groups", "sizes"),
    [
        ([None] * 32, 8192, (None,), {32}),
        # Full attention, because no sequence is longer than the window.
        ([4096] * 32, 4096, (None,), {32}),
        ([4096] * 32, 32768, (4096,), {32}),
        ([128, None] * 12, 131072, (None, 128), {12}),  # gpt-oss
        # Gemma 3 27B
        (([9] * 5 + [None]) * 10 + [9] * 2, 9999, (None, *[9] * 6), {10, 2}),
    ],
)
def test_layers_are_divided_into_few_groups_with_little_padding(
    windows, max_len, groups, sizes
):
    actual, layers_of_groups = make_groups(windows, max_len)
    assert actual == KVGroups(groups)
    assert {len(layers) for layers in layers_of_groups} == sizes
    assert sorted(sum(layers_of_groups, ())) == list(range(len(windows)))
    windows_of_groups = [
        {windows[layer] for layer in layers} for layers in layers_of_groups
    ]
    if actual.count > 1:
        assert windows_of_groups == [{window} for window in groups]
