"""The fence: after the last byte, P's answer decides whether the pull was
successful.
"""

import signal
import threading
from typing import Any

import numpy as np
import pytest

from kvcache.pool import KVPool
from kvcache.transfer.move.place import Placer
from kvcache.transfer.pulls.pull_state import Phase
from protocol.errors import LeaseGone, PeerUnreachable
from protocol.messages import RemotePrefill
from tests.rigs.memory_pair import DEADLINE_S, PATIENT, Decode, Prefill, expected
from tests.rigs.process_pair import Child


class GatedMapper(Placer):
    """A placer that reports no launch as finished before the gate opens."""

    gate: threading.Event
    launched: threading.Event

    def launch(self, *args: Any) -> Any:
        handle = super().launch(*args)
        self.launched.set()
        return handle

    def finished(self, handle: Any) -> bool:
        return self.gate.is_set() and super().finished(handle)


class Gate:
    """Makes placers that report no launch as finished until the test opens the gate."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.launched = threading.Event()

    def placer(self, pool: KVPool) -> GatedMapper:
        mapper = GatedMapper(pool)
        mapper.gate = self.opened
        mapper.launched = self.launched
        return mapper

    def pull_until_copied(self, prefill: Any, decode: Decode) -> RemotePrefill:
        """Starts a pull and waits until all its bytes are copied. The gate keeps the
        pull unfinished.
        """
        remote: RemotePrefill = prefill.lease([5], 8)
        decode.coordinator.pull("a", remote, 0, 8, [3])
        assert self.launched.wait(DEADLINE_S)
        return remote


@pytest.mark.parametrize("ending", ["expired", "aborted"])
def test_lease_that_ends_before_the_last_byte_fails_the_pull(rig, ending):
    gate = Gate()
    prefill = rig(Prefill)
    settings = {"renew_interval_s": 1000.0, **PATIENT}
    decode = rig(Decode, make_placer=gate.placer, settings=settings)
    remote = gate.pull_until_copied(prefill, decode)
    if ending == "aborted":
        assert prefill.server.abort(remote.lease_id)
    else:
        prefill.clock.skip(remote.lease_s)
    assert prefill.outcomes() == [ending]
    gate.opened.set()
    assert isinstance(decode.wait_for_error(), LeaseGone)


def test_bytes_of_a_killed_peer_are_not_used(rig):
    """The peer's pool is mapped, so its bytes can be copied even after it has died."""
    gate = Gate()
    prefill = rig(Child, "prefill")
    settings = {"side_channel_timeout_s": 0.3, **PATIENT}
    decode = rig(Decode, make_placer=gate.placer, settings=settings)
    gate.pull_until_copied(prefill, decode)
    prefill.close()
    gate.opened.set()
    assert isinstance(decode.wait_for_error(), PeerUnreachable)


def test_fence_waits_until_a_stopped_peer_continues(rig):
    gate = Gate()
    prefill = rig(Child, "prefill")
    settings = {"fence_timeout_s": 60.0, "side_channel_timeout_s": 60.0}
    decode = rig(Decode, make_placer=gate.placer, settings=settings)
    remote = gate.pull_until_copied(prefill, decode)
    prefill.signal(signal.SIGSTOP)
    gate.opened.set()
    decode.until(lambda: any(state.phase is Phase.FENCING for state in decode.pulls()))
    prefill.signal(signal.SIGCONT)
    decode.done()
    assert np.array_equal(decode.tokens([3], 0, 8), expected(remote, 0, 8))
    assert prefill.request(counters=True)["completed"] == 1
