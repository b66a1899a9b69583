"""What a config implies, and what the safetensors files beside it hold. No torch.

Called before anything is allocated, because a config may say anything. Of weights only matrices
are counted: norms and biases are negligible.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from model.config import ModelConfig
from model.errors import InvalidParallelism, ModelLoadError

_SINGLE: Final = "model.safetensors"
_OF_TEXT: Final = r"^(model\.)?language_model\."
_LFS: Final = b"version "  # what its pointers begin with
_SAMPLE_BYTES: Final = 256
_SAMPLES_PER_TENSOR: Final = 4
# Weights of what is never quantised: tables, routers, and MLA's absorbed projection.
_PLAIN: Final = tuple(
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
        return (
            f"{field} is {self.value}"
            if rest.isdigit()
            else f"{self.terms} is {self.value}"
        )


# Formulas of rows and columns; before them that of experts, where they are in one tensor.
Shapes = dict[str, tuple[str, ...]]
_GATED: Final = ("gate_proj", "up_proj", "down_proj")


def _size(formula: str, fields: Mapping[str, int]) -> Size:
    """`formula`: a product of fields, numbers and sums of fields, such as "2 x (a + b)"."""
    factors = (re.findall(r"\w+", factor) for factor in formula.split(" x "))
    value = math.prod(
        sum(int(fields.get(name, name)) for name in each) for each in factors
    )
    return Size(
        value, re.sub(r"\w{2,}", lambda name: f"{name[0]} {fields[name[0]]}", formula)
    )


@dataclass(frozen=True)
class Weights:
    """Some matrices of one shape.

    Attributes:
        name: of the first of them.
        shape: rows, columns; before them experts where they are in one tensor.
        count: how many there are; None: this one.
    """

    name: str
    shape: tuple[Size, ...]
    count: Size | None = None

    @property
    def elements(self) -> int:
        return (self.count.value if self.count else 1) * math.prod(
            s.value for s in self.shape
        )

    def __str__(self) -> str:
        sizes = " by ".join(size.terms for size in self.shape)
        each = f" in each of {self.count.terms}" if self.count else ""
        return f"{self.name} ({sizes}){each}"


def implied_weights(config: ModelConfig) -> list[Weights]:
    """Every matrix of the model."""
    fields, mixture = _fields(config), config.declared.mixture
    layers, num_dense = range(config.num_layers), config.num_dense_layers
    once = [
        "model.embed_tokens.weight",
        *([] if config.tie_embeddings else ["lm_head.weight"]),
    ]
    vocabulary = _size("vocab_size", fields), _size("hidden_size", fields)
    found = [Weights(name, vocabulary) for name in once]
    fused = "gate_up_proj" in config.declared.fused
    dense = _gated(
        "mlp", "intermediate_size", ("gate_up_proj", _GATED[2]) if fused else _GATED
    )
    for count, which, shapes in (
        (config.num_layers, iter(layers), _attention(config)),
        (num_dense, (layer for layer in layers if not config.is_mixed(layer)), dense),
        (
            config.num_layers - num_dense,
            filter(config.is_mixed, layers),
            _mixture(config),
        ),
    ):
        of = {**fields, "num_hidden_layers": count}
        first = next(which) if count else 0
        for name, shape in shapes.items() if count else ():
            each = f" x {mixture.count}" if mixture and ".experts.0." in name else ""
            sizes = tuple(_size(formula, of) for formula in shape)
            counted = _size(f"num_hidden_layers{each}", of)
            found.append(Weights(f"model.layers.{first}.{name}", sizes, counted))
    return found


def _fields(config: ModelConfig) -> dict[str, int]:
    """By the names that config.json has for them."""
    values: dict[str, int | None] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **(dataclasses.asdict(config.mla) if config.mla else {}),
    }
    if (moe := config.moe) and (names := config.declared.mixture):
        values[names.count] = moe.num_experts
        values["n_shared_experts"] = moe.num_shared_experts
        values[names.width] = moe.expert_intermediate_size
        if names.shared_width:
            values[names.shared_width] = moe.shared_intermediate_size
    return {name: value for name, value in values.items() if value}


def _attention(config: ModelConfig) -> Shapes:
    hidden, queries = "hidden_size", "num_attention_heads x head_dim"
    if config.mla:
        queries = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
        each: Shapes = {
            "kv_a_proj_with_mqa": ("(kv_lora_rank + qk_rope_head_dim)", hidden),
            "kv_b_proj": (
                "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
                "kv_lora_rank",
            ),
            "o_proj": (hidden, "num_attention_heads x v_head_dim"),
        }
        if config.mla.q_lora_rank is None:
            each["q_proj"] = (queries, hidden)
        else:
            each |= {
                "q_a_proj": ("q_lora_rank", hidden),
                "q_b_proj": (queries, "q_lora_rank"),
            }
    elif "qkv_proj" in config.declared.fused:
        heads = "num_attention_heads + num_key_value_heads + num_key_value_heads"
        each = {
            "qkv_proj": (f"({heads}) x head_dim", hidden),
            "o_proj": (hidden, queries),
        }
    else:
        keys = "num_key_value_heads x head_dim"
        each = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
        }
        each["o_proj"] = (hidden, queries)
    return {f"self_attn.{name}.weight": shape for name, shape in each.items()}


def _gated(prefix: str, width: str, names: Sequence[str] = _GATED) -> Shapes:
    """`names`: of gates and ups, perhaps in one, and of downs."""
    *wide, down = names
    shape = (width if len(wide) == 2 else f"2 x {width}", "hidden_size")
    each = dict.fromkeys(wide, shape) | {down: ("hidden_size", width)}
    return {f"{prefix}.{name}.weight": shape for name, shape in each.items()}


def _mixture(config: ModelConfig) -> Shapes:
    names, hidden = config.declared.mixture, "hidden_size"
    if config.moe is None or names is None:
        return {}
    count, width = names.count, names.width
    each: Shapes = {f"{names.router}.weight": (count, hidden)}
    if names.shared_gate:
        each[f"{names.shared_gate}.weight"] = ("1", hidden)
    if config.moe.num_shared_experts:
        each |= _gated(
            names.shared, names.shared_width or f"{width} x n_shared_experts"
        )
    if not names.stacked:
        each |= _gated("experts.0", width, names.each)
    matrices = (f"2 x {width}", hidden), (hidden, width)
    stacks = zip(names.stacked or (), names.stacked_weights, matrices, strict=False)
    for name, weight, matrix in stacks:
        each[weight] = (count, *(matrix[::-1] if names.transposed else matrix))
        if names.biased:
            each[f"{name}_bias"] = (count, matrix[0])
    return {f"{names.prefix}.{name}": shape for name, shape in each.items()}


def bits_of(config: ModelConfig, name: str, itemsize: int, *, keeps: bool) -> float:
    """Of an element of a weight; of those that are not kept quantised `itemsize` bytes. What is
    told to be left out of quantisation is not looked for."""
    how = config.quantization if keeps else None
    part = ".experts." if how and how.stored == "mxfp4" else ""
    return (
        how.bits if how and part in name and not name.endswith(_PLAIN) else 8 * itemsize
    )


def weight_bytes(config: ModelConfig, itemsize: int, *, keeps: bool) -> int:
    """Of all matrices of the model; see bits_of."""
    found = implied_weights(config)
    bits = (w.elements * bits_of(config, w.name, itemsize, keeps=keeps) for w in found)
    return int(sum(bits)) // 8


def largest(config: ModelConfig) -> Weights:
    """The matrices that most of the model is made of."""
    return max(implied_weights(config), key=lambda weights: weights.elements)


def check_parallelism(
    config: ModelConfig, size: int, dcp: int = 1, ep: int = 1
) -> None:
    """Raises InvalidParallelism unless `size` ranks can share the model, the `size / dcp` groups
    of ranks that hold the same KV heads its KV heads, and `ep` groups its experts. `dcp` and `ep`
    divide `size`."""
    experts = config.moe.num_experts if config.moe else 1
    if experts % ep:
        told = f"does not divide the model's {experts} experts: use a divisor"
        none = "needs a mixture of experts, and this model has none: leave it out"
        raise InvalidParallelism(f"--ep {ep} {told if config.moe else none}")
    if problem := _problem(config, size, ep):
        sizes = " or ".join(map(str, tp_sizes(config, ep)))
        fix = f"use {sizes}" if sizes else "use another --ep"
        raise InvalidParallelism(f"--tp {size} {problem}; {fix}")
    if dcp > 1 and (special := config.special_attention):
        raise InvalidParallelism(
            f"--dcp {dcp} does not serve {special}, which this model has; use --dcp 1"
        )
    groups, kv_heads = size // dcp, config.kv_heads_total
    if kv_heads % groups and groups % kv_heads:
        raise InvalidParallelism(
            f"--dcp {dcp} with --tp {size} makes {groups} groups of ranks, which neither "
            f"divides nor is a multiple of the model's {kv_heads} KV heads; use another --dcp"
        )


def tp_sizes(config: ModelConfig, ep: int) -> list[int]:
    """All numbers of ranks that can share the model."""
    return [n for n in range(1, config.num_heads + 1) if not _problem(config, n, ep)]


def _problem(config: ModelConfig, size: int, ep: int) -> str | None:
    if config.num_heads % size:
        return f"does not divide the model's {config.num_heads} query heads"
    kv_heads = config.kv_heads_total
    if kv_heads % size and size % kv_heads:
        return f"neither divides nor is a multiple of the model's {kv_heads} KV heads"
    if size % ep:
        return f"is no multiple of --ep {ep}"
    fields, moe, names = _fields(config), config.moe, config.declared.mixture
    shared = [("intermediate_size", size)] if config.num_dense_layers else []
    if moe and names:
        shared.append((names.width, size // ep))
        if moe.num_shared_experts:
            shared.append(
                (names.shared_width or f"{names.width} x n_shared_experts", size)
            )
    for widths, ranks in shared:
        if (width := _size(widths, fields).value) % ranks:
            return f"does not divide the model's {widths} {width}"
    return None


# -- safetensors files


class StoredTensor(NamedTuple):
    """Where a tensor lies: bytes [start, stop) of a safetensors file."""

    path: Path
    dtype: str  # by its name there
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def content(self) -> npt.NDArray[np.uint8]:
        """Its bytes, mapped; who writes to them has a copy."""
        if self.start >= self.stop:
            return np.empty(0, np.uint8)
        return np.memmap(
            self.path, np.uint8, "c", self.start, (self.stop - self.start,)
        )


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory's safetensors files, by name; reads their headers only.

    Raises:
        ModelLoadError: there are none, the index names one that is missing, a file is no such
            file, or the end of it is missing.
    """
    found, where = dict[str, StoredTensor](), _weight_map(folder)
    for file in sorted(set(where.values())) or [_SINGLE]:
        for name, tensor in _header_of(folder / file).items():
            if where.get(name, file) == file:  # of two by this name, it is the index's
                # Of the text of a model that takes images, too, by its name in one of text.
                found[re.sub(_OF_TEXT, r"\1", name)] = tensor
    return found


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each weight, as an index says; empty where a directory has a single file."""
    if (folder / _SINGLE).is_file():
        return {}
    index = folder / f"{_SINGLE}.index.json"
    if not index.is_file():
        told = "weights in other files are not read: save_pretrained of transformers makes such"
        raise ModelLoadError(f"{folder} has neither {_SINGLE} nor {index.name}; {told}")
    try:
        where = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{index} is no index of weights: {error}") from error
    names = sorted(set(where.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelLoadError(
            f"{index} names {', '.join(missing)}, which {folder} lacks"
        )
    return where


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


def _header_of(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            data = 8 + (size := int.from_bytes(first := file.read(8), "little"))
            header = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {
            n: msgspec.json.decode(raw, type=_Entry) for n, raw in header.items()
        }
    except (msgspec.MsgspecError, MemoryError, OverflowError, RecursionError) as error:
        why = (
            f"{error}"
            if first != _LFS
            else "Git LFS left a pointer to it: run `git lfs pull`"
        )
        raise ModelLoadError(f"{path} is not a safetensors file: {why}") from error
    found = {
        name: StoredTensor(
            path, entry.dtype, entry.shape, *(data + o for o in entry.data_offsets)
        )
        for name, entry in entries.items()
    }
    wanted = max((data, *(tensor.stop for tensor in found.values())))
    if (there := path.stat().st_size) < wanted:
        raise ModelLoadError(f"{path} has {there} of {wanted} bytes: download it again")
    return found


def stored_elements(folder: Path) -> Counter[str]:
    """How many elements a directory's safetensors files have of each dtype, by its name there."""
    found: Counter[str] = Counter()
    for tensor in read_headers(folder).values():
        found[tensor.dtype] += tensor.size
    return found


def check_files(config: ModelConfig, folder: Path) -> None:
    """Compares a config with the headers of the safetensors files beside it.

    Raises:
        ModelLoadError: names the field of config.json, its value, and what the files have.
    """
    entries = read_headers(folder)
    told = f"in {folder}: correct config.json, or take the one that came with these weights"
    for weights in implied_weights(config):
        found = entries[weights.name].shape if weights.name in entries else ()
        kinds = ("experts", "rows", "columns")[-len(weights.shape) :]
        for size, actual, kind in zip(weights.shape, found, kinds, strict=False):
            if size.value != actual:
                raise ModelLoadError(
                    f"config.json: {size}, but {weights.name} has {actual} {kind} {told}"
                )
    indices = {
        name.split(".")[2] for name in entries if name.startswith("model.layers.")
    }
    drafts = {str(config.num_layers + layer) for layer in range(config.draft_layers)}
    if (indices := indices - drafts) and len(indices) != config.num_layers:
        raise ModelLoadError(
            f"config.json: num_hidden_layers is {config.num_layers}, but there are weights of "
            f"{len(indices)} layers {told}"
        )


def fingerprint(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    load_format: str = "auto",
    seed: int = 0,
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
        digest.update(
            name.encode() + described.encode() + _samples(tensor, config.vocab_size)
        )
    return digest.hexdigest()


def _samples(tensor: StoredTensor, vocab_size: int) -> bytes:
    content = tensor.content()
    starts = range(
        0, len(content), math.ceil(max(1, len(content)) / _SAMPLES_PER_TENSOR)
    )
    found = b"".join(
        content[start : start + _SAMPLE_BYTES].tobytes() for start in starts
    )
    if len(tensor.shape) == 2 and tensor.shape[0] >= vocab_size:
        found += content.reshape(tensor.shape[0], -1)[:, :_ROW_BYTES].tobytes()
    return found
