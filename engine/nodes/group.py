"""The interface through which the main program on node 0 uses the other nodes."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from engine.prepare import Prepared
from engine.process.launch import Launch


class Nodes(ABC):
    """The nodes of one server. Only `open`, `meet` and `close` may block."""

    @abstractmethod
    def open(self) -> None:
        """Begins to accept connections from other nodes.

        Raises:
            StartFailure: node 0 cannot listen at --rendezvous.
        """

    @abstractmethod
    def meet(self, prepared: Prepared, report: Callable[[str], None]) -> Launch:
        """Waits until all nodes are prepared, and checks that they agree.

        Args:
            prepared: the configuration of node 0.
            report: called with descriptions of the progress.

        Returns:
            The arguments with which node 0 starts its ranks.

        Raises:
            StartFailure: a node is missing or has failed, or the nodes differ.
        """

    @abstractmethod
    def set_ready(self) -> None:
        """Reports to the other nodes that the server is ready."""

    @abstractmethod
    def fail(self, reason: str) -> str:
        """Ends the server on all nodes. Any thread may call this.

        Returns:
            The reason that all nodes report, which is the reason of the first call.
        """

    @abstractmethod
    def fail_here(self, reason: str) -> str:
        """Ends the server on all nodes because of a failure of this node.

        Returns:
            The reason that all nodes report: `reason` with the name of this node, or
            the reason of an earlier call of `fail`.
        """

    @abstractmethod
    def close(self, *, lingers: bool) -> None:
        """Ends the other nodes. They exit with status 0, unless `fail` was called.

        Args:
            lingers: whether to wait a few seconds after a failed start, and report the
                reason to nodes that join in that time.
        """


class SingleNode(Nodes):
    """A server that runs on one node."""

    def open(self) -> None:
        pass

    def meet(self, prepared: Prepared, report: Callable[[str], None]) -> Launch:
        return Launch(prepared.config)

    def set_ready(self) -> None:
        pass

    def fail(self, reason: str) -> str:
        return reason

    def fail_here(self, reason: str) -> str:
        return reason

    def close(self, *, lingers: bool) -> None:
        pass
