"""Rotary embeddings as config.json describes them: one for all layers, or several, or none."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

from model.architectures.table import Architecture
from model.architectures.values import number, size, unsupported, wrong
from model.architectures.windows import FULL, SLIDING, layer_kinds, rotated_layers
from model.errors import ModelLoadError
from protocol.short_repr import short_repr

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Of these types: fields of rope_parameters that RopeConfig takes as they are.
_FIELDS: Final = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
_REQUIRED: Final = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
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
    attention_factor: float | None = (
        None  # yarn: None derives it from factor and the mscales
    )
    mscale: float = 0.0  # yarn: 0 means absent
    mscale_all_dim: float = 0.0  # yarn: 0 means absent
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # longrope: of the frequency of each pair
    exponent_dim: int = 0  # what exponents of theta are divided by; 0: dim
    interleaved: bool = (
        False  # DeepSeek and GLM-4 rotate neighbours, the others rotate halves
    )


def parse_ropes(
    raw: dict[str, Any], head_dim: int, declared: Architecture
) -> tuple[list[RopeConfig], tuple[int, ...]]:
    """Returns a model's distinct ropes, and the index of each layer's; () where all use the first.

    Raises:
        UnsupportedModel: a rope type, or a use of one, that is not implemented.
        ModelLoadError: parameters are missing, contradict each other, or stand where the class
            does not read them.
    """
    kinds = layer_kinds(raw, declared) if declared.ropes_by_kind else []
    if declared.ropes_by_kind:
        of_kinds = _ropes_by_kind(raw, declared)
    else:
        of_kinds = {FULL: _only_rope(raw)}
    ropes: list[RopeConfig] = []
    of_layer: dict[str, int] = {}
    for kind in sorted(set(kinds) or {FULL}):
        rope = _rope(raw, of_kinds[kind], head_dim, declared)
        if rope not in ropes:
            ropes.append(rope)
        of_layer[kind] = ropes.index(rope)
    layers = [of_layer[kind] for kind in kinds]
    if rotated := rotated_layers(raw):
        layers = [0 if is_rotated else NOT_ROTATED for is_rotated in rotated]
    return ropes, tuple(layers) if any(layers) else ()


def _only_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a rope that all layers share, as transformers chooses them.

    transformers 5 stores rope_parameters. Before, rope_theta and rope_scaling lay side by side.
    """
    scaling = raw.get("rope_scaling") or {}
    stored = raw.get("rope_parameters") or {}
    for name, found in (("rope_scaling", scaling), ("rope_parameters", stored)):
        if found.keys() & {FULL, SLIDING}:
            raise unsupported(
                f"{name} by kind of layer in this architecture",
                "one rope for all layers",
            )
    if not scaling:
        return dict(stored)
    # transformers reads rope_scaling alone where both are there. What it would ignore is refused.
    theta = raw["rope_theta"]
    if stored and _comparable(stored, theta) != _comparable(scaling, theta):
        raise _says_otherwise(scaling)
    return dict(scaling)


def _comparable(found: dict[str, Any], theta: float) -> dict[str, Any]:
    """Returns rope parameters with one spelling of the type, and with a rope_theta."""
    rest = {
        name: value
        for name, value in found.items()
        if name not in ("type", "rope_type")
    }
    return {"rope_theta": theta, **rest, "rope_type": _type_of(found)}


def _says_otherwise(scaling: dict[str, Any]) -> ModelLoadError:
    return wrong(
        "rope_scaling stands beside rope_parameters that say otherwise: put "
        f"{short_repr(scaling)} into rope_parameters and leave rope_scaling out"
    )


def _ropes_by_kind(
    raw: dict[str, Any], declared: Architecture
) -> dict[str, dict[str, Any]]:
    """Returns the parameters of each kind of layer's rope, as transformers chooses them."""
    scaling = raw.get("rope_scaling") or {}
    stored = raw.get("rope_parameters") or {}
    if scaling.keys() & {FULL, SLIDING}:
        raise unsupported(
            "rope_scaling by kind of layer in this architecture", "rope_parameters"
        )
    if stored and not stored.keys() & {FULL, SLIDING}:
        raise wrong(
            f"rope_parameters is {short_repr(stored)}; in this architecture rope_parameters has an "
            f"object for each of {FULL} and {SLIDING}: put it into them"
        )
    full = dict(stored.get(FULL) or {})
    sliding = dict(stored.get(SLIDING) or {})
    if stored and not scaling.items() <= full.items():
        raise _says_otherwise(scaling)
    if (
        not stored
        and "rope_type" not in scaling
        and scaling.get("type", "default") != "default"
    ):
        # transformers 4 reads type, and transformers 5 takes the default rope.
        raise wrong(
            f"rope_scaling has the type {short_repr(scaling['type'])} and no rope_type: write it "
            "as rope_type in this architecture"
        )
    full = {"rope_theta": raw["rope_theta"], **full, **scaling}
    if "rope_local_base_freq" in declared.defaults:
        return {
            FULL: full,
            SLIDING: {"rope_theta": raw["rope_local_base_freq"], **sliding},
        }
    # Olmo 3: transformers 5 takes the default here, transformers 4 the rope_theta of all layers.
    default = declared.defaults["rope_theta"]
    if raw["rope_theta"] != default and "rope_theta" not in sliding:
        raise wrong(
            f"rope_theta is {short_repr(raw['rope_theta'])}, which does not say whether layers of "
            f"{SLIDING} have it: give rope_parameters with a rope_theta for {FULL} and {SLIDING}"
        )
    return {FULL: full, SLIDING: {"rope_theta": default, **sliding}}


def _type_of(found: dict[str, Any]) -> str:
    return str(found.get("rope_type") or found.get("type") or "default")


def _rope(
    raw: dict[str, Any], found: dict[str, Any], head_dim: int, declared: Architecture
) -> RopeConfig:
    """`found`: the parameters of this rope, which count before those of all of the model."""
    aliases = declared.rope_aliases or {name: name for name in ROPE_TYPES}
    if (written := _type_of(found)) not in aliases:
        raise unsupported(f"rope type {short_repr(written)}", ", ".join(aliases))
    rope_type = aliases[written]
    given = {name: value for name, value in found.items() if value is not None}
    both = {**raw, **given}
    rotated, exponent_dim = _rotated_elements(both, rope_type, head_dim, declared)
    is_interleaved = declared.interleaved and bool(raw.get("rope_interleave", True))
    theta = number(both, "rope_theta", declared.defaults["rope_theta"])
    plain = RopeConfig(
        rotated, theta, exponent_dim=exponent_dim, interleaved=is_interleaved
    )
    if (
        declared.mla
        and given.get("mscale_all_dim")
        and rope_type not in ("default", "yarn")
    ):
        raise unsupported(
            f"mscale_all_dim of rope type {short_repr(rope_type)} in this architecture",
            "yarn's",
        )
    if rope_type == "dynamic":
        _check_given(given, rope_type, ("factor",))
    # Within max_position_embeddings, beyond which nothing is served, `dynamic` stretches nothing.
    if rope_type in ("default", "dynamic"):
        return plain
    return dataclasses.replace(
        plain, rope_type=rope_type, **_scaling(raw, given, rope_type, rotated, declared)
    )


def _rotated_elements(
    both: dict[str, Any], rope_type: str, head_dim: int, declared: Architecture
) -> tuple[int, int]:
    """Returns how many elements of a head are rotated, and by what their exponents are divided.

    An odd part of a head is rotated with the element behind it, in steps of the odd part.
    """
    partial = number(both, "partial_rotary_factor", 1.0)
    if not declared.rotates_part and rope_type == "default":
        partial = 1.0  # the class does not read it
    dim = int(head_dim * partial)
    if dim != head_dim and not declared.rotates_part:
        raise unsupported(
            f"partial_rotary_factor {partial:g} of rope type {short_repr(rope_type)} in this "
            "architecture",
            "1",
        )
    needs_even = rope_type in ("yarn", "longrope")
    if not 0 < dim <= head_dim or (dim % 2 and needs_even):
        kind = "an even number" if needs_even else "a number"
        raise wrong(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dim} elements, "
            f"expected {kind} of at least 1 and at most {head_dim}"
        )
    return dim + dim % 2, dim


def _check_given(given: dict[str, Any], rope_type: str, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if name not in given]:
        raise wrong(f"rope type {short_repr(rope_type)} lacks {', '.join(missing)}")


def _scaling(
    raw: dict[str, Any],
    given: dict[str, Any],
    rope_type: str,
    dim: int,
    declared: Architecture,
) -> dict[str, Any]:
    """Returns the fields of RopeConfig that this rope type has besides those of all."""
    max_position = size(raw, "max_position_embeddings")
    original = _original_context(raw, given, rope_type, declared)
    _check_given(given, rope_type, _REQUIRED.get(rope_type, ()))
    used: dict[str, Any] = {
        name: number(given, name, 1.0)
        for name in _FIELDS[rope_type]
        if given.get(name) is not None
    }
    used["factor"] = factor = number(given, "factor", max_position / original)
    if rope_type == "llama3" and used["high_freq_factor"] <= used["low_freq_factor"]:
        raise wrong(
            f"high_freq_factor of rope type llama3 is {used['high_freq_factor']:g}, expected a "
            f"number above low_freq_factor {used['low_freq_factor']:g}"
        )
    if rope_type == "longrope":
        longest = min(raw["max_model_len"] or max_position, max_position)
        used["divisors"] = _divisors(given, dim, is_long=longest > original)
        scaling = (
            math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
        used.setdefault("attention_factor", scaling)
    if rope_type == "yarn":
        used |= _yarn_switches(given, factor, declared)
    return (
        used if rope_type == "linear" else {**used, "original_max_position": original}
    )


def _yarn_switches(
    given: dict[str, Any], factor: float, declared: Architecture
) -> dict[str, Any]:
    used: dict[str, Any] = {"truncate": bool(given.get("truncate", True))}
    if declared.ropes_by_kind and not used["truncate"]:
        # transformers looks for it beside the kinds of layers, and so reads true here.
        raise unsupported(
            "truncate false of rope type yarn in this architecture", "truncate true"
        )
    if given.get(
        "attn_factor"
    ):  # as yarn's authors and servers read it, transformers does not
        used["attention_factor"] = number(given, "attn_factor", 1.0) * yarn_mscale(
            factor, 1.0
        )
    return used


def _original_context(
    raw: dict[str, Any], given: dict[str, Any], rope_type: str, declared: Architecture
) -> int:
    """Returns the tokens of the context that a scaled rope was trained with.

    Of ropes that all layers share, what stands outside of their parameters counts first. Of ropes
    by kind of layer, transformers 4 reads that and transformers 5 does not.
    """
    field = "original_max_position_embeddings"
    max_position = size(raw, "max_position_embeddings")
    inner, outer = given.get(field), raw.get(field)
    if not declared.ropes_by_kind:
        return int(
            number({field: inner if outer is None else outer}, field, max_position)
        )
    if outer not in (None, max_position) and inner is None and rope_type != "linear":
        raise wrong(
            f"{field} is {short_repr(outer)} outside of rope_parameters, where this architecture "
            f"does not read it: put it beside the rope_type {short_repr(rope_type)}"
        )
    return int(number({field: inner}, field, max_position))


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's correction of attention magnitude for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _divisors(given: dict[str, Any], dim: int, *, is_long: bool) -> tuple[float, ...]:
    """Returns the long ones where some sequence may outgrow the original context, for sequences of
    any length: keys in the cache cannot be rotated anew when a sequence grows."""
    for name in ("short_factor", "long_factor"):
        if (found := len(given.get(name) or ())) != dim // 2:
            raise wrong(
                f"{name} of rope type longrope has {found} numbers, not {dim // 2}"
            )
    name = "long_factor" if is_long else "short_factor"
    return tuple(number({name: each}, name, 0.0) for each in given[name])
