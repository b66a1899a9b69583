"""transformers' own answers, in float32, one sequence at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A model run by transformers."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._cache: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy continuation, exactly `num_tokens` long: ends of sequence are ignored."""
        key = (tuple(prompt), num_tokens)
        if key not in self._cache:
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                output = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_tokens,
                    min_new_tokens=num_tokens,
                    do_sample=False,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                    repetition_penalty=1.0,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._cache[key] = output[0, len(prompt) :].tolist()
        return self._cache[key]
