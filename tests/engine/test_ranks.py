"""Rank 0 and its followers agree before they compute."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.core.batch import PendingStep, StepInput, StepOutput
from engine.worker.ranks import Follower, Leader, OtherRanks, RankLost, RankTimeout
from kvcache.layout import KVLayout
from protocol.handshake import ProcessRecord, RankMetadata
from protocol.ipc.processes import own_record


def test_followers_learn_the_port_and_the_smallest_number_of_blocks(socket_folder: Path) -> None:
    address = f"ipc://{socket_folder}/ranks"
    leader = Leader(address, 3, timeout_s=30)
    learned: dict[int, tuple[int, int]] = {}

    def follow(rank: int) -> None:
        follower = Follower(address, rank)
        learned[rank] = follower.join(), follower.agree_on_blocks(100 * rank)
        follower.close()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    leader.share_port(4711)
    assert leader.agree_on_blocks(150) == 100
    for thread in threads:
        thread.join(30)
    assert learned == {1: (4711, 100), 2: (4711, 100)}
    leader.close()


def test_a_rank_that_never_comes_is_a_typed_error(socket_folder: Path) -> None:
    leader = Leader(f"ipc://{socket_folder}/ranks", 2, timeout_s=0.05)
    with pytest.raises(RankTimeout, match="no rank joined"):
        leader.share_port(4711)
    leader.close()


class _Step:
    def __init__(self, runner: "_AheadRunner") -> None:
        self._runner = runner

    def result(self) -> StepOutput:
        self._runner.num_under_way -= 1
        return StepOutput([], [])


class _AheadRunner:
    """Launches and remembers."""

    depth = 1

    def __init__(self) -> None:
        self.token_ids: list[list[int]] = []
        self.num_under_way = self.most_under_way = 0

    def check(self, step: StepInput) -> None:
        pass

    def launch(self, step: StepInput) -> _Step:
        self.token_ids.append(step.token_ids.tolist())
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        return _Step(self)


def test_followers_launch_ahead_as_far_as_rank_0_does(socket_folder: Path) -> None:
    address = f"ipc://{socket_folder}/ranks"
    leader, follower = Leader(address, 2, timeout_s=30), Follower(address, 1)
    ours, theirs = _AheadRunner(), _AheadRunner()
    leader.runner = ours  # type: ignore[assignment]

    def follow() -> None:
        follower.join()
        follower.announce(_metadata(1, None))
        follower.run(theirs)  # type: ignore[arg-type]

    thread = threading.Thread(target=follow)
    thread.start()
    leader.share_port(4711)
    leader.collect(_metadata(0, None))
    assert leader.depth == 1
    under_way: list[PendingStep] = []
    for index in range(5):
        one = np.ones(1, np.int32)
        step = StepInput(np.array([-1 if index else 7]), one, one, one[None], one * 0, [])
        under_way.append(leader.launch(step))
        if len(under_way) > leader.depth:
            under_way.pop(0).result()
    leader.close()
    thread.join(30)
    assert not thread.is_alive()
    follower.close()
    assert ours.token_ids == theirs.token_ids == [[7], [-1], [-1], [-1], [-1]]
    assert ours.most_under_way == theirs.most_under_way == 2


# -- what became of the other ranks ---------------------------------------------------------------


_ALIVE = """
import sys
from msgspec.json import encode
from protocol.ipc.processes import own_record
print(encode(own_record()).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def follower() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _ALIVE], stdin=pipe, stdout=pipe)
    yield process
    process.kill()
    process.communicate()


def _record(process: "subprocess.Popen[bytes]") -> ProcessRecord:
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=ProcessRecord)


_FAILURE = RuntimeError("a collective broke")


def test_a_failure_beside_living_ranks_is_no_other_s(follower: "subprocess.Popen[bytes]") -> None:
    OtherRanks(0, [None, _record(follower), None]).blame(_FAILURE)
    assert follower.poll() is None


def test_a_rank_never_blames_itself(follower: "subprocess.Popen[bytes]") -> None:
    """Which an engine of one rank would, if any: its own record is one of an ended process here."""
    record = _record(follower)
    follower.kill()
    follower.wait(30)
    alone = OtherRanks(0, [record])
    assert not alone._watched
    alone.blame(_FAILURE)


@pytest.mark.parametrize("own", [0, 1])
def test_the_rank_that_ended_is_named(follower: "subprocess.Popen[bytes]", own: int) -> None:
    others = OtherRanks(own, [own_record(), own_record(), _record(follower)])
    follower.kill()
    follower.wait(30)
    with pytest.raises(RankLost, match="rank 2 has ended") as raised:
        others.blame(_FAILURE)
    assert raised.value.__cause__ is _FAILURE


def test_a_rank_that_ended_before_it_was_known_is_named_too(
    follower: "subprocess.Popen[bytes]",
) -> None:
    record = _record(follower)
    follower.kill()
    follower.wait(30)
    with pytest.raises(RankLost, match="rank 1 has ended"):
        OtherRanks(0, [own_record(), record]).blame(_FAILURE)


def test_a_rank_that_is_being_torn_down_is_waited_for(
    follower: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU memory takes a while, and only its end says how it ended."""
    asked: list[int] = []

    def is_ending(pid: int) -> bool:
        asked.append(pid)
        if len(asked) == 3:
            os.kill(pid, signal.SIGKILL)
        return True

    monkeypatch.setattr("engine.worker.ranks.is_ending", is_ending)
    with pytest.raises(RankLost, match="rank 1 has ended"):
        OtherRanks(0, [None, _record(follower)]).blame(_FAILURE)
    assert len(asked) >= 3


def test_every_rank_learns_which_processes_the_others_are(
    socket_folder: Path, follower: "subprocess.Popen[bytes]"
) -> None:
    """The one that is lost here follows nobody: only its number and process count."""
    lost = _record(follower)
    address = f"ipc://{socket_folder}/ranks"
    leader = Leader(address, 3, timeout_s=30)
    blamed: list[str] = []

    def follow(rank: int, process: ProcessRecord | None) -> None:
        end = Follower(address, rank)
        end.join()
        end.announce(_metadata(rank, process))
        end.run(_AheadRunner())  # type: ignore[arg-type]
        try:
            end.others.blame(_FAILURE)
        except RankLost as error:
            blamed.append(str(error))
        end.close()

    threads = [
        threading.Thread(target=follow, args=asked) for asked in ((1, own_record()), (2, lost))
    ]
    for thread in threads:
        thread.start()
    leader.share_port(4711)
    ranks = leader.collect(_metadata(0, own_record()))
    assert [metadata.rank for metadata in ranks] == [0, 1, 2]
    follower.kill()
    follower.wait(30)
    leader.close()
    for thread in threads:
        thread.join(30)
    assert blamed == ["rank 2 has ended"]  # rank 2 itself blames nobody
    with pytest.raises(RankLost, match="rank 2"):
        leader.others.blame(_FAILURE)


def _metadata(rank: int, process: ProcessRecord | None) -> RankMetadata:
    return RankMetadata(
        rank=rank,
        agent_metadata=b"",
        base_address=0,
        nbytes=0,
        device_id=0,
        device_kind="cpu",
        layout=KVLayout("BHLCND", 2, 1, 1, 2, 4, 8, "float32").to_record(),
        process=process,
    )


def test_a_step_of_any_size_arrives_whole_and_the_end_of_rank_0_is_told(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.ranks._TORN_DOWN_S", 0.0)
    address = f"ipc://{socket_folder}/ranks"
    leader, follower = Leader(address, 2, timeout_s=30), Follower(address, 1)
    leader.runner, theirs = _AheadRunner(), _AheadRunner()  # type: ignore[assignment]
    ended: list[str] = []

    def follow() -> None:
        follower.join()
        follower.announce(_metadata(1, None))
        try:
            follower.run(theirs)  # type: ignore[arg-type]
        except RankLost as error:
            ended.append(str(error))
        follower.close()

    thread = threading.Thread(target=follow)
    thread.start()
    leader.share_port(4711)
    leader.collect(_metadata(0, None))
    one = np.ones(1, np.int32)
    token_ids = np.arange(1 << 20)
    leader.launch(StepInput(token_ids, one, one, one[None], one * 0, []))
    leader._links[0].close()
    thread.join(30)
    leader.close()
    assert theirs.token_ids == [token_ids.tolist()]
    assert ended == ["rank 0 has ended"]
