"""One choice of a request inside the engine: its tokens, its blocks, and its progress.

    token_ids      |<- prompt: num_prompt_tokens ->|<- outputs ->|<- num_awaited ->|
    KV in blocks   |<- num_computed ->|<- num_launched ->|<- num_uncomputed ------>|

A sequence decodes when exactly one token is left to compute, and prefills when more
are. A preempted sequence is one whose `num_computed` fell back. While a launched step
has not finished, the tokens that it computes are launched, and the token that it draws
is awaited. The next step can compute an awaited token, although only the device knows
its value.

A request of several choices is one sequence while its prompt is computed or pulled.
Choice 0 is the parent of the other choices, its children. They fork off it, sharing its
full blocks, as soon as the KV of the prompt is there. Until then they have no copy of
the prompt, because many may wait and few run.
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
    """Where a sequence is. Exactly one component holds it in each phase."""

    NEW = "new"  # only the core has it; the connector may be in a handshake for it
    WAITING = "waiting"  # queued for blocks
    RECEIVING = "receiving"  # a pull writes to its blocks
    RUNNING = "running"  # takes part in steps
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Mutable state of one choice. `block_ids` is its table (kvcache/groups.py)."""

    request: AddRequest
    # The request's sampling, without what travels to the ranks only once
    # (logits_processing.py).
    sampling: SamplingParams
    token_ids: list[int]  # before a choice has forked, its outputs alone
    num_prompt_tokens: int
    choice: int
    choices: list["Sequence"]  # all choices of the request, including this one
    is_forked: bool  # False while it is still a child of choice 0
    # The first token, if another server has drawn it and the client does not have it.
    first_token: FirstToken | None
    # Where the KV of the prompt, or of a looked-up prefix of it, is. None once the KV
    # has been pulled or given up.
    remote: RemotePrefill | None = None
    phase: Phase = Phase.NEW
    first_logprobs: TokenLogprobs | None = None  # of a first output drawn here
    block_ids: list[int] = field(default_factory=list)
    # For each KV group, the first block that is retained (KVGroups.kept_from). Those
    # before it have been released.
    retained_from: list[int] = field(default_factory=list)
    # For each KV group, the first block that a pull has filled completely
    # (BlockTables.mark_partial_blocks).
    complete_from: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens with KV, from finished steps, cache hits or pulls
    num_launched: int = 0  # tokens after those, in steps that have not finished
    num_awaited: int = 0  # outputs that these steps draw
    awaited_row: int = 0  # the draw of its step that produces the awaited token
    last_step: int = 0  # number of the latest launched step that refers to the blocks
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    num_skipped: int = 0  # prompt tokens found in the prefix cache at admission
    num_transferred: int = 0  # prompt tokens whose KV was pulled
    num_recomputed: int = 0  # prompt tokens computed here
    times: PhaseTimes = field(default_factory=PhaseTimes)
    # How often later requests were served before this one (core/waiting.py).
    num_overtaken: int = 0
    was_admitted: bool = False
    has_ended: bool = False  # its terminal event is sent, or about to be
    is_moving: bool = False  # its request migrates, and its KV is leased for that
    is_parent_only: bool = False  # it has ended, and prefills only for its children
    # The logprobs computed so far, if the prompt's logprobs were requested. The first
    # prompt token has None.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_prompt_logprobs_sent: int = 0
    # While this one waits for a shared prefix: the sequence that computes the prefix,
    # and the number of its tokens.
    awaited_prefix: "tuple[Sequence, int] | None" = None
    awaits_mask: bool = False  # skips steps until its grammar mask is ready
    grammar: GrammarState | None = None  # made when first needed

    @classmethod
    def from_request(cls, request: AddRequest) -> "Sequence":
        """Makes all choices of a request. Returns choice 0, the parent of the others.

        Tokens that another server has drawn are the first outputs of a choice: the one
        that a prefill server drew, or all that the client of a resumed request has.
        """
        choices = list[Sequence]()
        for index in range(request.num_choices):
            choices.append(cls._make_choice(request, index, choices))
        parent = choices[0]
        parent.remote = request.remote
        if request.num_prompt_logprobs is not None:
            remote = request.remote
            parent.prompt_logprobs = list((remote and remote.prompt_logprobs) or [None])
        return parent

    @classmethod
    def _make_choice(
        cls, request: AddRequest, index: int, choices: list["Sequence"]
    ) -> "Sequence":
        remote = request.remote
        is_parent = index == 0
        resumed = ResumedChoice()
        if request.resumed_choices:
            resumed = request.resumed_choices[index]
        outputs = resumed.token_ids
        first_tokens = list[FirstToken]()
        if remote and not outputs:
            first_tokens = remote.first_tokens[index : index + 1]
            outputs = [token.id for token in first_tokens]
        if resumed.has_ended:
            outputs = []
            first_tokens = []
        prompt = request.token_ids if is_parent else []
        is_finished = resumed.has_ended and not is_parent
        return cls(
            request,
            replace(
                request.sampling,
                choice_index=request.sampling.choice_index + index,
                logit_bias={},
                grammar=None,
            ),
            token_ids=[*prompt, *outputs],
            num_prompt_tokens=len(request.token_ids),
            choice=index,
            choices=choices,
            is_forked=is_parent,
            first_token=first_tokens[0] if first_tokens else None,
            phase=Phase.FINISHED if is_finished else Phase.NEW,
            has_ended=resumed.has_ended,
            is_parent_only=resumed.has_ended and is_parent,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def first_output(self) -> int:
        """Index in `token_ids` at which the outputs begin."""
        return self.num_prompt_tokens if self.is_forked else 0

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.first_output

    @property
    def num_to_receive(self) -> int:
        """Tokens whose KV is used once it has been pulled: as many as the other engine
        has.

        The last token is computed here if a token is drawn from its logits. That is the
        last prompt token if no first token came with the reference, or the last output
        that another server has drawn.
        """
        assert self.remote is not None
        resumed_choices = self.request.resumed_choices or [ResumedChoice()]
        draws_first_token = not all(
            self.remote.first_tokens or resumed.token_ids or resumed.has_ended
            for resumed in resumed_choices
        )
        num_tokens = max(
            self.num_prompt_tokens - draws_first_token, len(self.token_ids) - 1
        )
        return min(self.remote.num_tokens, num_tokens)

    @property
    def num_to_pull(self) -> int:
        """Tokens whose KV is pulled. For an offer this is the whole prompt, because it
        is not yet known which server draws the first token."""
        is_offer = self.remote is not None and self.remote.transfer_id is not None
        return self.num_prompt_tokens if is_offer else self.num_to_receive

    @property
    def num_to_hold(self) -> int:
        """Tokens that need blocks before the remote KV can be pulled."""
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
        """The choices that have yet to fork off this one."""
        if len(self.choices) == 1 or self.choice:
            return []
        return [
            other for other in self.choices if not (other.is_forked or other.has_ended)
        ]

    @property
    def is_scoring(self) -> bool:
        """Whether logprobs of prompt tokens have yet to be computed."""
        logprobs = self.prompt_logprobs
        return logprobs is not None and len(logprobs) < self.num_prompt_tokens

    @property
    def draws_next(self) -> tuple["Sequence", ...]:
        """The choices whose next token is drawn when all tokens of this one are
        computed."""
        if self.request.max_tokens == 0:
            return ()
        children = [
            other
            for other in self.children
            if not (other.num_outputs or self.num_outputs)
        ]
        return tuple(children) if self.has_ended else (self, *children)

    def awaits_result(self, max_model_len: int) -> bool:
        """Whether no further step can be planned for this sequence now.

        That is so if its mask is not ready. It is also so until its launched step has
        finished, if all its tokens are computed, if the awaited token ends it by its
        length, or if other choices fork off its prompt.
        """
        if self.awaits_mask:
            return True
        if not self.num_launched:
            return False
        if not self.num_uncomputed:
            return True
        if not self.num_awaited:
            return False  # more of the prompt can be computed
        return (
            self.num_outputs + self.num_awaited >= self.request.max_tokens
            or len(self.token_ids) + self.num_awaited >= max_model_len
            or bool(self.children)
        )

    def unlaunch(self, num_tokens: int, *, drew: bool) -> None:
        """Takes back `num_tokens` launched tokens, because their step has finished or
        computes fewer."""
        if self.phase is Phase.RUNNING:  # in other phases its blocks are released
            self.num_launched -= num_tokens
            self.num_awaited -= drew

    def seal_prompt(self, sealed: RemotePrefill, *, is_usable: bool) -> None:
        """Takes over the first tokens of an offer whose prompt is now complete.

        If `is_usable` is False, the tokens were drawn with other parameters than this
        request's. The first tokens are then drawn here.
        """
        assert self.remote is not None
        first_tokens = sealed.first_tokens if is_usable else []
        self.remote = replace(self.remote, first_tokens=first_tokens)
        for choice in self.choices:
            choice.request = replace(choice.request, remote=sealed)
        for choice, token in zip(self.choices, first_tokens, strict=False):
            choice.first_token = token
            choice.token_ids.append(token.id)

    def discard_remote(self) -> None:
        """Discards the results of another server that were not yet sent, for all
        choices. They are computed here instead."""
        self.remote = None
        for choice in self.choices:
            if choice.first_token is not None:
                choice.first_token = None
                choice.token_ids.pop()
        if self.prompt_logprobs is not None and not self.num_prompt_logprobs_sent:
            self.prompt_logprobs = [None]

    def continue_for_children(self) -> None:
        """Lets this finished choice compute the rest of its prompt, so that the other
        choices can fork its KV."""
        self.is_parent_only = True
        self.first_token = None
        # A launched step may compute its first token as well; computed tokens stay.
        num_launched = self.num_computed + self.num_launched
        del self.token_ids[max(self.num_prompt_tokens, num_launched) :]

    def fork_from(self, parent: "Sequence") -> None:
        """Takes over the prompt and its accounting; the scheduler shares the blocks."""
        self.token_ids[:0] = parent.request.token_ids
        self.is_forked = True
        self.was_admitted = True
        self.num_skipped = parent.num_skipped
        self.num_transferred = parent.num_transferred
        self.num_recomputed = parent.num_recomputed

    def count_skipped(self) -> None:
        """Accounts for the cache hits of an admission.

        Hits that are lost again before the prompt is complete are computed after all.
        Blocks that became hits only after the first admission were computed here.
        """
        hits = min(self.num_computed, self.num_prompt_tokens)
        was_complete = self.num_transferred or self.num_recomputed
        if not self.was_admitted:
            self.num_skipped = hits
        elif not (was_complete or self.num_skipped == self.num_prompt_tokens):
            self.num_skipped = min(self.num_skipped, hits)
            if hits == self.num_prompt_tokens:
                self.num_recomputed = hits - self.num_skipped
        self.was_admitted = True

    def reset_blocks(self) -> None:
        """Forgets the blocks, which are back in the allocator, and the progress that
        was stored in them."""
        self.block_ids = []
        self.retained_from = []
        self.complete_from = []
        self.num_computed = 0
        self.num_launched = 0
        self.num_awaited = 0
        self.prefix_cursor = PrefixCursor()

    def finish_reason(self, max_model_len: int) -> str | None:
        """Why the sequence ends with its last token, or None if it does not."""
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
        """Where the KV of the prompt came from.

        Tokens that either server computed do not count as cached. Those computed here
        are at the end of the prompt; those that the prefill server computed follow its
        cache hit.
        """
        cached_tokens = self.num_skipped + self.num_transferred
        remote = self.request.remote
        prefill: dict[str, int] = {}
        if remote is not None and remote.transfer_id is None:
            cached_tokens = min(
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
            cached_tokens=cached_tokens,
            **prefill,
        )
