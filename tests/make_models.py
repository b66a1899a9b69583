"""Tiny trained models for tests, made from text that this file generates. Needs no network.

    python -m tests.make_models gqa mla      # prints their directories

`ensure_model(kind)` trains on first use (a minute or two) and caches the result as a normal
Hugging Face directory under BATON_TEST_CACHE or ~/.cache/baton/test-models. Tests may also
use whatever `trained_models()` finds in BATON_TEST_MODELS or ../shared/models.

The text is a Markov chain of short sentences whose odds are skewed, so that greedy choices have
decent margins, about one person and one colour per story, so that a continuation depends on
tokens far back.
"""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model.hub import build_once

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Kate Leo".split()
COLOURS = "red blue green yellow black white golden silver".split()
NOUNS = (
    "ball boat book box bridge cake car chair clock coat cup door drum fish flag garden hat horse "
    "key kite lamp letter map shoe"
).split()
VERBS = (
    "carried found painted bought lost opened washed fixed drew saw took hid moved liked sold held"
).split()
PLACES = (
    "in the park|near the river|at school|under the old tree|behind the house|on the hill|"
    "at the market|by the sea|in the kitchen|on the train|at night|after lunch"
).split("|")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 512
MAX_POSITION = 4096
TRAINED_POSITIONS = 2048

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITION,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_MLA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
# Latents that FlashInfer serves; experts in the second layer.
_MOE = {"first_k_dense_replace": 1, "n_routed_experts": 8, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64}  # fmt: skip


def _gqa(hidden_size: int, q_heads: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    return "LlamaForCausalLM", {**sizes, **heads}


# gqa: tp 1, 2, 4, and 8 with replicated KV heads. gqa6: tp 1, 2, 3 and 6, a vocabulary that 3
# does not divide. mla: a latent cache of one head, tp 1, 2, 4. moe: the same with experts.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": _gqa(128, 8, 4),
    "gqa6": _gqa(96, 12, 6),
    "mla": ("DeepseekV2ForCausalLM", _MLA),
    "moe": ("DeepseekV2ForCausalLM", {**_MLA, **_MOE}),
}
# The same sums, and so the same weights, on all machines with AVX2, whatever else they have.
_ALIKE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def ensure_model(kind: str) -> Path:
    """The directory of a trained model of `kind` (see KINDS), trained if no cache has it."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    root = (
        os.environ.get("BATON_TEST_CACHE")
        or Path.home() / ".cache" / "baton" / "test-models"
    )
    key = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return build_once(
        Path(root) / f"{kind}-{key}",
        key,
        lambda scratch: _train_in_process(kind, scratch),
    )


def trained_models() -> dict[str, Path]:
    """Larger trained models that happen to be there, by name; tests skip what is not."""
    here = Path(__file__).resolve().parent.parent
    root = Path(
        os.environ.get("BATON_TEST_MODELS") or here.parent / "shared" / "models"
    )
    return {
        path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))
    }


def _train_in_process(kind: str, target: Path) -> None:
    # A process of its own: its thread count, seeds and warnings are not the test run's. One thread:
    # matrices this small gain little from two, and threads that wait for a busy core lose a lot.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if " avx2 " in Path("/proc/cpuinfo").read_text():
        environment |= _ALIKE
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "tests.make_models", "--into", str(target), kind]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"training {kind} failed:\n{done.stderr[-4000:]}")


class Storyteller:
    """Endless stories and conversations about one person and one colour each."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._name, self._colour, self._noun = NAMES[0], COLOURS[0], NOUNS[0]

    def story(self) -> str:
        self._begin()
        return self._sentences(self._rng.randint(3, 12))

    def chat(self) -> str:
        """One question and its answer, in the form of the chat template."""
        self._begin()
        question = (
            f"Tell a story about {self._name} and the {self._colour} {self._noun}."
        )
        answer = self._sentences(*self._rng.choices((1, 2, 3, 4), (7, 1, 1, 1)))
        return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"

    def _begin(self) -> None:
        # Mostly what the last story suggests, so that greedy choices have a margin here as well;
        # at times anything, so that every combination occurs.
        if self._rng.random() < 0.2:
            self._name, self._colour = (
                self._rng.choice(NAMES),
                self._rng.choice(COLOURS),
            )
            self._noun = self._rng.choice(NOUNS)
            return
        self._name = self._pick("name", self._name, NAMES)
        self._colour = self._pick("colour", self._colour, COLOURS)

    def _sentences(self, num_sentences: int) -> str:
        said = []
        for _ in range(num_sentences):
            verb = self._pick("verb", self._noun, VERBS)
            place = self._pick("place", verb, PLACES)
            said.append(f"{self._name} {verb} the {self._colour} {self._noun} {place}.")
            self._noun = self._pick("noun", self._noun + self._colour, NOUNS)
        return " ".join(said)

    def _pick(self, table: str, given: str, choices: list[str]) -> str:
        order = random.Random(f"{table} {given}").sample(choices, 3)
        return self._rng.choices(order, (0.85, 0.12, 0.03))[0]


def _make_tokenizer(target: Path, rng: random.Random) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    teller = Storyteller(rng)
    texts = [text for _ in range(1000) for text in (teller.story(), teller.chat())]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "unk_token": SPECIALS[0],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return tokenizer


def _token_stream(tokenizer: Any, rng: random.Random) -> Iterator[int]:
    teller = Storyteller(rng)
    while True:
        text = teller.chat() if rng.random() < 0.3 else teller.story() + "\n"
        yield from tokenizer.encode(text).ids


def _positions(rows: int, length: int, rng: random.Random) -> list[list[int]]:
    """Positions with two gaps per row: teaches far distances at the price of short sequences."""
    found = []
    for _ in range(rows):
        cuts = sorted(rng.sample(range(1, length), 2))
        gaps = [rng.randint(0, TRAINED_POSITIONS // 3) for _ in range(3)]
        found.append([at + gaps[0] + sum(gaps[1 + n] for n in (0, 1) if at >= cuts[n])
                      for at in range(length)])  # fmt: skip
    return found


def _orthogonal(update: Any) -> Any:
    """Muon's update of a matrix; in float32, since many processors are slow in torch's bfloat16."""
    x = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # Newton and Schulz
        square = x.mT @ x if x.shape[-2] > x.shape[-1] else x @ x.mT
        change = -4.7750 * square + 2.0315 * square @ square
        x = 3.4445 * x + (x @ change if x.shape[-2] > x.shape[-1] else change @ x)
    return x * max(1, x.shape[-2] / x.shape[-1]) ** 0.5


def train(kind: str, target: Path, *, num_steps: int = 160) -> float:
    """Trains and saves; returns the last loss, in nats per token.

    Matrices by Muon, which needs a third of AdamW's steps, all else by AdamW.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = _make_tokenizer(target, rng)
    name, sizes = KINDS[kind]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(config_class(**_COMMON, **sizes))
    model.set_attn_implementation("eager")  # the fastest for sequences this short
    weights = list(model.named_parameters())
    matrices = [p for n, p in weights if p.dim() > 1 and "embed" not in n]
    momenta = [torch.zeros_like(matrix) for matrix in matrices]
    adam = torch.optim.AdamW(
        [p for n, p in weights if p.dim() == 1 or "embed" in n], betas=(0.9, 0.98)
    )
    stream = _token_stream(tokenizer, rng)
    loss = torch.zeros(())
    for step in range(num_steps):
        rows, length = (8, 80) if step % 8 else (1, 640)
        ids = torch.tensor([next(stream) for _ in range(rows * length)]).view(
            rows, length
        )
        positions = torch.tensor(_positions(rows, length, rng))
        loss = model(ids, labels=ids, position_ids=positions).loss
        loss.backward()
        pace = min(1, (step + 1) / 30) * (1 + math.cos(math.pi * step / num_steps)) / 2
        adam.param_groups[0]["lr"] = 0.02 * pace
        adam.step()
        with torch.no_grad():
            for matrix, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(matrix.grad, 0.05)
                matrix -= 0.03 * pace * _orthogonal(matrix.grad.lerp(momentum, 0.95))
        model.zero_grad()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(target)
    return float(loss.detach())


def main() -> None:
    if sys.argv[1:2] == ["--into"]:
        print(train(sys.argv[3], Path(sys.argv[2])))
        return
    with ThreadPoolExecutor() as pool:  # each trains in a process of its own
        for folder in pool.map(ensure_model, sys.argv[1:] or KINDS):
            print(folder)


if __name__ == "__main__":
    main()
