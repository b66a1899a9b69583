"""What a config implies, and what lies beside it: weights, ranks, a fingerprint. No torch.

Called before anything is allocated, because a config may say anything. Of weights only matrices
are counted: norms and biases are negligible.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model.config import MLAConfig, ModelConfig, MoEConfig
from model.errors import InvalidParallelism, ModelLoadError
from model.files import StoredTensor, read_headers

_SAMPLE_BYTES: Final = 256
_SAMPLES_PER_TENSOR: Final = 4
_ROW_BYTES: Final = 16  # of each token's row of an embedding or a head


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
        found = entries[weights.name].shape if weights.name in entries else []
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
    for tensor in read_headers(folder).values():
        found[tensor.dtype] += tensor.size
    return found


def check_parallelism(config: ModelConfig, size: int, dcp: int = 1) -> None:
    """Raises InvalidParallelism unless `size` ranks can share the model, and the `size / dcp`
    groups of ranks that hold the same KV heads its KV heads."""
    problem = _problem(config, size)
    if problem:
        sizes = [n for n in range(1, config.num_heads + 1) if not _problem(config, n)]
        raise InvalidParallelism(f"--tp {size} {problem}; use {' or '.join(map(str, sizes))}")
    groups, kv_heads = size // dcp, config.kv_heads_total
    if kv_heads % groups and groups % kv_heads:
        raise InvalidParallelism(
            f"--dcp {dcp} with --tp {size} makes {groups} groups of ranks, which neither "
            f"divides nor is a multiple of the model's {kv_heads} KV heads; use another --dcp"
        )


def _problem(config: ModelConfig, size: int) -> str | None:
    if size < 1:
        return "is less than 1"
    if config.num_heads % size:
        return f"does not divide the model's {config.num_heads} query heads"
    kv_heads = config.kv_heads_total
    if kv_heads % size and size % kv_heads:
        return f"neither divides nor is a multiple of the model's {kv_heads} KV heads"
    widths = {"intermediate_size": config.intermediate_size}
    if config.moe:
        widths["moe_intermediate_size"] = config.moe.expert_intermediate_size
    for name, width in widths.items():
        if width % size:
            return f"does not divide the model's {name} {width}"
    return None


def fingerprint(
    config: ModelConfig, model_dir: str | Path, *, load_format: str = "auto", seed: int = 0
) -> str:
    """32 hex digits, equal for equal config and weights.

    A fine-tune differs in nearly every element it trained, so samples of each tensor tell it
    apart; hashing whole files would take longer than loading them. But one may have trained the
    rows of a few tokens only: of what has a row for each token, all rows are looked at.

    Args:
        model_dir: as `hub.resolve_model` returns it; not read when load_format is "dummy".
        seed: of dummy weights.
    """
    digest = hashlib.blake2b(config.semantic_json.encode(), digest_size=16)
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    for name, tensor in sorted(read_headers(Path(model_dir)).items()):
        described = json.dumps([tensor.dtype, tensor.shape])
        digest.update(name.encode() + described.encode() + _samples(tensor, config.vocab_size))
    return digest.hexdigest()


def _samples(tensor: StoredTensor, vocab_size: int) -> bytes:
    content = tensor.content()
    starts = range(0, len(content), math.ceil(max(1, len(content)) / _SAMPLES_PER_TENSOR))
    found = b"".join(content[start : start + _SAMPLE_BYTES].tobytes() for start in starts)
    if len(tensor.shape) == 2 and tensor.shape[0] >= vocab_size:
        found += content.reshape(tensor.shape[0], -1)[:, :_ROW_BYTES].tobytes()
    return found
