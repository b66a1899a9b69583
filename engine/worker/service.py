"""What a server adds to the ranks of its engine: a service on each, a connector on rank 0."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.core.connector import KVConnector
from kvcache.pool import KVPool
from kvcache.step_watch import StepWatch
from kvcache.transfer.agent import TransferAgent
from protocol.handshake import CompatRecord, EngineMetadata


@dataclass(frozen=True)
class RankContext:
    """What a server finds on one rank once its KV is allocated."""

    config: EngineConfig
    rank: int
    pool: KVPool
    agent: TransferAgent
    compat: CompatRecord
    stepping: StepWatch  # whether the rank computes


class RankService(Protocol):
    """What a server runs on a rank beside the engine. Making it registers the rank's KV with the
    rank's agent, which the service owns from `start` on."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class ConnectorFactory(ABC):
    """Makes the parts of an engine process that differ between servers."""

    def reserved_bytes(self, config: EngineConfig) -> int:
        """What the service of a rank takes of its device's memory, beside the KV pool."""
        return 0

    @abstractmethod
    def make_service(self, context: RankContext) -> RankService:
        """Called on every rank, once."""

    @abstractmethod
    def make_connector(
        self, context: RankContext, metadata: EngineMetadata, wake: Callable[[], None]
    ) -> KVConnector:
        """Called on rank 0, after `make_service`. `wake`, from any thread, has the core poll."""
