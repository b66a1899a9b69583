"""Maps the pools of one prefill engine, in a thread.

Before a GPU can read a large pool in host memory, the pool is locked, which takes
seconds. The transfer thread can use that time for pulls from other peers, renewals of
leases and timeouts of lookups.
"""

import threading
from collections.abc import Callable, Sequence

from kvcache.transfer.move.peer_memory import Memory, NotMappable
from kvcache.transfer.move.place import Placer
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)


class PeerMapping:
    """The mapped pools of one engine. Mapping begins at once.

    Only the worker's thread calls the methods.

    Args:
        owners: the ranks of the engine to map.
        on_end: called by the mapping's thread when `has_ended` has become true.

    Attributes:
        has_ended: the memory is mapped, or cannot be mapped.
        refusal: why the memory cannot be mapped; None if it is mapped.
        memories: the mapped pools, by rank of the engine; empty until `has_ended`.
    """

    def __init__(
        self,
        placer: Placer,
        metadata: EngineMetadata,
        owners: Sequence[int],
        on_end: Callable[[], None],
    ) -> None:
        self.has_ended = False
        self.refusal: str | None = None
        self.memories: dict[int, Memory] = {}
        self._placer = placer
        self._metadata = metadata
        self._owners = owners
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_closed = False
        name = f"map-{metadata.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        memories: dict[int, Memory] = {}
        refusal = None
        engine_id = self._metadata.engine_id
        try:
            for owner in self._owners:
                memories[owner] = self._placer.open(self._metadata.ranks[owner])
            logger.info("KV of prefill server %s is mapped", engine_id)
        except Exception as error:
            # An error other than NotMappable is a bug in this code. It is not raised,
            # because READs from the peer may still work.
            if not isinstance(error, NotMappable):
                logger.exception("mapping KV of prefill server %s failed", engine_id)
            logger.info("KV of prefill server %s is not mapped: %s", engine_id, error)
            _close_all(memories)
            refusal = str(error)
        with self._lock:
            self.memories = memories
            self.refusal = refusal
            self.has_ended = True
            if self._is_closed:
                _close_all(memories)
        self._on_end()

    def close(self) -> None:
        """Closes the mapped memory now, or as soon as mapping has ended. No job may be
        reading from the memory."""
        with self._lock:
            self._is_closed = True
            _close_all(self.memories)


def _close_all(memories: dict[int, Memory]) -> None:
    for memory in memories.values():
        memory.close()
    memories.clear()
