"""The fence without a question: P's lease words (lease_words.py), seen from D on the same host.

P publishes a table in a memory file; D maps it at first contact and looks at it after the last
byte of a pull. An id that stands there, while every process of P is alive, is worth P's `ok`:

- P clears the word before it gives the blocks to anybody, so they were the lease's until then.
- The word is of this incarnation: the file is known by a random token, the id is random as well,
  and no successor of P ever writes to it.
- The bytes are of this incarnation: until now no process of P had ended, so no process id or
  address that a transport reads from can have become another's. If P is killed its word stays
  for ever and is not believed: its answer is asked for, and does not come.
- A stopped P is alive and writes nothing; so are its blocks what they were.
- P's clearing is ordered before its writes by the lock it is done under, D's look after its reads
  by the locks the ranks' reports pass through.

What cannot be opened or watched (another host, container or user) is never held here, and D asks.
"""

from dataclasses import dataclass

import msgspec

from kvcache.lease_words import TABLE_BYTES, LeaseWords, is_held
from kvcache.shared_memory import NotShared, OpenedMemory, SharedMemory
from kvcache.transfer.processes import ProcessGone, Watched, own_record
from kvcache.transfer.pull import PeerKey
from protocol.handshake import EngineMetadata, HeldLeasesRecord
from protocol.logging import get_logger

logger = get_logger(__name__)


class PublishedWords(LeaseWords):
    """P's end. Belongs to the process that made it."""

    def __init__(self, memory: SharedMemory, record: HeldLeasesRecord) -> None:
        super().__init__(memory.mapping)
        self._shared = memory  # open for as long as this is
        self._record = record

    @classmethod
    def create(cls) -> "PublishedWords | None":
        """None where the system has no memory files or no process identities."""
        process = own_record()
        if process is None:
            return None
        try:
            memory = SharedMemory(TABLE_BYTES)
        except OSError as error:
            logger.info("readers on this host have to ask about leases: %s", error)
            return None
        return cls(memory, HeldLeasesRecord(process=process, fd=memory.fd, token=memory.token))

    def announced(self, metadata: EngineMetadata) -> EngineMetadata:
        """The metadata that tells readers of this host where to look."""
        return msgspec.structs.replace(metadata, held_leases=self._record)


@dataclass(frozen=True)
class _Peer:
    words: OpenedMemory
    processes: Watched

    def close(self) -> None:
        self.processes.close()
        self.words.close()


class HeldLeases:
    """D's end. One thread at a time uses it."""

    def __init__(self) -> None:
        self._peers: dict[PeerKey, _Peer] = {}

    def meet(self, metadata: EngineMetadata) -> None:
        """Opens a peer's words, if that is possible from here."""
        key = (metadata.engine_id, metadata.incarnation)
        self.forget(key)
        try:
            self._peers[key] = _open(metadata)
        except (NotShared, ProcessGone) as error:
            logger.info("prefill server %s is asked at each fence: %s", key[0], error)

    def is_held(self, key: PeerKey, lease_id: str) -> bool:
        """Whether P still holds the lease, as far as can be seen; False proves nothing."""
        peer = self._peers.get(key)
        if peer is None or not is_held(peer.words, lease_id):
            return False
        return peer.processes.all_alive()  # last: it vouches for all that was read before

    def forget(self, key: PeerKey) -> None:
        peer = self._peers.pop(key, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        for key in list(self._peers):
            self.forget(key)


def _open(metadata: EngineMetadata) -> _Peer:
    record = metadata.held_leases
    ranks = [rank.process for rank in metadata.ranks]
    known = [process for process in ranks if process is not None]
    if record is None or len(known) < len(ranks):
        raise NotShared("it does not publish its leases")
    processes = Watched([record.process, *known])
    try:
        words = OpenedMemory(record.process.pid, record.fd, record.token, TABLE_BYTES)
    except NotShared:
        processes.close()
        raise
    return _Peer(words, processes)
