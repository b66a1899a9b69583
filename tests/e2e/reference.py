"""Expected answers, computed by transformers in float32, one sequence at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A model that is run by transformers."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self._cache: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def text(self, prompt: str, num_tokens: int) -> str:
        """Return the greedy continuation of a text, past any end-of-sequence token."""
        ids = self.generate(self.tokenizer(prompt).input_ids, num_tokens)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of the prompt that the chat template makes of
        messages.
        """
        template = self.tokenizer.apply_chat_template
        ids: list[int] = template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def answer(
        self, messages: list[dict[str, str]], limit: int
    ) -> tuple[list[int], str]:
        """Return the greedy answer to messages, up to its end-of-sequence token: (token
        ids, text).
        """
        ids = self.generate(self.chat(messages), limit)
        end = self.tokenizer.eos_token_id
        if end in ids:
            ids = ids[: ids.index(end) + 1]
        return ids, self.tokenizer.decode(ids, skip_special_tokens=True)

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logprobs of the next token after each token: float32 [tokens,
        vocab].
        """
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return logits.log_softmax(-1)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation of a prompt, exactly `num_tokens` tokens long.

        End-of-sequence tokens are ignored.
        """
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
