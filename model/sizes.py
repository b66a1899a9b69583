"""The weights that a config implies, by arithmetic, and whether a checkpoint has these. No torch.

Called before anything is allocated, because a config may say anything. Counts only the matrices:
norms and biases are negligible.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from model.config import MLAConfig, ModelConfig, MoEConfig
from model.errors import ModelLoadError
from model.files import read_headers


@dataclass(frozen=True)
class Size:
    """A number that follows from fields of config.json.

    Attributes:
        terms: these fields with their values, such as "num_attention_heads 8 x head_dim 64".
    """

    value: int
    terms: str

    def __str__(self) -> str:
        field, _, rest = self.terms.partition(" ")
        return f"{field} is {self.value}" if rest.isdigit() else f"{self.terms} is {self.value}"

    def __mul__(self, other: "Size") -> "Size":
        return Size(self.value * other.value, f"{self.terms} x {other.terms}")

    def __add__(self, other: "Size") -> "Size":
        return Size(self.value + other.value, f"({self.terms} + {other.terms})")


Shape = tuple[Size, Size]  # rows, columns


@dataclass(frozen=True)
class Weights:
    """Some matrices of one shape.

    Attributes:
        name: of the first of them.
        count: how many there are; None: this one.
    """

    name: str
    shape: Shape
    count: Size | None = None

    @property
    def elements(self) -> int:
        return (self.count.value if self.count else 1) * math.prod(s.value for s in self.shape)

    def __str__(self) -> str:
        rows, columns = (size.terms for size in self.shape)
        each = f" in each of {self.count.terms}" if self.count else ""
        return f"{self.name} ({rows} by {columns}){each}"


def implied_weights(config: ModelConfig) -> list[Weights]:
    """Every matrix of the model."""
    hidden = Size(config.hidden_size, f"hidden_size {config.hidden_size}")
    vocab = (Size(config.vocab_size, f"vocab_size {config.vocab_size}"), hidden)
    layers = _layers(config.num_layers)
    found = [Weights("model.embed_tokens.weight", vocab)]
    if not config.tie_embeddings:
        found.append(Weights("lm_head.weight", vocab))
    attention = _of_mla(config, config.mla, hidden) if config.mla else _of_heads(config, hidden)
    for name, shape in attention.items():
        found.append(Weights(f"model.layers.0.self_attn.{name}.weight", shape, layers))
    if num_dense := config.moe.first_dense_layers if config.moe else config.num_layers:
        width = Size(config.intermediate_size, f"intermediate_size {config.intermediate_size}")
        found += _gated("model.layers.0.mlp", width, hidden, _layers(num_dense))
    return found + (_of_experts(config, config.moe, hidden) if config.moe else [])


def _layers(count: int) -> Size:
    return Size(count, f"num_hidden_layers {count}")


def _of_heads(config: ModelConfig, hidden: Size) -> dict[str, Shape]:
    head = Size(config.head_dim, f"head_dim {config.head_dim}")
    queries = Size(config.num_heads, f"num_attention_heads {config.num_heads}") * head
    keys = Size(config.num_kv_heads, f"num_key_value_heads {config.num_kv_heads}") * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }


def _of_mla(config: ModelConfig, mla: MLAConfig, hidden: Size) -> dict[str, Shape]:
    heads = Size(config.num_heads, f"num_attention_heads {config.num_heads}")
    nope = Size(mla.qk_nope_head_dim, f"qk_nope_head_dim {mla.qk_nope_head_dim}")
    rope = Size(mla.qk_rope_head_dim, f"qk_rope_head_dim {mla.qk_rope_head_dim}")
    value = Size(mla.v_head_dim, f"v_head_dim {mla.v_head_dim}")
    latent = Size(mla.kv_lora_rank, f"kv_lora_rank {mla.kv_lora_rank}")
    found = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    if mla.q_lora_rank is None:
        return {**found, "q_proj": (heads * (nope + rope), hidden)}
    low = Size(mla.q_lora_rank, f"q_lora_rank {mla.q_lora_rank}")
    return {**found, "q_a_proj": (low, hidden), "q_b_proj": (heads * (nope + rope), low)}


def _gated(prefix: str, width: Size, hidden: Size, count: Size) -> list[Weights]:
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return [Weights(f"{prefix}.{name}_proj.weight", s, count) for name, s in shapes.items()]


def _of_experts(config: ModelConfig, moe: MoEConfig, hidden: Size) -> list[Weights]:
    layers = _layers(config.num_layers - moe.first_dense_layers)
    experts = Size(moe.num_experts, f"n_routed_experts {moe.num_experts}")
    width = Size(
        moe.expert_intermediate_size, f"moe_intermediate_size {moe.expert_intermediate_size}"
    )
    shared = Size(moe.num_shared_experts, f"n_shared_experts {moe.num_shared_experts}")
    prefix = f"model.layers.{moe.first_dense_layers}.mlp"
    return [
        Weights(f"{prefix}.gate.weight", (experts, hidden), layers),
        *_gated(f"{prefix}.experts.0", width, hidden, layers * experts),
        *_gated(f"{prefix}.shared_experts", width * shared, hidden, layers),
    ]


def num_elements(config: ModelConfig) -> int:
    """Elements of all matrices of the model."""
    return sum(weights.elements for weights in implied_weights(config))


def largest(config: ModelConfig) -> Weights:
    """The matrices that most of the model is made of."""
    return max(implied_weights(config), key=lambda weights: weights.elements)


def check_files(config: ModelConfig, folder: Path) -> None:
    """Compares a config with the headers of the safetensors files beside it.

    Raises:
        ModelLoadError: names the field of config.json, its value, and what the files have.
    """
    entries = read_headers(folder)
    told = f"in {folder}: correct config.json, or take the one that came with these weights"
    for weights in implied_weights(config):
        found = entries[weights.name]["shape"] if weights.name in entries else []
        for size, actual, kind in zip(weights.shape, found, ("rows", "columns"), strict=False):
            if size.value != actual:
                raise ModelLoadError(
                    f"config.json: {size}, but {weights.name} has {actual} {kind} {told}"
                )
    indices = {name.split(".")[2] for name in entries if name.startswith("model.layers.")}
    if indices and len(indices) != config.num_layers:
        raise ModelLoadError(
            f"config.json: num_hidden_layers is {config.num_layers}, but there are weights of "
            f"{len(indices)} layers {told}"
        )


def stored_elements(folder: Path) -> Counter[str]:
    """How many elements a directory's safetensors files have of each dtype, by its name there."""
    found: Counter[str] = Counter()
    for entry in read_headers(folder).values():
        found[entry["dtype"]] += math.prod(entry["shape"])
    return found
