"""Combines the lender and the borrower component into the KVConnector of one engine."""

from typing import Any

from engine.core.connector import CoreServices, KVConnector
from engine.core.sequence import Sequence
from engine.kv.borrower import Borrower
from engine.kv.lender import Lender
from protocol.messages import RemotePrefill


class Connector(KVConnector):
    """The connector of every engine. The lender handles requests with KV that other
    engines will pull; the borrower handles requests with KV on another engine."""

    def __init__(self, lender: Lender, borrower: Borrower) -> None:
        self._lender = lender
        self._borrower = borrower

    def bind(self, core: CoreServices) -> None:
        self._lender.bind(core)
        self._borrower.bind(core)

    def on_add(self, sequence: Sequence) -> None:
        pull = sequence.pull
        if pull is not None and self._lender.end_local_lease(pull.remote):
            # This engine itself computed the prompt, so its prefix cache has the KV.
            sequence.pull = None
        self._lender.offer_prompt(sequence)
        self._borrower.on_add(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        self._borrower.on_receive(sequence)

    def on_computed(self, sequence: Sequence) -> None:
        self._lender.on_computed(sequence)

    def on_end(self, sequence: Sequence) -> None:
        self._lender.on_end(sequence)

    def on_finish(self, sequence: Sequence) -> dict[str, Any] | None:
        self._borrower.on_finish(sequence)
        return self._lender.on_finish(sequence)

    def on_abort(self, sequence: Sequence) -> bool:
        return self._borrower.on_abort(sequence)

    def on_abort_unknown(self, request_id: str) -> None:
        self._lender.on_abort_unknown(request_id)

    def on_release(self, remote: RemotePrefill) -> None:
        if not self._lender.end_local_lease(remote):
            self._borrower.on_release(remote)

    def poll(self) -> None:
        self._lender.poll()
        self._borrower.poll()

    def stats(self) -> dict[str, float]:
        return {**self._lender.stats(), **self._borrower.stats()}

    def close(self) -> None:
        self._lender.close()
