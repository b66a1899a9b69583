"""The interface between the engine core and the component that leases and pulls KV."""

from typing import Any, Protocol

from engine.core.core_grammar import CoreGrammars
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.speculation.speculator import Speculator
from protocol.errors import BatonError
from protocol.messages import HostTierReport, RemotePrefill


class CoreServices(Protocol):
    """The methods of the engine core that a connector calls. All methods except `wake`
    must be called from the core's thread."""

    scheduler: Scheduler
    speculator: Speculator
    grammars: CoreGrammars

    def enqueue(self, sequence: Sequence) -> None:
        """Adds the sequence to the scheduler's queue, once its grammar is compiled.
        Must not be called again while the sequence waits for its grammar or in the
        queue."""

    def accept_first_tokens(self, sequence: Sequence) -> None:
        """Handles first tokens that another server has drawn. Called while the sequence
        waits, or while its KV is being pulled."""

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """Ends the request of a sequence, in any phase, with an error. The error is the
        terminal event of the request."""

    def wake(self) -> None:
        """Wakes the core's loop if it sleeps. May be called from any thread."""


class KVConnector:
    """The hooks that make an engine a prefill or a decode engine.

    A connector has its own threads for leases and pulls. It changes sequences and
    blocks only in the methods below, which are all called from the core's thread. This
    base class neither leases nor pulls.
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
        """Called when all choices of a request have ended."""

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        """Called when a sequence ends with its last token, or because it migrates to
        another server. Not called after an abort or an error.

        The sequence still has its blocks. The connector may lease some of them; the
        core then releases the blocks of the sequence. Returns the kv_transfer_params of
        the response, which refer to the leased blocks; None if no blocks were leased.
        """
        return None

    def on_abort(self, sequence: Sequence) -> bool:
        """Called when a sequence ends without `on_finish`, for example by an abort or
        an error. Returns True if the connector has taken over the RECEIVING blocks of
        the sequence. If it returns False, the core releases the sequence's blocks.
        """
        return False

    def on_abort_unknown(self, request_id: str) -> None:
        """Called when a client aborts a request that has already ended in the core."""

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
        """Stops the connector's threads. No method is called after this one."""
