"""One choice of a request inside the engine: its tokens, its blocks, and how far it has come.

    token_ids      |<- prompt: num_prompt_tokens ->|<- outputs ->|<- num_awaited ->|
    KV in blocks   |<- num_computed ->|<- num_launched ->|<- num_uncomputed ------>|

A sequence decodes when exactly one token is left to compute, and prefills when more are. A
preempted sequence is simply one whose num_computed fell back. While a launched step has not
finished, the tokens it computes are launched, and the token it draws is awaited: it has a place
and can be computed by the next step, but only the device knows it.

A request of several choices is one sequence while its prompt is computed or pulled: choice 0 is
the parent of the others, its children, which fork off it, sharing its full blocks, as soon as the
prompt's KV is there. Until then these have no copy of the prompt: many may wait, and few ever run.
"""

from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from engine.text.grammar import COMPLETE, GrammarState
from kvcache.prefix import PrefixCursor
from protocol.messages import (
    AddRequest,
    FirstToken,
    KVUsage,
    RemotePrefill,
    ResumedChoice,
    SamplingParams,
    TokenLogprobs,
)
from protocol.server_stats import PhaseTimes


class Phase(Enum):
    """Where a sequence is; exactly one owner holds it in each phase."""

    NEW = (
        "new"  # known to the core only (a decode connector may be shaking hands for it)
    )
    WAITING = "waiting"  # queued for blocks
    RECEIVING = "receiving"  # its blocks are being written by a pull
    RUNNING = "running"  # takes part in steps
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Mutable state of one choice. `block_ids` is its table, as of kvcache/groups.py."""

    request: AddRequest
    sampling: SamplingParams  # the request's, without what travels once (logits_processing.py)
    token_ids: list[int]  # of a choice that has not forked off yet, its outputs alone
    num_prompt_tokens: int
    choice: int
    choices: list["Sequence"]  # of the request, this one included
    is_forked: bool  # False: still a child of choice 0
    first_token: FirstToken | None  # drawn elsewhere and not yet sent to the client
    # Of the prompt, or of a prefix of it that was looked up, until the KV was pulled or given up.
    remote: RemotePrefill | None = None
    phase: Phase = Phase.NEW
    first_logprobs: TokenLogprobs | None = None  # of the first output, when drawn here
    block_ids: list[int] = field(default_factory=list)
    kept_from: list[int] = field(
        default_factory=list
    )  # as of KVGroups; what is before went home
    whole_from: list[int] = field(default_factory=list)  # as of BlockTables.pulled
    num_computed: int = 0  # tokens whose KV is there: of finished steps, hits or pulls
    num_launched: int = 0  # tokens after those, in steps that have not finished
    num_awaited: int = 0  # outputs that these steps draw
    awaited_row: int = 0  # which of its step's draws the awaited one is
    last_step: int = 0  # number of the latest launched step that refers to the blocks
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    num_skipped: int = 0  # prompt tokens found in the prefix cache at admission
    num_transferred: int = 0
    num_recomputed: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)
    num_overtaken: int = (
        0  # while it waits, by those that came later; see core/waiting.py
    )
    was_admitted: bool = False
    has_ended: bool = False  # its terminal event is out, or about to be
    is_moving: bool = (
        False  # its request goes on elsewhere, and its KV is lent for that
    )
    is_parent_only: bool = (
        False  # it has ended, and computes its prompt for its children
    )
    # As far as they are known, of a prompt whose logprobs were asked for; None for its first token.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_prompt_logprobs_sent: int = 0
    # Who computes what this one begins with as well, and up to which token, while it waits for it.
    awaited: "tuple[Sequence, int] | None" = None
    sits_out: bool = False  # it is not known yet what it may draw next
    grammar: GrammarState | None = (
        None  # made when first needed, from the request and the outputs
    )

    @classmethod
    def from_request(cls, request: AddRequest) -> "Sequence":
        """Choice 0, the parent of the others. Tokens drawn elsewhere are a choice's first outputs
        from the start: the one that a prefill server drew, or all that the client has."""
        remote, choices = request.remote, list[Sequence]()
        for index in range(request.num_choices):
            known = request.known[index] if request.known else ResumedChoice()
            outputs, first = known.token_ids, list[FirstToken]()
            if remote and not outputs:
                first = remote.first_tokens[index : index + 1]
                outputs = [token.id for token in first]
            if known.has_ended:
                outputs, first = [], []
            sampling = replace(
                request.sampling,
                choice_index=request.sampling.choice_index + index,
                logit_bias={},
                grammar=None,
            )
            sequence = cls(
                request,
                sampling,
                token_ids=[*([] if index else request.token_ids), *outputs],
                num_prompt_tokens=len(request.token_ids),
                choice=index,
                choices=choices,
                is_forked=index == 0,
                first_token=first[0] if first else None,
                phase=Phase.FINISHED if index and known.has_ended else Phase.NEW,
                has_ended=known.has_ended,
                is_parent_only=known.has_ended and not index,
            )
            choices.append(sequence)
        parent = choices[0]
        parent.remote = remote
        if request.num_prompt_logprobs is not None:
            parent.prompt_logprobs = list((remote and remote.prompt_logprobs) or [None])
        return parent

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def first_output(self) -> int:
        """Where in `token_ids` the outputs begin."""
        return self.num_prompt_tokens if self.is_forked else 0

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.first_output

    @property
    def num_to_receive(self) -> int:
        """Tokens whose KV is pulled, while that is to come: as many as there are elsewhere, but for
        the last of a prompt where a first token is drawn here, from its logits, or of outputs that
        were drawn elsewhere."""
        assert self.remote is not None
        known = self.request.known or [ResumedChoice()]
        draws = not all(
            self.remote.first_tokens or one.token_ids or one.has_ended for one in known
        )
        num_known = max(self.num_prompt_tokens - draws, len(self.token_ids) - 1)
        return min(self.remote.num_tokens, num_known)

    @property
    def num_to_pull(self) -> int:
        """As many, or a token more: of an offer it is not known yet who draws the first token."""
        is_offer = self.remote is not None and self.remote.transfer_id is not None
        return self.num_prompt_tokens if is_offer else self.num_to_receive

    @property
    def num_to_hold(self) -> int:
        """Tokens that need blocks before the KV that is elsewhere can be pulled."""
        return max(self.num_prompt_tokens, self.num_to_receive)

    @property
    def num_uncomputed(self) -> int:
        return (
            len(self.token_ids)
            + self.num_awaited
            - self.num_computed
            - self.num_launched
        )

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1 and self.num_outputs + self.num_awaited > 0

    @property
    def children(self) -> list["Sequence"]:
        """The choices that are to fork off this one."""
        if len(self.choices) == 1 or self.choice:
            return []
        return [
            other for other in self.choices if not (other.is_forked or other.has_ended)
        ]

    @property
    def is_scoring(self) -> bool:
        """Whether logprobs of prompt tokens are still to be had."""
        known = self.prompt_logprobs
        return known is not None and len(known) < self.num_prompt_tokens

    @property
    def draws_next(self) -> tuple["Sequence", ...]:
        """The choices whose next token is drawn when all of this one's tokens are computed."""
        if self.request.max_tokens == 0:
            return ()
        first = [
            other
            for other in self.children
            if not (other.num_outputs or self.num_outputs)
        ]
        return (*first,) if self.has_ended else (self, *first)

    def awaits_result(self, max_model_len: int) -> bool:
        """Whether it sits out, or can go on only when its launched step has finished: all is
        computed, the awaited token ends it by its length, or other choices fork off its prompt."""
        if self.sits_out:
            return True
        if not self.num_launched:
            return False
        if not self.num_uncomputed:
            return True
        if not self.num_awaited:
            return False  # the prompt goes on
        return (
            self.num_outputs + self.num_awaited >= self.request.max_tokens
            or len(self.token_ids) + self.num_awaited >= max_model_len
            or bool(self.children)
        )

    def unlaunch(self, num_tokens: int, *, drew: bool) -> None:
        """A launched step does so much less for it, or has ended."""
        if self.phase is Phase.RUNNING:  # else its blocks are gone
            self.num_launched -= num_tokens
            self.num_awaited -= drew

    def find_first(self, sealed: RemotePrefill, *, is_usable: bool) -> None:
        """The prompt that was computed meanwhile is complete: `sealed` says what was found then.
        Its tokens may be drawn otherwise than this request's; then these are drawn here."""
        assert self.remote is not None
        first = sealed.first_tokens if is_usable else []
        self.remote = replace(self.remote, first_tokens=first)
        for choice in self.choices:
            choice.request = replace(choice.request, remote=sealed)
        for choice, token in zip(self.choices, first, strict=False):
            choice.first_token = token
            choice.token_ids.append(token.id)

    def forget_remote(self) -> None:
        """Takes back what was found elsewhere and not yet sent, of all choices: it is found here
        instead."""
        self.remote = None
        for choice in self.choices:
            if choice.first_token is not None:
                choice.first_token = None
                choice.token_ids.pop()
        if self.prompt_logprobs is not None and not self.num_prompt_logprobs_sent:
            self.prompt_logprobs = [None]

    def end_but_for_children(self) -> None:
        """The choice, which has ended, goes on to its prompt's end for its children."""
        self.is_parent_only = True
        self.first_token = None
        # A launched step may compute its first token, too: what is computed stays known.
        under_way = self.num_computed + self.num_launched
        del self.token_ids[max(self.num_prompt_tokens, under_way) :]

    def fork_from(self, parent: "Sequence") -> None:
        """Takes over what is known of the prompt; the blocks are the scheduler's business."""
        self.token_ids[:0] = parent.request.token_ids
        self.is_forked = self.was_admitted = True
        self.num_skipped = parent.num_skipped
        self.num_transferred = parent.num_transferred
        self.num_recomputed = parent.num_recomputed

    def count_skipped(self) -> None:
        """At an admission. Hits that were lost before the prompt was there are computed after all;
        what became one only since the first admission was computed here as well."""
        hits = min(self.num_computed, self.num_prompt_tokens)
        was_there = self.num_transferred or self.num_recomputed
        if not self.was_admitted:
            self.num_skipped = hits
        elif not (was_there or self.num_skipped == self.num_prompt_tokens):
            self.num_skipped = min(self.num_skipped, hits)
            if hits == self.num_prompt_tokens:
                self.num_recomputed = hits - self.num_skipped
        self.was_admitted = True

    def forget_blocks(self) -> None:
        """The sequence's blocks have gone back to the allocator; its KV is to be had anew."""
        self.block_ids, self.kept_from, self.whole_from = [], [], []
        self.num_computed = self.num_launched = self.num_awaited = 0
        self.prefix_cursor = PrefixCursor()

    def finish_reason(self, max_model_len: int) -> str | None:
        """Why the sequence ends with its last token, or None."""
        if self.num_outputs and self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        num_tokens = self.num_prompt_tokens + self.num_outputs
        is_full = (
            self.num_outputs >= self.request.max_tokens or num_tokens >= max_model_len
        )
        if self.grammar is not None and (is_full or not self.grammar.is_slow):
            if self.grammar.follow(self.token_ids, self.first_output) is COMPLETE:
                return "stop"
        if self.request.max_tokens == 0:
            return "length" if self.num_computed >= self.num_prompt_tokens else None
        return "length" if is_full else None

    def usage(self) -> KVUsage:
        """Where the prompt's KV came from. Tokens computed on either server are not cached: what
        is computed here ends the prompt, and so does the prefill server's work, after its hit."""
        cached, remote = self.num_skipped + self.num_transferred, self.request.remote
        prefill: dict[str, int] = {}
        if remote is not None and remote.transfer_id is None:
            cached = min(
                remote.cached_tokens, self.num_prompt_tokens - self.num_recomputed
            )
            prefill["prefill_transferred"] = remote.transferred_tokens
            prefill["prefill_recomputed"] = remote.num_tokens - remote.cached_tokens
            prefill["prefill_skipped"] = (
                remote.cached_tokens - remote.transferred_tokens
            )
        return KVUsage(
            transferred=self.num_transferred,
            recomputed=self.num_recomputed,
            skipped=self.num_skipped,
            cached_tokens=cached,
            **prefill,
        )
