"""What the two servers do differently with a sequence's KV; everything else is the same engine."""

from typing import Any, Protocol

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from protocol.errors import BatonError
from protocol.messages import RemotePrefill


class CoreServices(Protocol):
    """What a connector may ask of the engine core; all calls from the core's own thread."""

    scheduler: Scheduler

    def enqueue(self, sequence: Sequence) -> None:
        """The sequence may be scheduled from now on."""

    def found(self, sequence: Sequence) -> None:
        """Its first tokens were drawn elsewhere, while it waited or its KV was pulled."""

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """Ends a request, wherever it is, with its one terminal event."""

    def wake(self) -> None:
        """Makes the core take another round; callable from any thread."""


class KVConnector:
    """The hooks that make an engine a prefill or a decode engine.

    A connector owns threads (leases, pulls) but changes sequences and blocks only inside these
    calls, which all come from the core's thread. By itself this one neither leases nor pulls.
    """

    def bind(self, core: CoreServices) -> None:
        self.core = core

    def on_add(self, sequence: Sequence) -> None:
        """A request has come; the connector enqueues it now or once its peer is known."""
        self.core.enqueue(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        """The sequence has RECEIVING blocks; the connector starts the pull into them."""
        raise AssertionError(f"{type(self).__name__} admits no remote sequences")

    def on_computed(self, sequence: Sequence) -> None:
        """A step has computed more of a prompt with a transfer id, on every rank."""

    def on_end(self, sequence: Sequence) -> None:
        """Nothing more is computed for a request with a transfer id."""

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        """The sequence ended with a token, its blocks still in hand. The connector takes another
        reference on what it wants to keep of them; the core releases the sequence's own. Returns
        kv_transfer_params for the answer."""
        return None

    def on_abort(self, sequence: Sequence) -> bool:
        """The sequence is given up. True if the connector took over its RECEIVING blocks."""
        return False

    def on_abort_unknown(self, request_id: str) -> None:
        """An abort came for a request that has already ended."""

    def on_release(self, remote: RemotePrefill) -> None:
        """A reference came that is of no use, or with a request that was refused: nobody will use
        its KV."""

    def poll(self) -> None:
        """Takes in what the connector's threads have learned since the last round."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Stops the connector's threads; no call comes after it."""
