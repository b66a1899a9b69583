"""Which question an answer of the side channel belongs to: the coordinator's open requests."""

from typing import Literal

from kvcache.transfer.pull_state import Action, SendAbort, SendComplete, SendRenew
from kvcache.transfer.side_channel import new_id
from kvcache.transfer.side_client import Address
from protocol.handshake import AbortLease, Complete, GetMetadata, Renew, Request
from protocol.messages import RemotePrefill

LeaseQuestion = Literal["renew", "complete"]


class OpenQuestions:
    """Nonces of requests sent, until they are answered or nobody wants the answer any more."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[LeaseQuestion, str]] = {}  # nonce -> (question, pull)
        self._of_pull: dict[str, list[str]] = {}  # nonces
        self._metadata: dict[str, Address] = {}  # by nonce

    def lease(self, pull_id: str, remote: RemotePrefill, action: Action) -> Request:
        """The request that says `action` of a pull's lease; an abort's answer is not awaited."""
        nonce = new_id()
        lease = {"nonce": nonce, "incarnation": remote.incarnation, "lease_id": remote.lease_id}
        match action:
            case SendRenew():
                self._expect(nonce, "renew", pull_id)
                return Renew(**lease)
            case SendComplete(attempt):
                self._expect(nonce, "complete", pull_id)
                return Complete(**lease, attempt_id=attempt)
            case SendAbort():
                return AbortLease(**lease)
            case _:
                raise TypeError(f"{action} asks nothing of a prefill server")

    def lease_answered(self, nonce: str) -> tuple[LeaseQuestion, str] | None:
        """What was asked, and for which pull; None when nobody waits for it."""
        return self._leases.pop(nonce, None)

    def forget_pull(self, pull_id: str) -> None:
        for nonce in self._of_pull.pop(pull_id, []):
            self._leases.pop(nonce, None)

    def metadata(self, address: Address) -> Request:
        nonce = new_id()
        self._metadata[nonce] = address
        return GetMetadata(nonce=nonce)

    def metadata_answered(self, nonce: str) -> Address | None:
        return self._metadata.pop(nonce, None)

    def forget_metadata(self, address: Address) -> None:
        for nonce in [nonce for nonce, at in self._metadata.items() if at == address]:
            del self._metadata[nonce]

    def _expect(self, nonce: str, question: LeaseQuestion, pull_id: str) -> None:
        self._leases[nonce] = (question, pull_id)
        self._of_pull.setdefault(pull_id, []).append(nonce)
