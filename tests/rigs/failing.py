"""Parts of an engine that fail or delay their work at random."""

import random
from concurrent.futures import Future

from engine.core.batch import Int32s, StepFailed, StepInput
from engine.core.tables import SchedulerLimits
from engine.text.grammar import CompiledGrammar, GrammarCompiler
from protocol.messages import Grammar
from tests.rigs.shadow import ShadowExecutor, _ShadowStep

FAULT = "an injected fault"


class FailingExecutor(ShadowExecutor):
    """A shadow executor with random durations of steps. Sometimes a launch or a draw
    fails."""

    limits: SchedulerLimits

    def __init__(
        self, rng: random.Random, num_blocks: int, block_size: int, depth: int
    ) -> None:
        super().__init__(num_blocks, block_size, depth)
        self._rng = rng
        self._launch_failure_rate = rng.choice([0.0, 0.0, 0.05, 0.2])
        self._draw_failure_rate = rng.choice([0.0, 0.0, 0.15])

    def has_ended(self) -> bool:
        return self._rng.random() < 0.6

    def launch(self, step: StepInput) -> _ShadowStep:
        if self._rng.random() < self._launch_failure_rate / len(step.query_lens):
            raise StepFailed(FAULT)
        max_rows = self.limits.max_num_seqs + self.limits.max_proposals
        assert len(step.query_lens) <= max_rows
        assert len(step.token_ids) <= self.limits.max_num_batched_tokens
        launched = super().launch(step)
        if step.is_masked and self._rng.random() < self._draw_failure_rate / len(
            step.query_lens
        ):
            launched.draw = self._fail_draw  # type: ignore[method-assign]
        return launched

    def _fail_draw(self, masks: Int32s) -> None:
        step = self.in_flight.pop()
        assert not self.in_flight, "the previous step has ended"
        self.execute(step.step, None)
        raise StepFailed(FAULT)


class SlowCompiler:
    """A grammar compiler that delays half of the grammars."""

    def __init__(self, rng: random.Random, compiler: GrammarCompiler) -> None:
        self._rng = rng
        self._compiler = compiler
        self._open: list[tuple[Future[CompiledGrammar], Grammar]] = []
        self.new_state = compiler.new_state
        self.on_compiled = compiler.on_compiled
        self.vocab_size = compiler.vocab_size

    def compile(self, grammar: Grammar, nbytes: int = 0) -> Future[CompiledGrammar]:
        if self._rng.random() < 0.5:
            return self._compiler.compile(grammar, nbytes)
        self._open.append((Future(), grammar))
        return self._open[-1][0]

    def advance(self, *, to_end: bool = False) -> None:
        for entry in list(self._open):
            if to_end or self._rng.random() < 0.3:
                self._open.remove(entry)
                future, grammar = entry
                future.set_result(self._compiler.compile(grammar).result())
