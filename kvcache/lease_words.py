"""Which leases are held, in memory that readers on the same host look at without asking.

While a lease is HELD the sixteen bytes of its id stand in a slot; they are cleared before it ends
for anybody. So a reader that finds an id after its last byte came knows that the bytes were still
its own. The id itself says where to look: in one bucket, a cache line with room for four. An id
whose bucket is full is not published, and its reader has to ask.

A reader that looks while a slot changes can only miss: ids are random, so sixteen equal bytes are
those of one lease, and each of them was there when it was read, before the clearing had ended.
"""

from typing import Protocol

WORD_BYTES = 16
_WAYS = 4
_BUCKET_BYTES = WORD_BYTES * _WAYS
_BUCKETS = 4096
TABLE_BYTES = _BUCKETS * _BUCKET_BYTES
_FREE = bytes(WORD_BYTES)


class Memory(Protocol):
    """Bytes, read by copying: a bytearray, or a mapped file."""

    def __getitem__(self, where: slice, /) -> bytes | bytearray: ...


class WritableMemory(Memory, Protocol):
    def __setitem__(self, where: slice, value: bytes, /) -> None: ...


class LeaseWords:
    """The table, as its one writer sees it.

    Args:
        memory: TABLE_BYTES zeros, or more.
    """

    def __init__(self, memory: WritableMemory) -> None:
        self._memory = memory
        self._slots: dict[str, int] = {}  # byte offset of each published id

    def put(self, lease_id: str) -> bool:
        """Publishes a lease, 32 hex digits; False when there is no room for it."""
        word = bytes.fromhex(lease_id)
        offset = self._free_slot(_bucket(word))
        if offset is None:
            return False
        self._memory[offset : offset + WORD_BYTES] = word
        self._slots[lease_id] = offset
        return True

    def clear(self, lease_id: str) -> None:
        """From here on no reader takes the lease for held."""
        offset = self._slots.pop(lease_id, None)
        if offset is not None:
            self._memory[offset : offset + WORD_BYTES] = _FREE

    def _free_slot(self, bucket: int) -> int | None:
        for offset in range(bucket, bucket + _BUCKET_BYTES, WORD_BYTES):
            if self._memory[offset : offset + WORD_BYTES] == _FREE:
                return offset
        return None


def is_held(memory: Memory, lease_id: str) -> bool:
    """Whether the table says that the lease is held."""
    word = bytes.fromhex(lease_id)
    bucket = _bucket(word)
    at = memory[bucket : bucket + _BUCKET_BYTES].find(word)  # a copy of the bucket
    return at >= 0 and at % WORD_BYTES == 0


def _bucket(word: bytes) -> int:
    """Byte offset of the bucket of an id."""
    return int.from_bytes(word[:4], "big") % _BUCKETS * _BUCKET_BYTES
