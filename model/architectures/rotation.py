"""Rotary embeddings as config.json describes them: one for all layers, or several, or none."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

from model.architectures.values import each_layer, number, size, unsupported, wrong
from model.architectures.windows import FULL, SLIDING, layer_kinds
from protocol.short_repr import short_repr

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Of these types: fields of rope_parameters, which yarn and longrope may leave out.
_FIELDS: Final = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
NOT_ROTATED: Final = -1  # instead of the index of a layer's rope


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Fields that a rope type does not use keep their defaults."""

    dim: int  # rotated elements of a head, even
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn, longrope: tokens
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None derives it from factor and the mscales
    mscale: float = 0.0  # yarn: 0 means absent
    mscale_all_dim: float = 0.0  # yarn: 0 means absent
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # longrope: of the frequency of each pair
    interleaved: bool = False  # DeepSeek and GLM-4 rotate neighbours, the others rotate halves


def parse_ropes(
    raw: dict[str, Any], head_dim: int, *, interleaved: bool
) -> tuple[list[RopeConfig], tuple[int, ...]]:
    """The distinct ropes of a model, and the index of each layer's; () where all use the first."""
    # transformers 5 stores rope_parameters; before, rope_theta and rope_scaling lay side by side.
    stored = raw.get("rope_parameters") or {}
    kinds = layer_kinds(raw)
    scaling = {} if "rope_type" in stored else raw.get("rope_scaling") or {}
    if FULL in stored:  # by kind of layer
        of_kinds = {kind: {"rope_theta": None, **found} for kind, found in stored.items()}
    else:
        of_kinds = {FULL: {**scaling, **stored}}
        if "rope_local_base_freq" in raw:  # null: that of the others, which alone may be scaled
            base = raw["rope_local_base_freq"] or stored.get("rope_theta")
            of_kinds[SLIDING] = {"rope_theta": base}
    unknown = {kind for kind in kinds if kind not in of_kinds}
    if len(of_kinds) > 1 and unknown:
        raise wrong(f"rope_parameters has none for layer_types {short_repr(sorted(unknown))}")
    ropes, of_layer = [], {}
    for kind in sorted({FULL, *(set(kinds) & set(of_kinds))}):
        rope = _rope(raw, of_kinds[kind], head_dim, interleaved=interleaved)
        if rope not in ropes:
            ropes.append(rope)
        of_layer[kind] = ropes.index(rope)
    layers = [of_layer.get(kind, 0) for kind in kinds]
    if told := _rotated(raw):
        layers = layers or [0] * each_layer(raw)
        if len(told) != len(layers):
            raise wrong(f"no_rope_layers has {len(told)} entries for {len(layers)} layers")
        rotated = zip(layers, told, strict=True)
        layers = [layer if is_rotated else NOT_ROTATED for layer, is_rotated in rotated]
    return ropes, tuple(layers) if any(layers) else ()


def _rotated(raw: dict[str, Any]) -> list[bool]:
    """Of each layer whether it rotates: SmolLM3 leaves out some. Empty: all do."""
    told, interval = raw.get("no_rope_layers"), raw.get("no_rope_layer_interval")
    if told is None and interval:
        told = [(layer + 1) % interval != 0 for layer in range(each_layer(raw))]
    return [bool(each) for each in told or ()]


def _rope(
    raw: dict[str, Any], found: dict[str, Any], head_dim: int, *, interleaved: bool
) -> RopeConfig:
    told = str(found.get("rope_type") or found.get("type") or "default")
    rope_type = "longrope" if told == "su" else told  # as in Phi-3's first checkpoints
    if rope_type not in ROPE_TYPES:
        raise unsupported(f"rope type {short_repr(rope_type)}", ", ".join(ROPE_TYPES))
    both = {**raw, **{name: value for name, value in found.items() if value}}
    partial = number(both, "partial_rotary_factor", 1.0)
    dim = int(head_dim * partial)
    if partial > 1 or dim % 2 or not dim:
        told = f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dim} elements"
        raise wrong(f"{told}, expected an even number of at most {head_dim}")
    plain = RopeConfig(dim, number(both, "rope_theta", 10000.0), interleaved=interleaved)
    # Within max_position_embeddings, beyond which nothing is served, `dynamic` stretches nothing.
    if rope_type in ("default", "dynamic"):
        return plain
    return dataclasses.replace(plain, rope_type=rope_type, **_scaling(raw, found, rope_type, dim))


def _scaling(
    raw: dict[str, Any], found: dict[str, Any], rope_type: str, dim: int
) -> dict[str, Any]:
    max_position, field = size(raw, "max_position_embeddings"), "original_max_position_embeddings"
    original = int(number({field: found.get(field) or raw.get(field)}, field, max_position))
    names = _FIELDS[rope_type]
    missing = [name for name in names if found.get(name) is None]
    if missing and rope_type in ("linear", "llama3"):
        raise wrong(f"rope type {short_repr(rope_type)} lacks {', '.join(missing)}")
    used: dict[str, Any] = {name: number(found, name, 1.0) for name in names if found.get(name)}
    used["factor"] = factor = number(found, "factor", max_position / original)
    if rope_type == "longrope":
        longest = min(raw["max_model_len"] or max_position, max_position)
        used["divisors"] = _divisors(found, dim, is_long=longest > original)
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        used.setdefault("attention_factor", scaling)
    if rope_type == "yarn":
        used["truncate"] = bool(found.get("truncate", True))
        if found.get("attn_factor"):  # as yarn's authors and servers read it, transformers does not
            used["attention_factor"] = number(found, "attn_factor", 1.0) * yarn_mscale(factor, 1.0)
    return used if rope_type == "linear" else {**used, "original_max_position": original}


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's correction of attention magnitude for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _divisors(found: dict[str, Any], dim: int, *, is_long: bool) -> tuple[float, ...]:
    """The long ones where some sequence may outgrow the original context, for sequences of any
    length: keys in the cache cannot be rotated anew when a sequence grows."""
    name = "long_factor" if is_long else "short_factor"
    divisors = tuple(number({name: each}, name, 0.0) for each in found.get(name) or ())
    if len(divisors) != dim // 2:
        raise wrong(f"{name} of rope type longrope has {len(divisors)} numbers, not {dim // 2}")
    return divisors
