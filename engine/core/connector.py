"""The interface between the engine core and the component that leases and pulls KV."""

from typing import Any, Protocol

from engine.core.core_grammar import CoreGrammars
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.speculation.speculator import Speculator
from protocol.errors import BatonError
from protocol.messages import HostTierReport, RemotePrefill


class CoreServices(Protocol):
    """The calls from a connector to the engine core. All except `wake` are made from
    the core's own thread."""

    scheduler: Scheduler
    speculator: Speculator
    grammars: CoreGrammars

    def enqueue(self, sequence: Sequence) -> None:
        """Gives the sequence to the scheduler, once its grammar is compiled. Must not
        be called again until the sequence waits for neither of them any more."""

    def accept_first_tokens(self, sequence: Sequence) -> None:
        """Handles first tokens that another server has drawn. Called while the sequence
        waits, or while its KV is being pulled."""

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """Ends the request of a sequence, in any phase, with an error. The error is the
        terminal event of the request."""

    def wake(self) -> None:
        """Makes the core's loop run, if it sleeps. May be called from any thread."""


class KVConnector:
    """The hooks that make an engine a prefill or a decode engine.

    A connector has its own threads for leases and pulls, but changes sequences and
    blocks only inside the calls below, which all come from the core's thread. This base
    class neither leases nor pulls.
    """

    def bind(self, core: CoreServices) -> None:
        """Connects this object to the core. Called once, before all other methods."""
        self.core = core

    def on_add(self, sequence: Sequence) -> None:
        """Called for a new request. The connector enqueues the sequence, immediately or
        when its KV can be pulled."""
        self.core.enqueue(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        """Called once a sequence holds RECEIVING blocks. The connector starts the pull
        into these blocks.
        """
        raise AssertionError(f"{type(self).__name__} admits no remote sequences")

    def on_computed(self, sequence: Sequence) -> None:
        """Called after each step that computed tokens of a sequence. The step has
        finished on every rank."""

    def on_end(self, sequence: Sequence) -> None:
        """Called when a request has ended, with all its choices."""

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        """Called when a sequence ends because of its last token, or because it migrates
        to another server, but not because of an abort or an error.

        The sequence still has its blocks. The connector may lease some of them; the
        core releases the blocks of the sequence afterwards. Returns the
        kv_transfer_params of the response, which refer to the leased blocks; None if no
        blocks were leased.
        """
        return None

    def on_abort(self, sequence: Sequence) -> bool:
        """Called when a sequence ends by an abort or an error. Returns whether the
        connector has taken over the RECEIVING blocks of the sequence. Otherwise the
        core releases the sequence's blocks.
        """
        return False

    def on_abort_unknown(self, request_id: str) -> None:
        """Called when a client aborts a request that has already ended here."""

    def on_release(self, remote: RemotePrefill) -> None:
        """Called with a reference to KV that no request is going to use, for example
        because the request was refused."""

    def poll(self) -> None:
        """Handles the events that the connector's threads have queued since the last
        call."""

    def stats(self) -> dict[str, float]:
        return {}

    def host_tier_report(self) -> HostTierReport | None:
        """Describes the KV store that the connector reads; None if there is none."""
        return None

    def close(self) -> None:
        """Stops the connector's threads. No other call follows."""
