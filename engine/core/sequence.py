"""One choice of a request inside the engine: its tokens, its blocks, and its progress.

    token_ids      |<- prompt: num_prompt_tokens ->|<- outputs ->|<- num_awaited ->|
    KV in blocks   |<- num_computed ->|<- num_launched ->|<- num_uncomputed ------>|

A sequence decodes when it has outputs and only its last token is left to compute.
Otherwise it prefills. A preempted sequence loses its blocks, so `num_computed` is 0.
While a launched step has not finished, the tokens that it computes count as launched,
and the tokens that it draws count as awaited. The next step can compute an awaited
token, although its value is still on the device. A step that verifies proposals has
several awaited tokens. The number of them that the sequence keeps is known only when
the step has ended.

Other parts of a sequence's state are in separate objects (engine/core/state/):

    choices          ChoiceTree: the choices of the request, shared by all of them
    pull             PromptPull: KV to pull from another engine
    sampling         SamplingState: how tokens are drawn
    accounting       PromptAccounting: where the KV of the prompt came from
    prompt_logprobs  PromptLogprobs: logprobs of the prompt's tokens, if requested
    speculation      SpeculationState: the proposals for its next tokens
"""

from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from engine.core.state.choices import ChoiceState, ChoiceTree
from engine.core.state.prompt_accounting import PromptAccounting
from engine.core.state.prompt_logprobs import PromptLogprobs
from engine.core.state.prompt_pull import PromptPull
from engine.core.state.sampling_state import SamplingState
from engine.core.state.speculation_state import SpeculationState
from engine.text.grammar import COMPLETE
from kvcache.prefix import PrefixCursor
from protocol.messages import (
    AddRequest,
    FirstToken,
    RemotePrefill,
    ResumedChoice,
)
from protocol.server_stats import PhaseTimes


class Phase(Enum):
    """The phase of a sequence. In each phase, exactly one component holds the sequence.

        NEW --> WAITING --> RUNNING
                WAITING --> RECEIVING --> RUNNING

    A sequence returns to WAITING if it is preempted, or if its pull fails while READs
    may still write to its blocks. If a pull is given up before it begins, the sequence
    leaves the queue and is NEW again. A child that forks is RUNNING at once. A sequence
    may become FINISHED in any phase.
    """

    # Only the core has the sequence. The connector may wait for a lookup, a handshake
    # or a lease before it enqueues the sequence.
    NEW = "new"
    WAITING = "waiting"  # queued for blocks
    RECEIVING = "receiving"  # a pull writes to its blocks
    RUNNING = "running"  # takes part in steps
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one choice. `block_ids` is its block table (kvcache/groups.py).

    The engine core appends tokens. The scheduler and its helpers change the phase, the
    blocks and the progress.
    """

    request: AddRequest
    choice: int  # index of the choice
    token_ids: list[int]  # prompt and outputs; only outputs in an unforked child
    num_prompt_tokens: int
    # Index in `token_ids` at which the outputs begin: 0 in a child that has not forked
    # yet.
    first_output: int
    sampling: SamplingState
    accounting: PromptAccounting
    choice_state: ChoiceState
    choices: ChoiceTree["Sequence"] = field(init=False)
    pull: PromptPull | None = None  # None if no KV is left to pull
    prompt_logprobs: PromptLogprobs | None = None
    speculation: SpeculationState = field(default_factory=SpeculationState)
    phase: Phase = Phase.NEW
    block_ids: list[int] = field(default_factory=list)
    # For each KV group, the first block that is retained
    # (KVGroups.first_needed_blocks). The blocks before it have been released.
    retained_from: list[int] = field(default_factory=list)
    # For each KV group, the first block that a pull has filled completely
    # (BlockTables.mark_partial_blocks).
    complete_from: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens with KV, from finished steps, cache hits or pulls
    num_launched: int = 0  # tokens after `num_computed`, in unfinished steps
    num_awaited: int = 0  # tokens that the unfinished steps draw
    num_drafted: int = 0  # tokens with KV of the drafter (engine/speculation)
    awaited_row: int = 0  # index of the awaited token among the draws of its step
    last_step: int = 0  # number of the latest launched step that refers to the blocks
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    has_pinned: bool = False  # whether the pins of `request.retention` were set
    times: PhaseTimes = field(default_factory=PhaseTimes)
    queued_s: float = 0.0  # monotonic time at which the sequence last began to wait
    # How often later requests have overtaken this sequence in the queue. One overtaking
    # may count as more than 1 (core/waiting.py). At MAX_OVERTAKEN, no request may
    # overtake this sequence.
    num_overtaken: int = 0
    # While this sequence waits for a shared prefix: the sequence that computes the
    # prefix, and the index of the token after the prefix.
    awaited_prefix: "tuple[Sequence, int] | None" = None

    @classmethod
    def from_request(cls, request: AddRequest) -> "Sequence":
        """Makes all choices of a request. Returns choice 0, the parent of the other
        choices.

        Tokens that another server has drawn become the first outputs of a choice. If a
        prefill server drew the first token, the choice begins with this token. If the
        request resumes on this engine after a failover or migration, the choice begins
        with all outputs that the client has.
        """
        sequences = [
            cls._make_choice(request, index) for index in range(request.num_choices)
        ]
        choices = ChoiceTree(sequences)
        for sequence in sequences:
            sequence.choices = choices
        parent = choices.parent
        remote = request.remote
        if remote is not None:
            parent.pull = PromptPull(remote, request, parent.request_id)
        if request.num_prompt_logprobs is not None:
            parent.prompt_logprobs = PromptLogprobs(
                len(request.token_ids), remote.prompt_logprobs if remote else None
            )
        return parent

    @classmethod
    def _make_choice(cls, request: AddRequest, index: int) -> "Sequence":
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
        choice_state = ChoiceState.OPEN if is_parent else ChoiceState.CHILD
        if resumed.has_ended:
            choice_state = (
                ChoiceState.PREFILLS_FOR_CHILDREN if is_parent else ChoiceState.ENDED
            )
        num_prompt_tokens = len(request.token_ids)
        prompt = request.token_ids if is_parent else []
        params = replace(
            request.sampling,
            choice_index=request.sampling.choice_index + index,
            logit_bias={},
            grammar=None,
        )
        is_finished = choice_state is ChoiceState.ENDED
        return cls(
            request,
            choice=index,
            token_ids=[*prompt, *outputs],
            num_prompt_tokens=num_prompt_tokens,
            first_output=len(prompt),
            sampling=SamplingState(
                params, unsent_first_token=first_tokens[0] if first_tokens else None
            ),
            accounting=PromptAccounting(num_prompt_tokens),
            choice_state=choice_state,
            phase=Phase.FINISHED if is_finished else Phase.NEW,
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_prompt(self) -> bool:
        """Whether `token_ids` begin with the prompt. Always true for choice 0, and true
        for the other choices once they have forked."""
        return self.first_output > 0

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.first_output

    @property
    def num_to_admit(self) -> int:
        """Tokens that need blocks before a waiting sequence can leave the queue."""
        if self.pull is None:
            return len(self.token_ids)
        return self.pull.num_to_hold(len(self.token_ids))

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
    def is_verifying(self) -> bool:
        """Whether an unfinished step verifies proposals for this sequence."""
        return self.num_awaited > 1

    @property
    def is_scoring(self) -> bool:
        """Whether logprobs of prompt tokens have yet to be computed."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def drawing_choices(self) -> tuple["Sequence", ...]:
        """The choices that draw their next token when all tokens of this sequence are
        computed."""
        if self.request.max_tokens == 0:
            return ()
        children: list[Sequence] = []
        if self.choices.children and not self.num_outputs:
            children = [
                child for child in self.choices.children if not child.num_outputs
            ]
        if self.choice_state.has_ended:
            return tuple(children)
        return (self, *children)

    @property
    def has_too_few_cached_tokens(self) -> bool:
        """Whether the request's cache_hit_threshold forbids this engine to compute the
        prompt. Tokens that will be pulled count as cached."""
        request = self.request
        threshold = request.cache_hit_threshold
        if not threshold or request.retain_kv or request.resumed_choices:
            return False
        num_tokens = len(self.token_ids)
        num_cached = self.num_computed
        if self.pull is not None:
            if self.phase is Phase.RECEIVING:
                return False
            num_cached = self.pull.num_to_pull(num_tokens)
        return num_cached < threshold * num_tokens

    def awaits_result(self, max_model_len: int) -> bool:
        """Whether no further step can be planned for this sequence now.

        True if the mask of its next draw is not ready. Also true while a launched step
        computes the sequence, in four cases: no token is left for the next step, the
        awaited token ends the sequence by its length, other choices fork off its
        prompt, or the step verifies proposals.
        """
        if self.sampling.awaits_mask or self.is_verifying:
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
            or bool(self.choices.children)
        )

    def unlaunch(self, num_tokens: int, *, num_awaited: int) -> None:
        """Subtracts from the counts of launched and awaited tokens, because the step of
        these tokens has finished, has failed or computes fewer tokens."""
        if self.phase is Phase.RUNNING:  # else `reset_blocks` has cleared the counts
            self.num_launched -= num_tokens
            self.num_awaited -= num_awaited

    def seal_prompt(self, sealed: RemotePrefill, *, is_usable: bool) -> None:
        """Stores the first tokens of an offer (protocol.kv_offers.Offer), once the
        other engine has computed the prompt.

        Args:
            is_usable: whether these first tokens are the next outputs of this request.
                If not, they are dropped.
        """
        assert self.pull is not None
        first_tokens = sealed.first_tokens if is_usable else []
        self.pull.seal(first_tokens, sealed.drafted_tokens)
        for choice in self.choices:
            choice.request = replace(choice.request, remote=sealed)
        for choice, token in zip(self.choices, first_tokens, strict=False):
            choice.sampling.unsent_first_token = token
            choice.token_ids.append(token.id)

    def discard_remote_results(self) -> None:
        """Gives up the pull, and discards the results of another server that were not
        yet sent, for all choices. This engine then computes these results."""
        self.pull = None
        for choice in self.choices:
            if choice.sampling.take_unsent_first_token() is not None:
                choice.token_ids.pop()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.discard_unsent()

    def continue_for_children(self) -> None:
        """Lets this ended choice compute the rest of its prompt, so that its children
        can fork its KV."""
        self.choices.prefill_for_children()
        self.sampling.unsent_first_token = None
        # Drop the outputs, except those that are computed or in a launched step.
        num_started = self.num_computed + self.num_launched
        del self.token_ids[max(self.num_prompt_tokens, num_started) :]

    def fork_from(self, parent: "Sequence") -> None:
        """Copies the prompt and its accounting from the parent, but no blocks: the
        scheduler then lets this choice share blocks of the parent."""
        self.choices.fork(self)
        self.token_ids[:0] = parent.request.token_ids
        self.first_output = self.num_prompt_tokens
        self.accounting = parent.accounting.copy()
        self.has_pinned = parent.has_pinned

    def reset_blocks(self) -> None:
        """Empties the block table and resets the progress, because the blocks do not
        belong to the sequence any more. Does not release blocks."""
        self.block_ids = []
        self.retained_from = []
        self.complete_from = []
        self.num_computed = 0
        self.num_launched = 0
        self.num_awaited = 0
        self.num_drafted = 0
        self.prefix_cursor = PrefixCursor()

    def finish_reason(self, max_model_len: int) -> str | None:
        """Why the sequence ends with its last token; None if the sequence continues."""
        if self.num_outputs and self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        num_tokens = self.num_prompt_tokens + self.num_outputs
        is_full = (
            self.num_outputs >= self.request.max_tokens or num_tokens >= max_model_len
        )
        grammar = self.sampling.grammar
        if grammar is not None and (is_full or not grammar.is_slow):
            if grammar.consume(self.token_ids, self.first_output) is COMPLETE:
                return "stop"
        if self.request.max_tokens == 0:
            return "length" if self.num_computed >= self.num_prompt_tokens else None
        return "length" if is_full else None
