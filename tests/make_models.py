"""Tiny models for tests, trained on text that this file generates.

    python -m tests.make_models gqa mla      # prints their directories

No network is needed. `ensure_model(kind)` trains on first use, which takes a minute or
two. It caches the result as a Hugging Face directory under BATON_TEST_CACHE or
~/.cache/baton/test-models. The name of that directory contains a digest of this file,
so any change of the file trains the models again. Some tests also use larger models,
which `trained_models()` finds in BATON_TEST_MODELS or ../shared/models.

The text is a Markov chain of short sentences with skewed odds, so that greedy choices
have clear margins. Each story is about one person and one colour, so that a
continuation depends on tokens far back.
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
    "ball boat book box bridge cake car chair clock coat cup door drum fish flag "
    "garden hat horse key kite lamp letter map shoe"
).split()
VERBS = (
    "carried found painted bought lost opened washed fixed drew saw took hid moved "
    "liked sold held"
).split()
PLACES = (
    "in the park|near the river|at school|under the old tree|behind the house|"
    "on the hill|at the market|by the sea|in the kitchen|on the train|at night|"
    "after lunch"
).split("|")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
# MLA latents of a size that FlashInfer supports. Of the two layers, only the second has
# experts.
_MOE = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def _gqa(
    hidden_size: int, q_heads: int, kv_heads: int, head_dim: int = 16
) -> tuple[str, dict[str, Any]]:
    return "LlamaForCausalLM", {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "head_dim": head_dim,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
    }


# Possible numbers of TP ranks:
# - gqa: 1, 2, 4, and 8 with replicated KV heads.
# - gqa6: 1, 2, 3 and 6. Three ranks do not divide its vocabulary evenly.
# - mla, with a latent cache of one head: 1, 2 and 4.
# moe is mla with experts. gqa64 is gqa with a head size that FlashInfer supports.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": _gqa(128, 8, 4),
    "gqa6": _gqa(96, 12, 6),
    "gqa64": _gqa(128, 8, 4, head_dim=64),
    "mla": ("DeepseekV2ForCausalLM", _MLA),
    "moe": ("DeepseekV2ForCausalLM", {**_MLA, **_MOE}),
}
# These variables make the order of floating-point sums the same on all machines with
# AVX2, so that training gives the same weights on all of them.
_REPRODUCIBLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def ensure_model(kind: str) -> Path:
    """Return the directory of a trained model of `kind` (see KINDS).

    The model is trained if the cache does not have it.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of {', '.join(KINDS)}")
    default_root = Path.home() / ".cache" / "baton" / "test-models"
    root = os.environ.get("BATON_TEST_CACHE") or default_root
    key = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return build_once(
        Path(root) / f"{kind}-{key}",
        key,
        lambda scratch: _train_in_process(kind, scratch),
    )


def trained_models() -> dict[str, Path]:
    """Return the directories of larger trained models by name. Tests are skipped if
    their model is missing.
    """
    here = Path(__file__).resolve().parent.parent
    root = Path(
        os.environ.get("BATON_TEST_MODELS") or here.parent / "shared" / "models"
    )
    return {
        path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))
    }


def _train_in_process(kind: str, target: Path) -> None:
    # Training in a separate process does not change this process's number of threads,
    # seeds or warnings. One thread is enough: small matrices gain little from a second
    # one, and a busy core would delay both.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if " avx2 " in Path("/proc/cpuinfo").read_text():
        environment |= _REPRODUCIBLE
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "tests.make_models", "--into", str(target), kind]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"training {kind} failed:\n{done.stderr[-4000:]}")


class Storyteller:
    """Generates endless stories and conversations, each about one person and one
    colour.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._name = NAMES[0]
        self._colour = COLOURS[0]
        self._noun = NOUNS[0]

    def story(self) -> str:
        self._begin()
        return self._sentences(self._rng.randint(3, 12))

    def chat(self) -> str:
        """Return a question and its answer, formatted by the chat template."""
        self._begin()
        question = (
            f"Tell a story about {self._name} and the {self._colour} {self._noun}."
        )
        answer = self._sentences(*self._rng.choices((1, 2, 3, 4), (7, 1, 1, 1)))
        return (
            f"<|im_start|>user\n{question}<|im_end|>\n"
            f"<|im_start|>assistant\n{answer}<|im_end|>\n"
        )

    def _begin(self) -> None:
        # Person and colour usually follow from those of the previous story, so that
        # greedy choices have clear margins at the start of a story, too. Sometimes they
        # are random, so that every combination occurs.
        if self._rng.random() < 0.2:
            self._name = self._rng.choice(NAMES)
            self._colour = self._rng.choice(COLOURS)
            self._noun = self._rng.choice(NOUNS)
            return
        self._name = self._pick("name", self._name, NAMES)
        self._colour = self._pick("colour", self._colour, COLOURS)

    def _sentences(self, num_sentences: int) -> str:
        sentences = []
        for _ in range(num_sentences):
            verb = self._pick("verb", self._noun, VERBS)
            place = self._pick("place", verb, PLACES)
            sentences.append(
                f"{self._name} {verb} the {self._colour} {self._noun} {place}."
            )
            self._noun = self._pick("noun", self._noun + self._colour, NOUNS)
        return " ".join(sentences)

    def _pick(self, table: str, previous: str, choices: list[str]) -> str:
        order = random.Random(f"{table} {previous}").sample(choices, 3)
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
    storyteller = Storyteller(rng)
    texts = [
        text for _ in range(1000) for text in (storyteller.story(), storyteller.chat())
    ]
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
    storyteller = Storyteller(rng)
    while True:
        text = storyteller.chat() if rng.random() < 0.3 else storyteller.story() + "\n"
        yield from tokenizer.encode(text).ids


def _positions(rows: int, length: int, rng: random.Random) -> list[list[int]]:
    """Return the positions of the tokens in each row, with two gaps per row.

    With gaps, the model learns long distances from short sequences.
    """
    positions = []
    for _ in range(rows):
        first_cut, second_cut = sorted(rng.sample(range(1, length), 2))
        gaps = [rng.randint(0, TRAINED_POSITIONS // 3) for _ in range(3)]
        row = []
        for index in range(length):
            position = index + gaps[0]
            if index >= first_cut:
                position += gaps[1]
            if index >= second_cut:
                position += gaps[2]
            row.append(position)
        positions.append(row)
    return positions


def _orthogonal(update: Any) -> Any:
    """Return the update of a matrix, orthogonalized as in the optimizer Muon.

    The computation is in float32, because many processors are slow in torch's bfloat16.
    """
    x = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # Newton-Schulz iteration
        square = x.mT @ x if x.shape[-2] > x.shape[-1] else x @ x.mT
        change = -4.7750 * square + 2.0315 * square @ square
        x = 3.4445 * x + (x @ change if x.shape[-2] > x.shape[-1] else change @ x)
    return x * max(1, x.shape[-2] / x.shape[-1]) ** 0.5


def train(kind: str, target: Path, *, num_steps: int = 160) -> float:
    """Train and save a model. Return the last loss, in nats per token.

    Matrices are trained by Muon, which needs a third of the steps of AdamW. All other
    weights are trained by AdamW.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = _make_tokenizer(target, rng)
    name, sizes = KINDS[kind]
    config_class = getattr(transformers, name.replace("ForCausalLM", "Config"))
    model = getattr(transformers, name)(config_class(**_COMMON, **sizes))
    model.set_attn_implementation("eager")  # the fastest for such short sequences
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
        tokens = [next(stream) for _ in range(rows * length)]
        ids = torch.tensor(tokens).view(rows, length)
        positions = torch.tensor(_positions(rows, length, rng))
        loss = model(ids, labels=ids, position_ids=positions).loss
        loss.backward()
        schedule = (
            min(1, (step + 1) / 30) * (1 + math.cos(math.pi * step / num_steps)) / 2
        )
        adam.param_groups[0]["lr"] = 0.02 * schedule
        adam.step()
        with torch.no_grad():
            for matrix, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(matrix.grad, 0.05)
                matrix -= (
                    0.03 * schedule * _orthogonal(matrix.grad.lerp(momentum, 0.95))
                )
        model.zero_grad()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(target)
    return float(loss.detach())


def main() -> None:
    if sys.argv[1:2] == ["--into"]:
        print(train(sys.argv[3], Path(sys.argv[2])))
        return
    with ThreadPoolExecutor() as pool:  # each model is trained in a process of its own
        for folder in pool.map(ensure_model, sys.argv[1:] or KINDS):
            print(folder)


if __name__ == "__main__":
    main()
