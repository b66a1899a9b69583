"""One leg of a request at one server."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.placement.request_profile import RequestProfile
from proxy.placement.server_load import ServerLoad


@dataclass(eq=False)
class Assignment:
    """One leg of a request that is assigned to a server, or reserved for it.

    Attributes:
        is_reserved: the leg is only reserved, and has not started.
        computes: the server has yet to compute the prompt.
        prefill_s: estimated seconds for computing the prompt; 0 if the server does not
            compute it.
        expected_end_at: estimated end of the computation, minus the server's
            `total_delay_s` at the start of the leg. Adding the current `total_delay_s`
            gives the end that is expected now.
        started_at: when the leg was assigned.
        new_blocks: hashes of the blocks that the server computes, each with the
            server's index.
        is_incoming: the leg is counted in `load.incoming_streams` and not in
            `load.streams`, because there is no first token yet.
        is_answered: the server has begun to answer with status 200, so its cache has
            the prompt.
    """

    load: ServerLoad
    profile: RequestProfile
    computes: bool
    generates: bool
    prefill_s: float
    expected_end_at: float
    started_at: float
    new_blocks: Sequence[tuple[int, int]]
    is_incoming: bool
    is_answered: bool = False
    is_reserved: bool = False
