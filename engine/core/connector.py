"""The interface between the engine core and the component that leases and pulls KV."""

from typing import Any, Protocol

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from protocol.errors import BatonError
from protocol.messages import RemotePrefill


class CoreServices(Protocol):
    """The calls from a connector to the engine core. All except `wake` are made from
    the core's own thread."""

    scheduler: Scheduler

    def enqueue(self, sequence: Sequence) -> None:
        """Makes the sequence available to the scheduler."""

    def accept_first_tokens(self, sequence: Sequence) -> None:
        """Handles first tokens that another server drew, while the sequence waited or
        its KV was pulled."""

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """Ends a request in any phase, with its one terminal event."""

    def wake(self) -> None:
        """Makes the core run another round. May be called from any thread."""


class KVConnector:
    """The hooks that make an engine a prefill or a decode engine.

    A connector has threads of its own (leases, pulls), but changes sequences and blocks
    only inside these calls, which all come from the core's thread. This base class
    neither leases nor pulls.
    """

    def bind(self, core: CoreServices) -> None:
        self.core = core

    def on_add(self, sequence: Sequence) -> None:
        """Called for a new request. The connector enqueues it, at once or when the
        handshake with its peer is complete."""
        self.core.enqueue(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        """Called when the sequence has RECEIVING blocks. The connector starts the pull
        into them."""
        raise AssertionError(f"{type(self).__name__} admits no remote sequences")

    def on_computed(self, sequence: Sequence) -> None:
        """Called when a step has computed more of a prompt with a transfer id, on every
        rank."""

    def on_end(self, sequence: Sequence) -> None:
        """Called when nothing more is computed for a request with a transfer id."""

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        """Called when a sequence has ended with a token and still has its blocks.

        The connector adds a reference to the blocks that it retains; the core then
        releases those of the sequence. Returns the kv_transfer_params of the response.
        """
        return None

    def on_abort(self, sequence: Sequence) -> bool:
        """Called when a sequence is aborted. True if the connector has taken over its
        RECEIVING blocks."""
        return False

    def on_abort_unknown(self, request_id: str) -> None:
        """Called when a request is aborted that has already ended."""

    def on_release(self, remote: RemotePrefill) -> None:
        """Called with a reference whose KV is not going to be used, for example because
        its request was refused."""

    def poll(self) -> None:
        """Handles the events that the connector's threads have left since the last
        round."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Stops the connector's threads. No other call follows."""
