"""Property: a pull that ends as done has read the bytes of its lease, despite any
faults.

The test uses P's real lease table and offers, and D's real pulls. Several pulls may
read one lease, which may grow while they read. Messages between P and D are delayed,
lost, repeated and reordered. When a lease ends, its blocks get new content at once.

P may end or be killed. A successor at the same address has different content in all
blocks. A READ from the dead engine may happen to read the successor's memory.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from kvcache.lease import LeaseTable
from kvcache.offers import Offers
from kvcache.transfer.pulls.messages import Pull, PullDone, PullSettings, RankEnded
from kvcache.transfer.pulls.pull_state import Action, PullState
from protocol.handshake import (
    AbortLease,
    Complete,
    LeaseEnded,
    LeaseRequest,
    Ok,
    Progress,
    Renew,
    Subscribe,
)
from protocol.messages import RemotePrefill
from tests.rigs.examples import examples
from tests.rigs.memory_pair import REMOTE, pull_command

NUM_BLOCKS = 6
NUM_RANKS = 2
FOREIGN = "content of another lease"
RARELY = st.sampled_from([False, False, False, True])


class Engine:
    """One incarnation of P, the prefill engine."""

    def __init__(self, number: int) -> None:
        self.incarnation = str(number)
        self.table = LeaseTable()
        self.offers: Offers[Pulling] = Offers(self.table)
        # By transfer id: the computed blocks of a prompt that is still being computed.
        self.growing: dict[str, list[int]] = {}
        self.content = dict.fromkeys(range(NUM_BLOCKS), FOREIGN)
        self.free = list(range(NUM_BLOCKS))
        self.is_alive = True

    def collect(self) -> None:
        """Frees the blocks of ended leases and overwrites them at once."""
        for ended in self.table.drain_ended():
            self.offers.on_lease_ended(ended.lease_id)
            for block in ended.block_ids:
                self.content[block] = FOREIGN
                self.free.append(block)


@dataclass(eq=False)
class Pulling:
    """A pull, and the content that its ranks have read so far."""

    state: PullState
    source: Engine
    # By rank: the blocks that the rank must still read. Ended ranks are absent.
    unread: dict[int, list[int]] = field(default_factory=dict)
    read_content: list[str] = field(default_factory=list)
    is_done: bool = False


@dataclass(eq=False)
class Message:
    """A request on its way to P, or the reply on its way to D."""

    pulling: Pulling
    request: LeaseRequest | Subscribe
    reply: Ok | LeaseEnded | Progress | None = None


class FenceMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.p_now = self.d_now = 0.0
        self.engine = Engine(0)
        self.leases: list[tuple[Engine, RemotePrefill]] = []
        self.pullings: list[Pulling] = []
        self.requests: list[Message] = []
        self.answers: list[Message] = []
        self.lease(2)
        for _ in range(2):  # two pulls of one lease
            self.begin_pull(*self.leases[0])

    # -- P

    @rule(count=st.integers(1, 2))
    def lease(self, count: int) -> None:
        if len(self.engine.free) < count:
            return
        blocks = [self.engine.free.pop(0) for _ in range(count)]
        lease_id = f"{len(self.leases) + 1:032x}"
        self.engine.content.update(dict.fromkeys(blocks, lease_id))
        self.engine.table.grant(lease_id, "r", blocks, 10.0, self.p_now)
        remote = replace(
            REMOTE,
            incarnation=self.engine.incarnation,
            lease_id=lease_id,
            lease_s=10.0,
            block_ids=blocks,
            num_tokens=16 * count,
        )
        self.leases.append((self.engine, remote))

    @rule(digest=st.sampled_from([*[""] * 5, "another prompt's"]))
    def offer_prompt(self, digest: str) -> None:
        """A proxy offers D a prompt that P will compute. D begins up to two pulls,
        which subscribe to the prompt.
        """
        name = f"prompt {len(self.leases)}"
        fields = {"lease_id": "", "lease_s": 10.0, "block_ids": [], "num_tokens": 32}
        remote = replace(
            REMOTE, incarnation=self.engine.incarnation, transfer_id=name, **fields
        )
        self.leases.append((self.engine, remote))
        self.engine.growing[name] = []
        self.engine.offers.expect(name, name, digest, 10.0, 16, self.p_now)
        for _ in range(2):
            if len(self.pullings) < 5:
                self.begin_pull(*self.leases[-1])
                state = self.pullings[-1].state
                self.perform(self.pullings[-1], state.tick(self.d_now))
                self.process_request(self.requests.pop())

    @precondition(lambda self: self.engine.growing and self.engine.free)
    @rule(
        data=st.data(),
        event=st.sampled_from(["continues"] * 6 + ["is aborted"]),
        is_delivered=st.booleans(),
    )
    def compute(self, data: st.DataObject, event: str, is_delivered: bool) -> None:
        """P computes a chunk of one block. The second chunk completes the prompt."""
        engine = self.engine
        name = data.draw(st.sampled_from(sorted(engine.growing)))
        if event == "is aborted":
            engine.offers.withdraw(name, self.p_now)
            del engine.growing[name]
            return
        if engine.offers.num_leased_blocks(name) is None:
            return
        block = engine.free.pop(0)
        seals = bool(engine.growing[name])
        engine.content[block] = name
        lease_id = f"{len(engine.growing[name])} of {name}"
        if not engine.offers.grow(name, lease_id, [block], self.p_now, seals=seals):
            engine.content[block] = FOREIGN
            engine.free.append(block)
            return
        engine.growing[name].append(block)
        if seals:
            engine.offers.finish(
                name, f"0 of {name}", engine.growing.pop(name), b"{}", self.p_now
            )
        if is_delivered:
            for pulling, reply in engine.offers.take_messages(
                self.p_now, lambda reader: False
            ):
                self.perform(pulling, pulling.state.on_reply(reply, self.d_now))

    @rule(sweeps=st.booleans())
    def collect(self, sweeps: bool) -> None:
        if sweeps:
            self.engine.table.expire(self.p_now)
        self.engine.collect()

    @rule(change=st.sampled_from([*(0.5,) * 5, 4.0, 11.0, "ends", "is killed"]))
    def disturb(self, change: float | str) -> None:
        if not isinstance(change, str):
            self.p_now += change
            return
        if change == "ends":
            self.engine.table.abort_all(self.p_now)
        self.engine.is_alive = False
        self.engine = Engine(int(self.engine.incarnation) + 1)

    # -- D

    @precondition(lambda self: self.leases and len(self.pullings) < 4)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        self.begin_pull(*data.draw(st.sampled_from(self.leases)))

    def begin_pull(self, source: Engine, remote: RemotePrefill) -> None:
        number = len(self.pullings)
        state = PullState(
            f"pull {number}",
            remote,
            NUM_RANKS,
            PullSettings(),
            f"attempt {number}",
            self.d_now,
        )
        pulling = Pulling(state, source)
        self.pullings.append(pulling)
        order = pull_command(state.pull_id, remote, 0, remote.num_tokens, [1, 2])
        state.pull(order, self.d_now)
        self.perform(pulling, state.on_peer_ready(self.d_now))

    @precondition(lambda self: any(pulling.unread for pulling in self.pullings))
    @rule(data=st.data(), count=st.integers(1, 4), goes_astray=st.booleans())
    def read(self, data: st.DataObject, count: int, goes_astray: bool) -> None:
        """A rank reads some blocks. The rank ends after its last block."""
        pulling = data.draw(st.sampled_from([p for p in self.pullings if p.unread]))
        rank = data.draw(st.sampled_from(sorted(pulling.unread)))
        is_wrong = goes_astray and not pulling.source.is_alive
        self.read_some(pulling, rank, count, is_wrong=is_wrong)

    def read_some(
        self, pulling: Pulling, rank: int, count: int, *, is_wrong: bool
    ) -> None:
        blocks = pulling.unread[rank]
        for block in blocks[:count]:
            pulling.read_content.append(
                FOREIGN if is_wrong else pulling.source.content[block]
            )
        del blocks[:count]
        if not blocks:
            del pulling.unread[rank]
            ended = RankEnded(
                pull_id=pulling.state.pull_id, rank=rank, complete=True, path="x"
            )
            self.perform(pulling, pulling.state.on_report(ended, self.d_now))

    @precondition(lambda self: self.pullings)
    @rule(data=st.data(), change=st.sampled_from([*(0.0, 0.3) * 3, 1.1, 6.0, "cancel"]))
    def wait_or_cancel(self, data: st.DataObject, change: float | str) -> None:
        pulling = data.draw(st.sampled_from(self.pullings))
        if isinstance(change, str):
            self.perform(pulling, pulling.state.cancel(self.d_now))
            return
        self.d_now += change
        self.perform(pulling, pulling.state.tick(self.d_now))

    def perform(self, pulling: Pulling, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Pull():
                    cut = slice(action.token_start // 16, -(-action.token_stop // 16))
                    blocks = action.remote_block_ids[cut]
                    pulling.unread = {rank: list(blocks) for rank in range(NUM_RANKS)}
                case LeaseRequest() | Subscribe():
                    self.requests.append(Message(pulling, action))
                case PullDone():
                    assert not pulling.is_done and not pulling.unread
                    remote = pulling.state.remote
                    lease_name = remote.transfer_id or remote.lease_id
                    assert pulling.read_content == [lease_name] * len(
                        pulling.read_content
                    )
                    assert (
                        len(pulling.read_content) == NUM_RANKS * remote.num_tokens // 16
                    )
                    pulling.is_done = True

    # -- messages between P and D

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_lost=RARELY, is_repeated=RARELY)
    def deliver_request(
        self, data: st.DataObject, is_lost: bool, is_repeated: bool
    ) -> None:
        message = data.draw(st.sampled_from(self.requests))
        if not is_repeated:
            self.requests.remove(message)
        if is_lost:
            return
        self.process_request(message)

    def process_request(self, message: Message) -> None:
        request = message.request
        engine = self.engine
        ok = request.incarnation == engine.incarnation
        reply: Ok | LeaseEnded
        match request:
            case Subscribe() if ok:
                reply = engine.offers.subscribe(request, message.pulling, self.p_now)
                self.answers.append(Message(message.pulling, request, reply))
                return
            case Renew():
                ok = ok and engine.table.renew(request.lease_id, self.p_now)
            case Complete():
                ok = ok and engine.table.complete(
                    request.lease_id, request.attempt_id, self.p_now
                )
            case AbortLease():
                ok = ok and engine.table.abort(request.lease_id, self.p_now)
        reply = Ok(nonce=request.nonce) if ok else LeaseEnded(nonce=request.nonce)
        self.answers.append(Message(message.pulling, request, reply))

    @precondition(lambda self: self.pullings)
    @rule(data=st.data())
    def proceed_without_faults(self, data: st.DataObject) -> None:
        """All messages of one pull arrive, and its ranks read blocks without faults."""
        pulling = data.draw(st.sampled_from(self.pullings))
        for _ in range(3):
            for message in [m for m in self.requests if m.pulling is pulling]:
                self.requests.remove(message)
                self.process_request(message)
            for message in [m for m in self.answers if m.pulling is pulling]:
                self.answers.remove(message)
                assert message.reply is not None
                self.perform(pulling, pulling.state.on_reply(message.reply, self.d_now))
            for rank in sorted(pulling.unread):
                self.read_some(pulling, rank, 4, is_wrong=not pulling.source.is_alive)

    @rule(is_lost=RARELY)
    def send_progress(self, is_lost: bool) -> None:
        """P sends the progress of prompts to their readers."""
        for pulling, reply in self.engine.offers.take_messages(
            self.p_now, lambda reader: False
        ):
            if not is_lost:
                self.answers.append(
                    Message(pulling, pulling.state.abort_message(), reply)
                )

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), is_repeated=RARELY)
    def deliver_reply(self, data: st.DataObject, is_repeated: bool) -> None:
        message = data.draw(st.sampled_from(self.answers))
        if not is_repeated:
            self.answers.remove(message)
        assert message.reply is not None
        self.perform(
            message.pulling, message.pulling.state.on_reply(message.reply, self.d_now)
        )


TestFenceProperties = FenceMachine.TestCase
TestFenceProperties.settings = examples(500, stateful_step_count=40)
