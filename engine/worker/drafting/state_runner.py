"""One rank's MTP layer or EAGLE-3 drafter: a draft model whose rows read hidden states
of the engine's model (engine/speculation/states/state_drafter.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.batch import Executor, StepInput
from engine.core.logits_processing import to_device
from engine.speculation.draft_model import DraftModelSpec
from engine.speculation.drafter import Drafter
from engine.speculation.states.state_drafter import StateDrafter, state_table_sizes
from engine.worker.draft_runner import DraftRunner
from engine.worker.memory import explaining_oom
from engine.worker.runner import LaunchedStep, ModelRunner
from model.config import ModelConfig
from model.decoder import CausalLM
from model.drafters.load import load_eagle3, load_mtp
from model.drafters.state_reader import StateReader
from model.parallel import Parallel


class StateDraftRunner(DraftRunner):
    """The drafter of one rank. The constructor also makes the target's runner capture
    hidden states and store them in the drafter's table.

    For the arguments see DraftRunner.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft: DraftModelSpec,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._kind = target.config.speculation.kind

        def load_drafter(
            config: EngineConfig,
            model_config: ModelConfig,
            parallel: Parallel,
            device: torch.device,
            report: Callable[[str], None],
        ) -> StateReader:
            return self._load(target, config, device, report)

        super().__init__(target, draft, report, load_drafter)
        target.captured_layers = self._reader.draft.target_layers
        target.store_states = self._reader.store

    def _load(
        self,
        target: ModelRunner,
        config: EngineConfig,
        device: torch.device,
        report: Callable[[str], None],
    ) -> StateReader:
        model = target.model
        assert isinstance(model, CausalLM)
        dtype = getattr(torch, config.dtype)
        options: Any = {
            "dtype": dtype,
            "device": device,
            "load_format": config.load_format,
            "seed": config.seed,
            "pack": config.pack_weights,
        }
        report("loading weights")
        fix = "lower --max-num-batched-tokens, raise --tp, or leave out --speculate"
        with explaining_oom("the drafter", device, fix):
            if self._kind == "mtp":
                draft = load_mtp(model, config.model_dir, **options)
            else:
                draft = load_eagle3(model, Path(config.model_dir), **options)
            sizes = state_table_sizes(config, config.speculation.max_proposals)
            self._reader = StateReader(draft, sizes, dtype=dtype, device=device)
        return self._reader

    def make_drafter(self, executor: Executor) -> Drafter:
        return StateDrafter(
            self._kind,
            executor,
            self.limits(),
            self._reader.sizes,
            self.config.max_num_seqs,
        )

    def _launch_step(self, step: StepInput) -> LaunchedStep:
        rows = step.input_states.astype(np.int64)
        if len(rows) == 0:  # only in steps of the warm-up
            rows = np.zeros(len(step.token_ids), np.int64)
        self._reader.load(to_device(rows, self.device))
        return super()._launch_step(step)
