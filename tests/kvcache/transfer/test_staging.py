"""StagingBuffer memory: where it begins, and that it costs nothing before it is used."""

from pathlib import Path

import pytest

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.move.staging import StagingBuffer

NBYTES = 64 << 20


def resident_bytes(address: int) -> int:
    """Of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(end, 16) for end in words[0].split("-"))
            inside = low <= address < high
        elif inside and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_it_begins_on_a_huge_page_and_is_not_resident_before_it_is_used() -> None:
    staging = StagingBuffer(NBYTES, KVPool(KVLayout("BHLCND", 2, 1, 1, 1, 16, 8, "float32")))
    assert staging.base_address % (2 << 20) == 0
    assert resident_bytes(staging.base_address) < NBYTES // 4
    assert [staging.num_slots(NBYTES // parts) for parts in (2, 3, 100)] == [2, 3, 4]


def test_more_than_there_is_is_refused_naming_it() -> None:
    pool = KVPool(KVLayout("BHLCND", 2, 1, 1, 1, 16, 8, "float32"))
    with pytest.raises(ValueError, match=r"staging_bytes is 1152921504606846976 .* use a lower"):
        StagingBuffer(1 << 60, pool)


def test_a_pool_is_not_resident_before_it_is_used() -> None:
    pool = KVPool(KVLayout("BHLCND", 64, 8, 16, 2, 16, 64, "float32"))
    assert pool.nbytes == NBYTES
    assert resident_bytes(pool.base_address) < NBYTES // 4
