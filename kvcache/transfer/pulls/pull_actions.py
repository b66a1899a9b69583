"""The phases of a pull, and the actions that the methods of PullState return."""

from dataclasses import dataclass
from enum import Enum

from kvcache.transfer.pulls.messages import Event, Pull, StopPull
from protocol.handshake import LeaseRequest, Subscribe


class Phase(Enum):
    """The phase of a pull; see the diagram in pull_state.py."""

    HELD = "held"
    WAITING = "waiting"
    READING = "reading"
    FENCING = "fencing"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True)
class RecordPeerFailure:
    """The action that counts a failure in the peer's circuit breaker.

    It also discards the peer's metadata, which may be wrong: the next pull repeats the
    handshake.
    """


# The coordinator sends LeaseRequest and Subscribe to the prefill server, Pull and
# StopPull to every rank, and an Event to the engine. RecordPeerFailure changes the
# coordinator's record of the peer.
Action = LeaseRequest | Subscribe | Pull | StopPull | RecordPeerFailure | Event
