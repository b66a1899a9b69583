"""Sizes that a config implies, and checks of the safetensors files against them.

The sizes are computed before anything is allocated, because a config may contain any
number. Only matrices are counted, since norms and biases are negligible. This file does
not import torch.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model.config import ModelConfig
from model.errors import InvalidParallelism, ModelLoadError
from model.files.safetensors_files import StoredTensor, read_headers

# Each tensor contributes _SAMPLES_PER_TENSOR samples of _SAMPLE_BYTES to the
# fingerprint. An embedding or a head also contributes the first _ROW_BYTES of each row.
_SAMPLE_BYTES: Final = 256
_SAMPLES_PER_TENSOR: Final = 4
_ROW_BYTES: Final = 16
# Weights that are never quantised: embeddings, heads, routers, gates of shared experts,
# and MLA's absorbed projection.
_UNQUANTISED_SUFFIXES: Final = tuple(
    f"{name}.weight"
    for name in (
        "embed_tokens",
        "lm_head",
        "kv_b_proj",
        ".gate",
        "router",
        "router.layer",
        "_gate",
    )
)


@dataclass(frozen=True)
class Size:
    """A number that follows from fields of config.json.

    Attributes:
        terms: the fields with their values, such as "num_attention_heads 8 x head_dim
            64".
    """

    value: int
    terms: str

    def __str__(self) -> str:
        field, _, rest = self.terms.partition(" ")
        is_one_field = rest.isdigit()
        return f"{field if is_one_field else self.terms} is {self.value}"


# Maps the name of a weight to a formula for each dimension: rows and columns, preceded
# by the number of experts if one tensor holds all experts.
Shapes = dict[str, tuple[str, ...]]
_GATED_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


def _evaluate(formula: str, fields: Mapping[str, int]) -> Size:
    """Evaluates a formula.

    Args:
        formula: a product of fields, numbers and sums of fields, such as "2 x (a + b)".
        fields: the values of the fields.
    """
    value = 1
    for factor in formula.split(" x "):
        value *= sum(int(fields.get(name, name)) for name in re.findall(r"\w+", factor))
    terms = re.sub(r"\w{2,}", lambda match: f"{match[0]} {fields[match[0]]}", formula)
    return Size(value, terms)


@dataclass(frozen=True)
class MatrixGroup:
    """All matrices of a model that have the same role and shape.

    Attributes:
        name: name of the group's first matrix.
        shape: rows and columns, preceded by the number of experts if one tensor holds
            all experts.
        count: number of matrices in the group; None: one.
    """

    name: str
    shape: tuple[Size, ...]
    count: Size | None = None

    @property
    def elements(self) -> int:
        count = self.count.value if self.count else 1
        return count * math.prod(size.value for size in self.shape)

    def __str__(self) -> str:
        sizes = " by ".join(size.terms for size in self.shape)
        suffix = f" in each of {self.count.terms}" if self.count else ""
        return f"{self.name} ({sizes}){suffix}"


def implied_weights(config: ModelConfig) -> list[MatrixGroup]:
    """Returns the groups of all matrices of the model."""
    fields = _fields(config)
    table_shape = (_evaluate("vocab_size", fields), _evaluate("hidden_size", fields))
    groups = [MatrixGroup("model.embed_tokens.weight", table_shape)]
    if not config.tie_embeddings:
        groups.append(MatrixGroup("lm_head.weight", table_shape))
    projections: Sequence[str] = _GATED_PROJECTIONS
    if "gate_up_proj" in config.traits.fused:
        projections = ("gate_up_proj", "down_proj")
    # Layers are iterated lazily and not put into lists, because the config may claim
    # any number of layers.
    layers = range(config.num_layers)
    dense_layers = (layer for layer in layers if not config.is_moe_layer(layer))
    moe_layers = (layer for layer in layers if config.is_moe_layer(layer))
    num_dense = config.num_dense_layers
    num_moe = config.num_layers - num_dense
    dense_shapes = _gated_shapes("mlp", "intermediate_size", projections)
    groups += _layer_groups(
        config, iter(layers), config.num_layers, _attention_shapes(config)
    )
    groups += _layer_groups(config, dense_layers, num_dense, dense_shapes)
    groups += _layer_groups(config, moe_layers, num_moe, _mixture_shapes(config))
    return groups


def _layer_groups(
    config: ModelConfig, layers: Iterator[int], num_layers: int, shapes: Shapes
) -> list[MatrixGroup]:
    """Returns a group for each matrix that each of `num_layers` layers has.

    Args:
        layers: the indices of these layers; only the first index is used.
        shapes: the matrices of one layer.
    """
    if num_layers == 0:
        return []
    first_layer = next(layers)
    mixture = config.traits.mixture
    fields = {**_fields(config), "num_hidden_layers": num_layers}
    groups = []
    for name, shape in shapes.items():
        count = "num_hidden_layers"
        if mixture and ".experts.0." in name:
            count += f" x {mixture.count_field}"
        groups.append(
            MatrixGroup(
                name=f"model.layers.{first_layer}.{name}",
                shape=tuple(_evaluate(formula, fields) for formula in shape),
                count=_evaluate(count, fields),
            )
        )
    return groups


def _fields(config: ModelConfig) -> dict[str, int]:
    """Returns the sizes of the model by their names in config.json."""
    values: dict[str, int | None] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **(dataclasses.asdict(config.mla) if config.mla else {}),
    }
    moe = config.moe
    mixture = config.traits.mixture
    if moe and mixture:
        values[mixture.count_field] = moe.num_experts
        values["n_shared_experts"] = moe.num_shared_experts
        values[mixture.width_field] = moe.expert_intermediate_size
        if mixture.shared_width_field:
            values[mixture.shared_width_field] = moe.shared_intermediate_size
    return {name: value for name, value in values.items() if value}


def _attention_shapes(config: ModelConfig) -> Shapes:
    if config.mla:
        shapes = _latent_attention_shapes(has_q_lora=config.mla.q_lora_rank is not None)
    else:
        queries = "num_attention_heads x head_dim"
        keys = "num_key_value_heads x head_dim"
        if "qkv_proj" in config.traits.fused:
            heads = "num_attention_heads + num_key_value_heads + num_key_value_heads"
            shapes = {"qkv_proj": (f"({heads}) x head_dim", "hidden_size")}
        else:
            shapes = {
                "q_proj": (queries, "hidden_size"),
                "k_proj": (keys, "hidden_size"),
                "v_proj": (keys, "hidden_size"),
            }
        shapes["o_proj"] = ("hidden_size", queries)
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _latent_attention_shapes(*, has_q_lora: bool) -> Shapes:
    queries = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
    keys_values = "num_attention_heads x (qk_nope_head_dim + v_head_dim)"
    shapes: Shapes = {
        "kv_a_proj_with_mqa": ("(kv_lora_rank + qk_rope_head_dim)", "hidden_size"),
        "kv_b_proj": (keys_values, "kv_lora_rank"),
        "o_proj": ("hidden_size", "num_attention_heads x v_head_dim"),
    }
    if has_q_lora:
        shapes["q_a_proj"] = ("q_lora_rank", "hidden_size")
        shapes["q_b_proj"] = (queries, "q_lora_rank")
    else:
        shapes["q_proj"] = (queries, "hidden_size")
    return shapes


def _gated_shapes(
    prefix: str, width: str, projections: Sequence[str] = _GATED_PROJECTIONS
) -> Shapes:
    """Returns the shapes of a gated feed-forward.

    Args:
        width: formula of the intermediate size.
        projections: names of the gate, up and down projection; or names of the fused
            gate and up projection and of the down projection.
    """
    *gate_up, down = projections
    rows = width if len(gate_up) == 2 else f"2 x {width}"
    shapes: Shapes = {}
    for name in gate_up:
        shapes[f"{prefix}.{name}.weight"] = (rows, "hidden_size")
    shapes[f"{prefix}.{down}.weight"] = ("hidden_size", width)
    return shapes


def _mixture_shapes(config: ModelConfig) -> Shapes:
    mixture = config.traits.mixture
    if config.moe is None or mixture is None:
        return {}
    count = mixture.count_field
    width = mixture.width_field
    shapes: Shapes = {f"{mixture.router}.weight": (count, "hidden_size")}
    if mixture.shared_gate:
        shapes[f"{mixture.shared_gate}.weight"] = ("1", "hidden_size")
    if config.moe.num_shared_experts:
        shared_width = mixture.shared_width_field or f"{width} x n_shared_experts"
        shapes |= _gated_shapes(mixture.shared, shared_width)
    if mixture.stacked:
        gate_up = (f"2 x {width}", "hidden_size")
        down = ("hidden_size", width)
        for name, weight, matrix in zip(
            mixture.stacked, mixture.stacked_weights, (gate_up, down), strict=True
        ):
            rows, columns = matrix
            if mixture.transposed:
                shapes[weight] = (count, columns, rows)
            else:
                shapes[weight] = (count, rows, columns)
            if mixture.biased:
                shapes[f"{name}_bias"] = (count, rows)
    else:
        shapes |= _gated_shapes("experts.0", width, mixture.expert_weights)
    return {f"{mixture.prefix}.{name}": shape for name, shape in shapes.items()}


def bits_per_element(
    config: ModelConfig, name: str, itemsize: int, *, keep_quantised: bool
) -> float:
    """Returns how many bits an element of a weight takes in memory.

    Some configs list weights that are not quantised. This list is ignored: such weights
    are counted as quantised, so the result is too small for them.

    Args:
        name: name of the weight.
        itemsize: bytes of an element that is not quantised.
        keep_quantised: whether quantised weights are kept quantised in memory, instead
            of being dequantised at load.
    """
    quantization = config.quantization
    if not keep_quantised or quantization is None:
        return 8 * itemsize
    is_excluded = name.endswith(_UNQUANTISED_SUFFIXES)
    if quantization.stored == "mxfp4" and ".experts." not in name:
        is_excluded = True
    return 8 * itemsize if is_excluded else quantization.bits


def weight_bytes(config: ModelConfig, itemsize: int, *, keep_quantised: bool) -> int:
    """Returns the bytes of all matrices of the model.

    See bits_per_element for the arguments.
    """
    bits = 0.0
    for group in implied_weights(config):
        bits += group.elements * bits_per_element(
            config, group.name, itemsize, keep_quantised=keep_quantised
        )
    return int(bits) // 8


def largest_group(config: ModelConfig) -> MatrixGroup:
    """Returns the group of matrices with the largest total size."""
    return max(implied_weights(config), key=lambda group: group.elements)


def check_parallelism(
    config: ModelConfig, size: int, dcp: int = 1, ep: int = 1
) -> None:
    """Checks that `size` ranks can share the model.

    Args:
        size: number of tensor-parallel ranks.
        dcp: number of ranks that hold the same KV heads and share the tokens; divides
            `size`.
        ep: number of groups of ranks that split the experts; divides `size`.

    Raises:
        InvalidParallelism: the ranks cannot share the heads or the widths, the
            `size / dcp` groups cannot share the KV heads, or the `ep` groups cannot
            share the experts.
    """
    num_experts = config.moe.num_experts if config.moe else 1
    if num_experts % ep:
        if config.moe:
            problem = (
                f"does not divide the model's {num_experts} experts: use a divisor"
            )
        else:
            problem = (
                "needs a mixture of experts, which this model does not have: leave it "
                "out"
            )
        raise InvalidParallelism(f"--ep {ep} {problem}")
    tp_problem = _tp_problem(config, size, ep)
    if tp_problem:
        sizes = " or ".join(map(str, tp_sizes(config, ep)))
        fix = f"use {sizes}" if sizes else "use another --ep"
        raise InvalidParallelism(f"--tp {size} {tp_problem}; {fix}")
    special_attention = config.special_attention
    if dcp > 1 and special_attention:
        raise InvalidParallelism(
            f"--dcp {dcp} does not serve {special_attention}, which this model has; "
            "use --dcp 1"
        )
    num_groups = size // dcp
    kv_heads = config.kv_heads_total
    if kv_heads % num_groups and num_groups % kv_heads:
        raise InvalidParallelism(
            f"--dcp {dcp} with --tp {size} makes {num_groups} groups of ranks, which "
            f"neither divides nor is a multiple of the model's {kv_heads} KV heads; "
            "use another --dcp"
        )


def tp_sizes(config: ModelConfig, ep: int) -> list[int]:
    """Returns all values of --tp with which the ranks can share the model."""
    return [
        size
        for size in range(1, config.num_heads + 1)
        if not _tp_problem(config, size, ep)
    ]


def _tp_problem(config: ModelConfig, size: int, ep: int) -> str | None:
    """Returns why `size` ranks cannot share the model, or None if they can."""
    if config.num_heads % size:
        return f"does not divide the model's {config.num_heads} query heads"
    kv_heads = config.kv_heads_total
    if kv_heads % size and size % kv_heads:
        return f"neither divides nor is a multiple of the model's {kv_heads} KV heads"
    if size % ep:
        return f"is not a multiple of --ep {ep}"
    fields = _fields(config)
    for formula, ranks in _shared_widths(config, size, ep):
        width = _evaluate(formula, fields).value
        if width % ranks:
            return f"does not divide the model's {formula} {width}"
    return None


def _shared_widths(config: ModelConfig, size: int, ep: int) -> list[tuple[str, int]]:
    """Returns the formula of each width that ranks split, with the number of ranks."""
    widths = []
    if config.num_dense_layers:
        widths.append(("intermediate_size", size))
    mixture = config.traits.mixture
    if config.moe and mixture:
        widths.append((mixture.width_field, size // ep))
        if config.moe.num_shared_experts:
            shared_width = mixture.shared_width_field
            if shared_width is None:
                shared_width = f"{mixture.width_field} x n_shared_experts"
            widths.append((shared_width, size))
    return widths


def check_files(config: ModelConfig, folder: Path) -> None:
    """Compares a config with the headers of the safetensors files in its folder.

    Raises:
        ModelLoadError: a size differs. The message names the field of config.json, its
            value, and the value in the files.
    """
    tensors = read_headers(folder)
    fix = "correct config.json, or use the config.json that came with these weights"
    for group in implied_weights(config):
        if group.name not in tensors:
            continue
        dimensions = ("experts", "rows", "columns")[-len(group.shape) :]
        for size, actual, dimension in zip(
            group.shape, tensors[group.name].shape, dimensions, strict=False
        ):
            if size.value != actual:
                raise ModelLoadError(
                    f"config.json: {size}, but {group.name} has {actual} {dimension} "
                    f"in the files of {folder}: {fix}"
                )
    layers = {
        name.split(".")[2] for name in tensors if name.startswith("model.layers.")
    }
    for layer in range(config.draft_layers):
        layers.discard(str(config.num_layers + layer))
    if layers and len(layers) != config.num_layers:
        raise ModelLoadError(
            f"config.json: num_hidden_layers is {config.num_layers}, but the files in "
            f"{folder} have weights of {len(layers)} layers: {fix}"
        )


def fingerprint(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> str:
    """Returns 32 hex digits that are equal for equal config and weights.

    Hashing whole files would take longer than loading them, so samples of each tensor
    are hashed. The samples distinguish a fine-tuned model from its base model, because
    training changes nearly every element of a trained tensor. Tensors with a row for
    each token are an exception: training may have changed the rows of a few tokens
    only. The start of every row of such a tensor is therefore hashed as well.

    Args:
        model_dir: as `hub.resolve_model` returns it; not read if load_format is
            "dummy".
        load_format: see `decoder.load_model`.
        seed: the seed of dummy weights.
    """
    digest = hashlib.blake2b(config.semantic_json.encode(), digest_size=16)
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    for name, tensor in sorted(read_headers(Path(model_dir)).items()):
        header = json.dumps([tensor.dtype, tensor.shape])
        digest.update(name.encode())
        digest.update(header.encode())
        digest.update(_samples(tensor, config.vocab_size))
    return digest.hexdigest()


def _samples(tensor: StoredTensor, vocab_size: int) -> bytes:
    content = tensor.content()
    step = math.ceil(max(1, len(content)) / _SAMPLES_PER_TENSOR)
    samples = [
        content[start : start + _SAMPLE_BYTES].tobytes()
        for start in range(0, len(content), step)
    ]
    if len(tensor.shape) == 2 and tensor.shape[0] >= vocab_size:
        rows = content.reshape(tensor.shape[0], -1)
        samples.append(rows[:, :_ROW_BYTES].tobytes())
    return b"".join(samples)
