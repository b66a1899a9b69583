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
    """The action to count a failure in the peer's circuit breaker.

    The peer's metadata may be wrong, so the next pull repeats the handshake.
    """


# LeaseRequest and Subscribe go to P, Pull and StopPull to every rank, an Event to the
# engine. RecordPeerFailure is for the coordinator.
Action = LeaseRequest | Subscribe | Pull | StopPull | RecordPeerFailure | Event
