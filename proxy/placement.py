"""Where a request goes: pure, (request, what is known of the servers) -> placement.

What is known may be stale or missing: that costs time, never a wrong answer. The choice minimises
the predicted time to the first token and what it takes from the streams beside it; that each
server computes its prompts in turn is the whole model.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_HANDOFF_S = 0.005  # of a prompt computed elsewhere: one more request, and the pull
_FORGOTTEN = 1024  # blocks of one that left, with each addition: under a millisecond
_LEAST_SHARE = 0.2  # of a server's time that prompts get beside streams
_INTERRUPTED_S = (
    0.0175  # of first token, that each stream loses to a prompt however short
)
_ALL_LATE = (
    5.0  # times as bad that is where streams alone take all the time that they may
)
_CROWD = 96  # streams, more than which are interrupted as if they were so many
_LATE_S = 0.5  # up to which each second of waiting is worse than the one before
_PATIENCE_S = 0.25  # after which a wait feels twice as long
_WORK = 1.0  # seconds of first token that one of computing is worth: others wait for it
_COPY = (
    2.0  # as that, of computing again what another server has: it takes room there, too
)
DOUBLING = 96.0  # streams that make a step take twice as long, about
_WITHOUT_ROOM = (
    1e6  # more than any server holds, for each token that it has no room for
)
_UNKNOWN_TOKEN_S = 25e-6  # until it was measured
_PULL_S = 0.01  # of a prefix that another server lends, however short: a question, and the fence
_PULLED_S = (
    5e-6  # of a token that is pulled from another server: that of an 8B over 25 GB/s
)
_SURE = 0.875  # of what that saves: it may come late, or not at all
_HARM = 0.2  # seconds of first token that one second less for one stream is worth
USUAL_STEP_S = 0.025  # that a step may take while streams are generated

STEP_TOKENS = 8192  # of a prompt, before which a short one that came later is not begun
_SIZES = 12  # of prompts, each twice as long as the one before
_MUCH_LONGER = 6  # sizes: it is hardly delayed where another goes first

Depths = dict[int, float]  # by server: how many blocks of a prompt it has


@dataclass(slots=True)
class Load:
    """One server as the proxy knows it. All of it may be late.

    Attributes:
        index: its bit in PrefixIndex; small, and its own while it is a member.
        prompts: that wait or are being computed there.
        free_at: when the prompts that it has will have been computed, in seconds of any clock.
        late_s: by how much predictions of `free_at` were too early, all added up.
        queued_s: what the prompts of each size take that it has.
        passed_s: of that, what a prompt of each size does not wait for, as it is much shorter.
        running: streams that are generated there, or whose prompts it computes itself.
        coming: streams that will be, and whose prompts another server computes.
        held: tokens of KV that these streams have.
        capacity: tokens of KV; None while it has not said.
        token_s: what it takes for one token of a prompt, in seconds.
        launch_s: what it takes besides for a step with prompts.
        step_s: what a step of one stream takes; more add to that, see `step_s`.
        target_s: what a step with streams may take there: prompts are cut to fit.
    """

    index: int
    prompts: int = 0
    free_at: float = float("-inf")
    late_s: float = 0.0
    queued_s: list[float] = field(default_factory=lambda: [0.0] * _SIZES)
    passed_s: list[float] = field(default_factory=lambda: [0.0] * _SIZES)
    running: int = 0
    coming: int = 0
    held: int = 0
    capacity: int | None = None
    token_s: float = _UNKNOWN_TOKEN_S
    launch_s: float = 0.0
    step_s: float = 0.005
    target_s: float = USUAL_STEP_S

    def queue(self, size: int, seconds: float) -> None:
        """It has a prompt of this size more, or less."""
        self.queued_s[size] += seconds
        longer_s = -STEP_TOKENS * self.token_s  # of which one step is under way
        for longer in range(_SIZES - 1, _MUCH_LONGER - 1, -1):
            longer_s += self.queued_s[longer]
            self.passed_s[longer - _MUCH_LONGER] = max(longer_s, 0.0)


class Placement(NamedTuple):
    """Indices of servers; without a prefill server the decode server computes the prompt itself."""

    prefill: int | None
    decode: int


class PrefixIndex:
    """Which server has been sent which prefixes, in blocks, as chained hashes: a block's hash
    stands for all before it too.

    Each server forgets the blocks used longest ago, as its own cache does. A set of servers is an
    integer of one bit each, so that a lookup takes one operation a block however many there are.

    Args:
        max_blocks: of all servers together.
    """

    def __init__(self, max_blocks: int = 250_000) -> None:
        self._max_blocks = max_blocks
        self._servers: dict[int, int] = {}  # by hash
        self._recent: dict[int, OrderedDict[int, None]] = {}  # by server: its hashes
        self._num_blocks = 0
        self._gone: dict[
            int, OrderedDict[int, None]
        ] = {}  # as `_recent`, of servers to forget
        self._hidden = 0  # these servers, as a set

    def __len__(self) -> int:
        return self._num_blocks

    def add(
        self, server: int, hashes: Sequence[int], max_blocks: int | None = None
    ) -> None:
        """The server has these blocks, used now; it keeps `max_blocks` of all at most."""
        self._forget_some()
        if server in self._gone:
            return
        recent = self._recent.setdefault(server, OrderedDict())
        bit = 1 << server
        for block in reversed(hashes):  # the first of a prefix is forgotten last
            if block in recent:
                recent.move_to_end(block)
            else:
                recent[block] = None
                self._servers[block] = self._servers.get(block, 0) | bit
                self._num_blocks += 1
        while len(recent) > (
            max_blocks if max_blocks is not None else self._max_blocks
        ):
            self._drop(server, next(iter(recent)))
        while (excess := self._num_blocks - self._max_blocks) > 0 and self._recent:
            largest = max(self._recent, key=lambda each: len(self._recent[each]))
            for _ in range(min(excess, len(self._recent[largest]))):
                self._drop(largest, next(iter(self._recent[largest])))
            if not self._recent[largest]:
                del self._recent[largest]

    def has(self, server: int, block: int) -> bool:
        """Whether the server has this block."""
        return block in self._recent.get(server, ())

    def remove(self, server: int, hashes: Sequence[int]) -> None:
        """The server does not have these blocks after all."""
        for block in hashes:
            if self.has(server, block):
                self._drop(server, block)

    def forget(self, server: int) -> None:
        """It has restarted, or left. All at once would hold up streams for a tenth of a second: its
        blocks are hidden now, and go with what is added; it gets new ones after that."""
        if blocks := self._recent.pop(server, None):
            self._gone[server] = blocks
            self._hidden |= 1 << server

    def _forget_some(self) -> None:
        num_left = _FORGOTTEN
        while self._gone and num_left:
            server, blocks = next(iter(self._gone.items()))
            while blocks and num_left:
                self._unset(server, blocks.popitem()[0])
                num_left -= 1
            if not blocks:
                del self._gone[server]
                self._hidden &= ~(1 << server)

    def depths(self, hashes: Sequence[int]) -> Depths:
        """By server: how many blocks of this prefix it has, without those that have none."""
        found: Depths = {}
        left = ~self._hidden
        depth = 0
        for depth, block in enumerate(hashes):
            having = left & self._servers.get(block, 0)
            if having != left:
                if depth:
                    found.update((server, depth) for server in _bits(left & ~having))
                if not having:
                    return found
                left = having
        if left > 0:
            found.update((server, len(hashes)) for server in _bits(left))
        return found

    def _drop(self, server: int, block: int) -> None:
        del self._recent[server][block]
        self._unset(server, block)

    def _unset(self, server: int, block: int) -> None:
        self._num_blocks -= 1
        left = self._servers[block] & ~(1 << server)
        if left:
            self._servers[block] = left
        else:
            del self._servers[block]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        tokens: of its prompt; estimated where the prompt is text.
        hashes: of its prompt's blocks, chained, of `block_tokens` each.
        answer: tokens that it may generate.
        now: by the clock of Load.free_at.
        text: what the blocks are of.
        lent, lent_s: blocks that a server would lend, and when it would, in seconds from `now`.
    """

    tokens: int
    hashes: Sequence[int] = ()
    block_tokens: float = 512
    answer: int = 256
    now: float = 0.0
    text: bytes = field(default=b"", repr=False)
    lent: float = 0
    lent_s: float = 0.0

    @property
    def size(self) -> int:
        """See Load. Servers begin a prompt before those that are four times as long and have 1,024
        tokens; it is reckoned with where that hardly delays them."""
        return min(max(self.tokens.bit_length() - 6, 0), _SIZES - 1)


def place(
    ask: Ask, prefills: Sequence[Load], decodes: Sequence[Load], depths: Depths
) -> Placement:
    """The cheapest placement among these servers.

    Args:
        prefills, decodes: servers that may be given it, each pair of which is compatible; one
            decode server at least.
        depths: of PrefixIndex, for `ask.hashes`.
    """
    coming = sum([each.prompts for each in prefills]) / len(decodes)
    at, cost = cheapest_alone(ask, decodes, depths, coming)
    own = decodes[at]
    alone = Placement(None, own.index)
    if not prefills:
        return alone
    at, seconds, lost = cheapest_prefill(ask, prefills, depths)
    p, seconds = prefills[at], seconds + _HANDOFF_S
    if cost < (felt := _felt_s(seconds) + lost):
        # An idle one that lacks the prefix computes it at last: who comes after gains. By lot: what
        # streams lose to a prompt each time, of the price.
        lacks = depths.get(own.index, 0) - depths.get(p.index, 0)
        lot = hash((ask.tokens, *ask.hashes[-1:])) % 997 / 997
        if (
            p.prompts
            or lacks < 1
            or lot * felt >= min(own.running, _CROWD) * _INTERRUPTED_S
        ):
            return alone
        cost = felt
    d = decodes[cheapest_decode(ask, decodes)]
    if p is d or cost < _felt_s(seconds + _room_s(ask, d)) + lost:
        return alone
    return Placement(p.index, d.index)


def cheapest_prefill(
    ask: Ask, servers: Sequence[Load], depths: Depths
) -> tuple[int, float, float]:
    """The place of the server that would have computed the prompt first, and with the least of
    what another server has computed already; when, and what is lost by that, in seconds. One with
    streams (it takes either leg) counts what these lose."""
    best, least, cost, most = 0, float("inf"), 0.0, 0.0
    now, block, size, tokens = ask.now, ask.block_tokens, ask.size, ask.tokens
    if depths:
        most = max([depths.get(each.index, 0) for each in servers])
        if (
            anywhere := max(depths.values())
        ) > 2 * most:  # it lacks more than the last answers
            most = anywhere
    for place, server in enumerate(servers):
        depth = depths.get(server.index, 0) if depths else 0
        left, again = tokens - depth * block, (most - depth) * block * server.token_s
        seconds = (left if left > 1 else 1) * server.token_s
        lost = _WORK * seconds + _COPY * again
        if ask.lent:
            saved = min(saved_s(ask, server, depths), seconds)
            seconds -= saved
            lost -= _WORK * saved + _COPY * min(saved, again)
        if server.running:
            lost += min(server.running, _CROWD) * _INTERRUPTED_S
        if (begun_at := server.free_at - server.passed_s[size]) > now:
            seconds += begun_at - now
        elif server.prompts and server.free_at < now:
            seconds += (
                now - server.free_at
            )  # overdue: as long again, for all that is known
        if seconds + lost < least:
            best, least, cost = place, seconds + lost, lost
    return best, least - cost, cost


def cheapest_decode(ask: Ask, servers: Sequence[Load]) -> int:
    """The place of the server with the least KV, which sets how long its steps take, that has room
    for more."""
    wanted, best, least = ask.tokens + ask.answer, 0, float("inf")
    for place, server in enumerate(servers):
        if server.held >= least:
            continue
        fullness: float = server.held
        if server.capacity is not None and fullness + wanted > server.capacity:
            fullness = (fullness + wanted - server.capacity) * _WITHOUT_ROOM
        if fullness < least:
            best, least = place, fullness
    return best


def cheapest_alone(
    ask: Ask, servers: Sequence[Load], depths: Depths, coming: float = 0.0
) -> tuple[int, float]:
    """The place of the decode server that would compute the prompt itself at the least cost, and
    that: how late its first token feels, and what streams lose, those included that are `coming`
    from prefill servers. One loop with hardly a call: it is taken for each request."""
    best, least, wanted, now = 0, float("inf"), ask.tokens + ask.answer, ask.now
    block, most, size = ask.block_tokens, max(depths.values(), default=0), ask.size
    tokens, copied = ask.tokens, most * block * _COPY  # of one that has none of it
    for place, server in enumerate(servers):
        seconds = tokens * server.token_s
        lost = _WORK * seconds + copied * server.token_s
        if most and server.index in depths:
            depth = depths[server.index]
            left = tokens - depth * block
            seconds = (left if left > 1 else 1) * server.token_s
            lost = _WORK * seconds + _COPY * (most - depth) * block * server.token_s
        if ask.lent:
            saved = min(saved_s(ask, server, depths), seconds)
            seconds -= saved
            lost -= (_WORK + _COPY) * saved
        if streams := server.running + coming:
            share = 1.0 - server.step_s * (1.0 + streams / DOUBLING) / server.target_s
            harm = _HARM * seconds * streams
            interrupted = _INTERRUPTED_S * (streams if streams < _CROWD else _CROWD)
            counts = _ALL_LATE if share < _LEAST_SHARE and server.running else 1.0
            lost += counts * (harm if harm > interrupted else interrupted)
            if lost >= least:
                continue
            seconds /= share if share > _LEAST_SHARE else _LEAST_SHARE
            if server.capacity is not None and server.held + wanted > server.capacity:
                seconds += _room_s(ask, server)
        if (begun_at := server.free_at - server.passed_s[size]) > now:
            seconds += begun_at - now
        elif server.prompts and server.free_at < now:
            seconds += now - server.free_at
        cost = lost + seconds
        if cost < least:
            cost += (seconds if seconds < _LATE_S else _LATE_S) ** 2 / _PATIENCE_S
            if cost < least:
                best, least = place, cost
    return best, least


def saved_s(ask: Ask, server: Load, depths: Depths) -> float:
    """Of what this server would compute, where it pulls what others lend if that is quicker."""
    tokens = (ask.lent - depths.get(server.index, 0)) * ask.block_tokens
    return max(
        _SURE * (tokens * (server.token_s - _PULLED_S) - _PULL_S - ask.lent_s), 0.0
    )


def _felt_s(seconds: float) -> float:
    """How bad it is to wait so long for a first token."""
    return seconds + (seconds if seconds < _LATE_S else _LATE_S) ** 2 / _PATIENCE_S


def share_for_prompts(server: Load) -> float:
    """Of its time, while its streams keep within the limit, those that are coming too. Prompts that
    wait there count as well: they are streams by the time that the next one is computed."""
    share = (
        1.0 - step_s(server, server.coming) / server.target_s if server.running else 1.0
    )
    return share if share > _LEAST_SHARE else _LEAST_SHARE


def step_s(server: Load, more: int = 0) -> float:
    """What its steps take now, without prompts, or would with so many streams more."""
    return server.step_s * (1.0 + (server.running + more) / DOUBLING)


def _room_s(ask: Ask, server: Load) -> float:
    """The wait for KV to be given back, roughly: streams end one after the other."""
    if server.capacity is None or not server.running:
        return 0.0
    missing = server.held + ask.tokens + ask.answer - server.capacity
    return (
        missing / max(server.held, 1) * ask.answer * step_s(server)
        if missing > 0
        else 0.0
    )
