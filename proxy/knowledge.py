"""What the proxy knows of its servers' work, from what it sent them and when they answered.

No server is asked for it, so two proxies share nothing: each sees its own share of the load, and
what it does not see it feels in the times it measures. Does no I/O.
"""

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from proxy.legs.request_profile import BLOCK_BYTES
from proxy.placement import (
    DOUBLING,
    STEP_TOKENS,
    USUAL_STEP_S,
    Ask,
    Depths,
    Load,
    PrefixIndex,
    cheapest_alone,
    cheapest_decode,
    cheapest_prefill,
    place,
    saved_s,
    share_for_prompts,
    step_s,
)

Routing = Literal["auto", "least_loaded", "round_robin"]
Disaggregate = Literal["always", "auto", "never"]

ServerT = TypeVar("ServerT")

_FASTEST_S = 1e-7  # of a token, and of a step
_MEMORY_S = 0.5  # of work, after which new measurements count as much as all before
WORTH_A_HINT = 32  # tokens that another server has more: fewer are computed in no time
_MAX_ENDS = 16_384  # of prompts and their answers, of all servers
_DOUBT = 2.0  # that a step takes any time besides its tokens'; 1: none
_FORGOTTEN = 0.05  # by each health check of an idle server, of how much slower it was than others
_MOST = 10**12  # of anything that a server tells
_LEAST_OF_PROMPTS = 0.25  # of a step's time with prompts, whatever streams take


class Totals(NamedTuple):
    """Of an engine since its start: steps, the tokens in them, those of prompts among these, and
    the steps' seconds; then of the steps with prompts alone: steps, all tokens, seconds."""

    steps: float = 0.0
    tokens: float = 0.0
    prompts: float = 0.0
    seconds: float = 0.0
    mixed_steps: float = 0.0
    mixed_tokens: float = 0.0
    mixed_seconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """A server's 429 to a request of this priority and length. Times are those of time.monotonic.

    Attributes:
        until: before which none is sent to it that is as long and no more urgent.
        retry_at: when there should be room again.
        is_of_grammars: the trial queue is full, which concerns requests with new schemas only.
    """

    until: float
    retry_at: float
    priority: int
    tokens: int
    is_of_grammars: bool = False

    def speaks_of(self, ask: Ask, priority: int, now: float) -> bool:
        """Whether a request that is as long and no more urgent would be refused now, too."""
        return (
            now < self.until and priority >= self.priority and ask.tokens >= self.tokens
        )


class _PromptSteps:
    """What steps with prompts take: so much for each step, and for each token. A step has a least
    time: by short prompts alone a server would look slow for long ones. Least squares.

    Attributes:
        launch_s, token_s: the two terms; 0 until something was measured.
    """

    def __init__(self) -> None:
        self.launch_s = self.token_s = 0.0
        self._steps = self._both = self._tokens = self._steps_s = self._tokens_s = 0.0

    def took(self, steps: float, tokens: float, seconds: float) -> None:
        believed = self.launch_s * steps + self.token_s * tokens
        weight = 1.0 / max(min(believed or seconds, seconds), _FASTEST_S)
        kept = _MEMORY_S / (_MEMORY_S + seconds)
        self._steps = kept * self._steps + weight * steps * steps
        self._both = kept * self._both + weight * steps * tokens
        self._tokens = kept * self._tokens + weight * tokens * tokens
        self._steps_s = kept * self._steps_s + weight * steps * seconds
        self._tokens_s = kept * self._tokens_s + weight * tokens * seconds
        launch_s = self._steps_s * self._tokens - self._tokens_s * self._both
        launch_s /= _DOUBT * self._steps * self._tokens - self._both * self._both
        self.launch_s = max(launch_s, 0.0)
        token_s = (self._tokens_s - self.launch_s * self._both) / self._tokens
        self.token_s = max(token_s, _FASTEST_S)


@dataclass
class Work:
    """One leg that a server was given.

    Attributes:
        computes: its prompt is not computed yet.
        takes_s: that, as predicted.
        end: of that, by what was known when it began; `load.late_s` is to be added.
        begun: when it was given.
        is_coming: it is counted in `load.coming`, not in `load.running`: it has no first token.
        new: blocks that the server computes for it, each with the server's index.
        is_answered: the server has begun to answer with 200, so it has the prompt.
    """

    load: Load
    ask: Ask
    computes: bool
    generates: bool
    takes_s: float
    end: float
    begun: float
    new: Sequence[tuple[int, int]]
    is_coming: bool
    is_answered: bool = False


class _End(NamedTuple):
    """What a server has beyond the last whole block of a prompt: the rest of it, and the answer.

    Attributes:
        size, text: of that rest, without what closes its JSON: bytes, and their hash.
        tokens: from the prompt's first to the answer's last, about.
    """

    size: int
    text: int
    tokens: float

    def goes_on(self, text: bytes, start: float) -> bool:
        """Whether a prompt has the same after its block that begins there."""
        at = int(start)
        return hash(text[at : at + self.size]) == self.text


class _Loads(dict[object, Load]):
    """By server; each gets an index of its own, the smallest that no other has: indices are bits
    of PrefixIndex, which must not grow while servers come and go."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def __missing__(self, server: object) -> Load:
        taken = {load.index for load in self.values()}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        return self.setdefault(server, Load(index, target_s=self.step_s))


class Knowledge:
    """Loads by server, and who has which prefixes.

    Args:
        max_blocks: of all prefixes of all servers.
        step_s: what a step with streams may take at servers that do not say.
    """

    def __init__(
        self,
        routing: Routing = "round_robin",
        disaggregate: Disaggregate = "always",
        *,
        max_blocks: int = 250_000,
        step_s: float = USUAL_STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routing, self._disaggregate = routing, disaggregate
        self._prefixes = PrefixIndex(max_blocks)
        self._clock = clock
        self.loads = _Loads(step_s)
        self._totals: dict[object, Totals] = {}
        self._prompt_steps: dict[object, _PromptSteps] = {}
        self._lenders: dict[int, object] = {}  # by index
        self._ends = OrderedDict[
            tuple[int, int], _End
        ]()  # by the last whole block, and by server
        self._coming = set[tuple[int, int]]()  # blocks, and who has each by and by
        self._placed: dict[int, Work] = {}  # by the id of its Ask, until its leg begins
        self.pulls = False  # servers are told whose KV to pull

    def forget(self, server: object) -> None:
        """What it had cached is not there any more: it has restarted, or left."""
        self._prefixes.forget(self.loads[server].index)

    def are_one(self, server: object, other: object) -> None:
        """Two members are one server, which takes either leg."""
        self.loads[server] = self.loads[other]

    def left(self, server: object) -> None:
        """It is no member any more, and has nothing to do."""
        load = self.loads.pop(server, None)
        if load is not None and self._lenders.get(load.index) is server:
            del self._lenders[load.index]
        if load is not None and not any(each is load for each in self.loads.values()):
            self._prefixes.forget(load.index)
        self._totals.pop(server, None)
        self._prompt_steps.pop(server, None)

    def goes_alone(
        self, ask: Ask, prefills: Sequence[object], decodes: Sequence[object]
    ) -> bool:
        """Whether a decode server shall compute the prompt itself. One of them has it at once, as
        others may be placed before its leg can begin: `begin` it then, and tell `unplaced`."""
        if self._disaggregate != "auto":
            return self._disaggregate == "never"
        p, d = (
            [self.loads[server] for server in servers]
            for servers in (prefills, decodes)
        )
        depths = self._depths(ask)
        found = place(self._timed(ask, depths), p, d, depths)
        if found.prefill is not None:
            return False
        server = next(
            server for server in decodes if self.loads[server].index == found.decode
        )
        self._placed[id(ask)] = self.begin(server, ask, computes=True, generates=True)
        return True

    def unplaced(self, ask: Ask) -> None:
        """What has not begun by now does not begin any more."""
        if placed := self._placed.pop(id(ask), None):
            self.ended(placed)

    def first(
        self,
        servers: Sequence[ServerT],
        ask: Ask | None,
        *,
        computes: bool,
        generates: bool,
    ) -> ServerT:
        """The server to take; of equals the one that comes first."""
        if ask is None or self._routing == "round_robin" or len(servers) == 1:
            return servers[0]
        if generates and (placed := self._placed.get(id(ask))) is not None:
            servers = [s for s in servers if self.loads[s] is placed.load] or servers
        loads = [self.loads[server] for server in servers]
        depths = self._depths(ask) if self._routing == "auto" else {}
        known = self._timed(ask, depths), loads, depths
        if computes:
            return servers[
                (cheapest_alone if generates else cheapest_prefill)(*known)[0]
            ]
        return servers[cheapest_decode(ask, loads)]

    def lends(self, server: object, does: bool) -> None:
        """Whether others may pull its KV."""
        index = self.loads[server].index
        if does:
            self._lenders[index] = server
        else:
            self._lenders.pop(index, None)

    def lenders(self, server: object, ask: Ask) -> list[tuple[object, int]]:
        """Who has more of a prompt than the server that shall compute it, and how many tokens; who
        has most comes first."""
        if not self.pulls:
            return []
        size, index = ask.block_tokens, self.loads[server].index
        # What it is yet to compute may still be on its way to it from another server.
        has = {
            i: self._computed_of(ask, i, depth)
            for i, depth in self._depths(ask).items()
        }
        least = has.get(index, 0) + WORTH_A_HINT / max(size, 1.0)
        able = [
            (depth, i)
            for i, depth in has.items()
            if i in self._lenders and depth >= least
        ]
        found = sorted(
            (-depth, self._answers_s(self._lenders[i]), i) for depth, i in able
        )
        return [(self._lenders[i], int(-depth * size)) for depth, _, i in found]

    def _timed(self, ask: Ask, depths: Depths) -> Ask:
        """It now, and with the blocks that the server has computed which lends most of them."""
        most, answers_s = 0.0, 0.0
        for index, depth in depths.items() if self.pulls else ():
            if depth >= most and index in self._lenders:
                computed, seconds = self._computed_of(ask, index, depth), 0.0
                if computed >= most:
                    seconds = self._answers_s(self._lenders[index])
                    answers_s = seconds if computed > most else min(answers_s, seconds)
                    most = computed
        return replace(ask, now=self._clock(), lent=most, lent_s=answers_s)

    def _answers_s(self, lender: object) -> float:
        """Until a server can tell what it lends: between two steps."""
        load = self.loads[lender]
        step_s = self.loads.step_s if load.running else STEP_TOKENS * load.token_s
        return min(max(load.free_at - self._clock(), 0.0), step_s)

    def _computed_of(self, ask: Ask, index: int, depth: float) -> float:
        """Of these blocks of a server, those that it has by now: they come in order."""
        last = min(int(depth), len(ask.hashes))
        if not last or (ask.hashes[last - 1], index) not in self._coming:
            return depth
        return bisect_left(
            range(last), True, key=lambda n: (ask.hashes[n], index) in self._coming
        )

    def _depths(self, ask: Ask) -> Depths:
        """Blocks of its prompt by server, the answer before its latest question among them."""
        depths = self._prefixes.depths(ask.hashes)
        for index, depth in depths.items() if ask.text else ():
            end = self._ends.get((ask.hashes[int(depth) - 1], index))
            if end is not None and end.goes_on(ask.text, depth * BLOCK_BYTES):
                depths[index] = max(
                    depth, min(end.tokens, ask.tokens) / ask.block_tokens
                )
        return depths

    def _has_prompt(self, load: Load, ask: Ask) -> None:
        size = (
            ask.block_tokens or 1.0
        )  # a body without a prompt is for the server to refuse
        most = None if load.capacity is None else int(load.capacity / size)
        self._prefixes.add(load.index, ask.hashes, most)
        self._has_all(load, ask)

    def _has_all(self, load: Load, ask: Ask, num_generated: float = 0) -> None:
        """The server has a prompt, and so much of its answer."""
        if not ask.hashes or not ask.text:
            return
        key = ask.hashes[-1], load.index
        rest = ask.text[len(ask.hashes) * BLOCK_BYTES : -1]
        self._ends.pop(key, None)
        self._ends[key] = _End(len(rest), hash(rest), ask.tokens + num_generated)
        if len(self._ends) > _MAX_ENDS:
            self._ends.popitem(last=False)

    def begin(
        self, server: object, ask: Ask, *, computes: bool, generates: bool
    ) -> Work:
        """The server is given a leg; `answered` when its answer begins, `ended` always."""
        load, now = self.loads[server], self._clock()
        if placed := self._placed.pop(id(ask), None):
            if placed.load is load and computes and generates:
                return placed
            self.ended(placed)
        takes_s, new = 0.0, list[tuple[int, int]]()
        if computes:
            depth = (depths := self._depths(ask)).get(load.index, 0)
            new = [(block, load.index) for block in ask.hashes[int(depth) :]]
            self._coming.update(new)
            left = max(
                int(ask.tokens - depth * ask.block_tokens), 1
            )  # the last one always is
            takes_s = load.launch_s + left * load.token_s
            takes_s -= saved_s(self._timed(ask, depths), load, depths)
            if generates:
                takes_s /= share_for_prompts(load)
            load.free_at = max(load.free_at, now) + takes_s
            load.prompts += 1
            load.queue(ask.size, takes_s)
            self._has_prompt(load, ask)  # by the time of whatever comes after it
        is_coming, end = generates and not computes, load.free_at - load.late_s
        load.coming += is_coming
        load.running += generates and computes
        load.held += ask.tokens * generates
        return Work(load, ask, computes, generates, takes_s, end, now, new, is_coming)

    def wait_s(self, server: object) -> float:
        """Until the server has computed the prompts that it was sent, as predicted."""
        return max(self.loads[server].free_at - self._clock(), 0.0)

    def answered(self, work: Work) -> None:
        """The first token has come, or all of a prefill."""
        work.is_answered = True
        hashes = work.ask.hashes
        is_known = bool(hashes) and self._prefixes.has(work.load.index, hashes[-1])
        if (
            not work.computes or not is_known
        ):  # another request that had it first was refused
            self._has_prompt(work.load, work.ask)
        self._came(work)
        self._computed(work, late_s=self._clock() - work.end - work.load.late_s)

    def ended(self, work: Work) -> None:
        """The server has nothing more to do for it. Without an answer nothing of it is remembered:
        it was refused, or lost."""
        self._came(work)
        self._computed(work, late_s=-work.takes_s)
        if not work.is_answered:
            self._prefixes.remove(work.load.index, [block for block, _ in work.new])
            if work.ask.hashes:
                self._ends.pop((work.ask.hashes[-1], work.load.index), None)
        elif work.generates:  # as many tokens as there was time for
            took_s = self._clock() - work.begun
            num = min(work.ask.answer, took_s / max(step_s(work.load), _FASTEST_S))
            self._has_all(work.load, work.ask, num)
        work.load.running -= work.generates
        work.load.held -= work.ask.tokens * work.generates

    def _came(self, work: Work) -> None:
        work.load.coming -= work.is_coming
        work.load.running += work.is_coming
        work.is_coming = False

    def _computed(self, work: Work, late_s: float) -> None:
        """Its prompt waits no longer: what came after it is so much later than predicted."""
        load = work.load
        self._coming.difference_update(work.new)
        if not work.computes:
            return
        work.computes = False
        load.prompts -= 1
        load.queue(work.ask.size, -work.takes_s)
        if not load.prompts:
            late_s = self._clock() - load.free_at
        load.free_at += late_s
        load.late_s += late_s

    def told(
        self,
        server: object,
        capacity: int | None,
        totals: Totals,
        itl_target_s: float | None = None,
    ) -> None:
        """A health check's answer: tokens of KV in all, what its steps have taken, and what it lets
        one with streams take."""
        load, before = self.loads[server], self._totals.get(server, Totals())
        load.capacity = capacity and max(min(capacity, _MOST), 0)
        load.target_s = itl_target_s or self.loads.step_s
        self._totals[server] = totals
        new = Totals(*(b - a for a, b in zip(before, totals, strict=True)))
        if not all(0 <= each < _MOST for each in new):  # it has restarted
            return
        steps, streams = new.steps - new.mixed_steps, new.tokens - new.mixed_tokens
        seconds = new.seconds - new.mixed_seconds
        if steps >= 1 and streams > 0 and seconds > 0:
            found_s = max(seconds / (steps + streams / DOUBLING), _FASTEST_S)
            # The more time they took, the more it counts.
            load.step_s += (found_s - load.step_s) * seconds / (seconds + _MEMORY_S)
        if not new.prompts:  # what it did last may have been slow for once
            known = [each.token_s for each in self._prompt_steps.values()]
            load.token_s -= (
                max(load.token_s - min(known, default=load.token_s), 0) * _FORGOTTEN
            )
        elif new.prompts >= 1 and new.mixed_steps >= 1 and new.mixed_seconds > 0:
            streams = max(new.mixed_tokens - new.prompts, 0.0)
            steps = min(new.mixed_steps, streams) + streams / DOUBLING
            least = _LEAST_OF_PROMPTS * new.mixed_seconds
            seconds = max(new.mixed_seconds - steps * load.step_s, least)
            speed = self._prompt_steps.setdefault(server, _PromptSteps())
            speed.took(new.mixed_steps, new.prompts, seconds)
            load.launch_s, load.token_s = speed.launch_s, speed.token_s
