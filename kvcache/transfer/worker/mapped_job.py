"""The mapped path of one rank of D: which peers' memory is open here, and pulls out of it.

A pull is a row of launches of bounded size, some of them queued at a time: the device goes from one
to the next without waiting for us, and a pull that is stopped ends within a few milliseconds. As
with READs, a launch has ended only when its event says so (I7), and memory is unmapped only after
that. The owner's death ends nothing here: its memory stays readable until it is unmapped, what
kernels read of it counts for nothing without the fence, and the fence is what a dead peer cannot
answer.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvcache.transfer.move.peer_memory import Memory, NotMappable
from kvcache.transfer.move.place import Placer, launches
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.plan import TransferPlan
from kvcache.transfer.pulls.messages import PeerKey
from protocol.errors import BatonError, PeerIncompatible
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

MAX_ACTIVE = 4  # launches queued


@dataclass
class _Mapping:
    memories: dict[int, Memory] = field(default_factory=dict)  # by rank of P
    refusal: str | None = None


class MappedPath:
    """Opens peers at first contact, closes them when they are forgotten.

    Args:
        required: a peer that cannot be mapped is refused, not left to NIXL.
        launch_bytes: of one launch, at most; None: the placer's.
    """

    def __init__(
        self, placer: Placer, *, required: bool = False, launch_bytes: int | None = None
    ) -> None:
        self._placer = placer
        self.required = required
        self._launch_bytes = launch_bytes or placer.launch_bytes
        self._mappings: dict[PeerKey, _Mapping] = {}

    def bind_thread(self) -> None:
        self._placer.bind_thread()

    def meet(self, metadata: EngineMetadata, ranks: set[int]) -> bool:
        """Opens these ranks' pools, unless that was done; whether the peer can be mapped."""
        key = (metadata.engine_id, metadata.incarnation)
        mapping = self._mappings.get(key)
        if mapping is None:
            mapping = self._mappings[key] = _Mapping()
            try:
                for rank in sorted(ranks):
                    mapping.memories[rank] = self._placer.open(metadata.ranks[rank])
            except Exception as error:  # of any other kind it is our own: NIXL may do better
                if not isinstance(error, NotMappable):
                    logger.exception("mapping KV of prefill server %s", metadata.engine_id)
                self._unmap(mapping)
                mapping.refusal = str(error)
            self._log(metadata, mapping)
        return mapping.refusal is None

    def job(self, pull_id: str, metadata: EngineMetadata, transfer: Transfer) -> "MappedJob | None":
        """A pull of `transfer`; None leaves it to NIXL.

        Raises:
            PeerIncompatible: the mapped path is required, and this peer cannot be mapped.
        """
        mapping = self._mappings.get((metadata.engine_id, metadata.incarnation))
        if mapping is None:
            self.meet(metadata, {owner for group in transfer.groups for owner in group.owners})
            mapping = self._mappings[metadata.engine_id, metadata.incarnation]
        if mapping.refusal is not None:
            if self.required:
                raise PeerIncompatible(
                    f"KV of prefill server {metadata.engine_id} cannot be mapped: "
                    f"{mapping.refusal}. Use --transfer auto or nixl.",
                    param="transfer",
                )
            return None
        return MappedJob(pull_id, self._placer, transfer, mapping.memories, self._launch_bytes)

    def forget(self, key: PeerKey) -> None:
        """Closes a peer's memory; no job reads from it any more."""
        mapping = self._mappings.pop(key, None)
        if mapping is not None:
            self._unmap(mapping)

    def close(self) -> None:
        for key in list(self._mappings):
            self.forget(key)

    def _unmap(self, mapping: _Mapping) -> None:
        for memory in mapping.memories.values():
            memory.close()
        mapping.memories.clear()

    def _log(self, metadata: EngineMetadata, mapping: _Mapping) -> None:
        if mapping.refusal is None:
            logger.info("prefill server %s: its KV is mapped here", metadata.engine_id)
        else:
            logger.info("prefill server %s: not mapped, %s", metadata.engine_id, mapping.refusal)


class MappedJob:
    """One pull on one rank over the mapped path; driven by the worker, as a ReadJob."""

    def __init__(
        self,
        pull_id: str,
        placer: Placer,
        transfer: Transfer,
        memories: dict[int, Memory],
        launch_bytes: int,
    ) -> None:
        self.pull_id = pull_id
        self.error: BatonError | None = None
        self.failure_told = False
        self.began = time.perf_counter()
        self.stopping = False
        self._placer = placer
        self._memories = memories
        self.plan = TransferPlan.mapped(transfer)
        self._pending = deque(launches(transfer.copies(), launch_bytes))
        self._tokens: deque[Any] = deque()

    @property
    def active(self) -> int:
        """Launches that have not ended."""
        return len(self._tokens)

    @property
    def hangs(self) -> bool:
        """Never: launches end by themselves."""
        return False

    @property
    def ended(self) -> bool:
        return not self._tokens and (self.stopping or not self._pending)

    @property
    def complete(self) -> bool:
        """Every byte is in its place."""
        return self.ended and not self.stopping

    def stop(self, error: BatonError | None = None) -> None:
        """Launches nothing more. The first error stays."""
        self.stopping = True
        self.error = self.error or error

    def leave(self) -> None:
        """The job has ended: what it borrowed is free for others."""

    def advance(self) -> bool:
        """Retires launches that have ended and queues more; whether anything happened."""
        before = len(self._tokens)
        while self._tokens and self._has_ended(self._tokens[0]):
            self._tokens.popleft()
        progressed = len(self._tokens) < before
        while self._pending and not self.stopping and len(self._tokens) < MAX_ACTIVE:
            if not self._launch():
                break
            progressed = True
        return progressed

    def _has_ended(self, token: Any) -> bool:
        try:
            return self._placer.finished(token)
        except BaseException:
            self._tokens.popleft()
            raise

    def _launch(self) -> bool:
        """Queues the next launch, or as much of it as there is room for."""
        copy, factors = self._pending[0], self.plan.transfer.factors
        room = self._placer.room(copy, factors)
        fitting = max(room // copy.piece_bytes, min(room, 1))  # a piece may exceed the room
        if fitting == 0:
            return False
        self._pending.popleft()
        if fitting < len(copy.sources):
            self._pending.appendleft(copy.part(fitting, len(copy.sources) - fitting))
            copy = copy.part(0, fitting)
        self._tokens.append(self._placer.launch(copy, self._memories[copy.owner], factors))
        return True
