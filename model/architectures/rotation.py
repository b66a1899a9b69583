"""The rotary embeddings (ropes) of a config.json.

A model has one rope for all layers, or one rope for each kind of layer. In some models,
some of the layers have no rope.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

from model.architectures.table import Architecture
from model.architectures.values import (
    config_error,
    read_number,
    read_size,
    unsupported_error,
)
from model.architectures.windows import FULL, SLIDING, layer_kinds, rotated_layers
from model.errors import ModelLoadError
from protocol.short_repr import short_repr

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Fields of rope_parameters that RopeConfig takes unchanged, by rope type.
_COPIED_FIELDS: Final = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
}
_REQUIRED_FIELDS: Final = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
NOT_ROTATED: Final = -1  # in place of a rope's index, for layers without a rope


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding. Fields that a rope type does not use keep their defaults.

    Attributes:
        dim: rotated elements of a head, an even number.
        theta: base of the frequencies.
        low_freq_factor, high_freq_factor: used by llama3.
        original_max_position: tokens of the context before it was extended; used by
            llama3, yarn and longrope.
        beta_fast, beta_slow, truncate: used by yarn.
        attention_factor: used by yarn and longrope. None: yarn derives it from the
            factor and the mscales.
        mscale, mscale_all_dim: used by yarn; 0 means absent.
        divisors: used by longrope; the divisor of each pair's frequency.
        exponent_dim: divisor of the exponents of theta; 0: the divisor is `dim`.
        interleaved: neighboring elements form a pair, as in DeepSeek and GLM-4. In all
            other models, an element of the rotated part's first half and the element at
            the same place in the second half form a pair.
    """

    dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    exponent_dim: int = 0
    interleaved: bool = False


def parse_ropes(
    raw: dict[str, Any], head_dim: int, architecture: Architecture
) -> tuple[list[RopeConfig], tuple[int, ...]]:
    """Returns a model's distinct ropes, and the index of the rope of each layer.

    The tuple of indices is empty if all layers use the first rope. A layer without a
    rope has the index NOT_ROTATED.

    Raises:
        UnsupportedModel: a rope type, or a combination of it with other fields, is not
            implemented.
        ModelLoadError: parameters are missing, contradict each other, or are in a place
            where the class does not read them.
    """
    if architecture.ropes_by_kind:
        kinds = layer_kinds(raw, architecture)
        parameters_by_kind = _parameters_by_kind(raw, architecture)
    else:
        kinds = []
        parameters_by_kind = {FULL: _shared_parameters(raw)}
    ropes: list[RopeConfig] = []
    index_by_kind: dict[str, int] = {}
    for kind in sorted(set(kinds) or {FULL}):
        rope = _parse_rope(raw, parameters_by_kind[kind], head_dim, architecture)
        if rope not in ropes:
            ropes.append(rope)
        index_by_kind[kind] = ropes.index(rope)
    indices = [index_by_kind[kind] for kind in kinds]
    rotated = rotated_layers(raw)
    if rotated:
        indices = [0 if is_rotated else NOT_ROTATED for is_rotated in rotated]
    return ropes, tuple(indices) if any(indices) else ()


def _shared_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of the rope that all layers share.

    transformers 5 writes rope_parameters into config.json. transformers 4 wrote
    rope_theta and rope_scaling.
    """
    scaling = raw.get("rope_scaling") or {}
    stored = raw.get("rope_parameters") or {}
    for name, parameters in (("rope_scaling", scaling), ("rope_parameters", stored)):
        if parameters.keys() & {FULL, SLIDING}:
            raise unsupported_error(
                f"{name} by kind of layer in this architecture",
                "one rope for all layers",
            )
    if not scaling:
        return dict(stored)
    # If rope_scaling is present, transformers ignores rope_parameters. A config in
    # which the two differ is refused.
    theta = raw["rope_theta"]
    if stored and _normalize(stored, theta) != _normalize(scaling, theta):
        raise _contradicting_ropes(scaling)
    return dict(scaling)


def _normalize(parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    """Returns parameters with the type under "rope_type", and with a rope_theta."""
    others = {
        name: value
        for name, value in parameters.items()
        if name not in ("type", "rope_type")
    }
    return {"rope_theta": theta, **others, "rope_type": _type_of(parameters)}


def _contradicting_ropes(scaling: dict[str, Any]) -> ModelLoadError:
    return config_error(
        "rope_scaling and rope_parameters contradict each other: put "
        f"{short_repr(scaling)} into rope_parameters and leave rope_scaling out"
    )


def _parameters_by_kind(
    raw: dict[str, Any], architecture: Architecture
) -> dict[str, dict[str, Any]]:
    """Returns the rope parameters of each kind of layer.

    The parameters are those that transformers uses. A config that transformers 4 and 5
    read differently is refused.
    """
    scaling = raw.get("rope_scaling") or {}
    stored = raw.get("rope_parameters") or {}
    if scaling.keys() & {FULL, SLIDING}:
        raise unsupported_error(
            "rope_scaling by kind of layer in this architecture", "rope_parameters"
        )
    if stored and not stored.keys() & {FULL, SLIDING}:
        raise config_error(
            f"rope_parameters is {short_repr(stored)}; in this architecture "
            f"rope_parameters has an object for each of {FULL} and {SLIDING}: "
            "put these fields into each of the two objects"
        )
    full = dict(stored.get(FULL) or {})
    sliding = dict(stored.get(SLIDING) or {})
    if stored and not scaling.items() <= full.items():
        raise _contradicting_ropes(scaling)
    has_rope_type = bool(stored) or "rope_type" in scaling
    if not has_rope_type and scaling.get("type", "default") != "default":
        # transformers 4 reads `type`. transformers 5 ignores `type` and uses the
        # default rope.
        raise config_error(
            f"rope_scaling has the type {short_repr(scaling['type'])} and no "
            "rope_type: write it as rope_type in this architecture"
        )
    full = {"rope_theta": raw["rope_theta"], **full, **scaling}
    if "rope_local_base_freq" in architecture.defaults:
        sliding_theta = raw["rope_local_base_freq"]
        return {FULL: full, SLIDING: {"rope_theta": sliding_theta, **sliding}}
    # Olmo 3: for sliding layers, transformers 5 uses the class's default rope_theta,
    # and transformers 4 uses the config's rope_theta.
    default_theta = architecture.defaults["rope_theta"]
    if raw["rope_theta"] != default_theta and "rope_theta" not in sliding:
        raise config_error(
            f"rope_theta is {short_repr(raw['rope_theta'])}, which does not say "
            f"whether layers of {SLIDING} have it: give rope_parameters with a "
            f"rope_theta for {FULL} and {SLIDING}"
        )
    return {FULL: full, SLIDING: {"rope_theta": default_theta, **sliding}}


def _type_of(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _parse_rope(
    raw: dict[str, Any],
    parameters: dict[str, Any],
    head_dim: int,
    architecture: Architecture,
) -> RopeConfig:
    """Reads one rope.

    Args:
        raw: the keys of config.json, with defaults.
        parameters: the parameters of this rope, which take precedence over `raw`.
        head_dim: elements of a head, or of its rotated part for MLA.
    """
    aliases = architecture.rope_aliases or {name: name for name in ROPE_TYPES}
    written_type = _type_of(parameters)
    if written_type not in aliases:
        raise unsupported_error(
            f"rope type {short_repr(written_type)}", ", ".join(aliases)
        )
    rope_type = aliases[written_type]
    given = {name: value for name, value in parameters.items() if value is not None}
    merged = {**raw, **given}
    dim, exponent_dim = _rotated_elements(merged, rope_type, head_dim, architecture)
    unscaled = RopeConfig(
        dim=dim,
        theta=read_number(merged, "rope_theta", architecture.defaults["rope_theta"]),
        exponent_dim=exponent_dim,
        interleaved=architecture.interleaved and bool(raw.get("rope_interleave", True)),
    )
    is_mla_scaled = architecture.mla and given.get("mscale_all_dim")
    if is_mla_scaled and rope_type not in ("default", "yarn"):
        raise unsupported_error(
            f"mscale_all_dim of rope type {short_repr(rope_type)} in this architecture",
            "mscale_all_dim of rope type yarn",
        )
    if rope_type == "dynamic":
        _require_fields(given, rope_type, ("factor",))
    # The type `dynamic` changes nothing for sequences of up to max_position_embeddings
    # tokens, and Baton does not serve longer sequences.
    if rope_type in ("default", "dynamic"):
        return unscaled
    scaling_fields = _scaling_fields(raw, given, rope_type, dim, architecture)
    return dataclasses.replace(unscaled, rope_type=rope_type, **scaling_fields)


def _rotated_elements(
    merged: dict[str, Any], rope_type: str, head_dim: int, architecture: Architecture
) -> tuple[int, int]:
    """Returns the number of rotated elements of a head, and the divisor of exponents.

    If partial_rotary_factor gives an odd number of elements, one more element is
    rotated, but the exponents are divided by the odd number.
    """
    partial = read_number(merged, "partial_rotary_factor", 1.0)
    if not architecture.rotates_part and rope_type == "default":
        partial = 1.0  # the class does not read the field
    dim = int(head_dim * partial)
    if dim != head_dim and not architecture.rotates_part:
        raise unsupported_error(
            f"partial_rotary_factor {partial:g} of rope type {short_repr(rope_type)} "
            "in this architecture",
            "1",
        )
    needs_even = rope_type in ("yarn", "longrope")
    if not 0 < dim <= head_dim or (dim % 2 and needs_even):
        kind = "an even number" if needs_even else "a number"
        raise config_error(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dim} "
            f"elements, expected {kind} of at least 1 and at most {head_dim}"
        )
    return dim + dim % 2, dim


def _require_fields(
    given: dict[str, Any], rope_type: str, names: tuple[str, ...]
) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise config_error(
            f"rope type {short_repr(rope_type)} lacks {', '.join(missing)}"
        )


def _scaling_fields(
    raw: dict[str, Any],
    given: dict[str, Any],
    rope_type: str,
    dim: int,
    architecture: Architecture,
) -> dict[str, Any]:
    """Returns the fields of RopeConfig that scale this rope.

    Args:
        raw: the keys of config.json, with defaults.
        given: the parameters of this rope that are not null.
        dim: rotated elements of a head, before rounding up to an even number.
    """
    max_position = read_size(raw, "max_position_embeddings")
    original = _original_context(raw, given, rope_type, architecture)
    _require_fields(given, rope_type, _REQUIRED_FIELDS.get(rope_type, ()))
    fields: dict[str, Any] = {
        name: read_number(given, name, 1.0)
        for name in _COPIED_FIELDS[rope_type]
        if given.get(name) is not None
    }
    factor = read_number(given, "factor", max_position / original)
    fields["factor"] = factor
    if rope_type == "linear":
        return fields
    fields["original_max_position"] = original
    if rope_type == "llama3":
        _check_frequency_factors(fields)
    if rope_type == "longrope":
        max_length = min(raw["max_model_len"] or max_position, max_position)
        fields["divisors"] = _divisors(given, dim, is_long=max_length > original)
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
        fields.setdefault("attention_factor", attention_factor)
    if rope_type == "yarn":
        fields |= _yarn_fields(given, factor, architecture)
    return fields


def _check_frequency_factors(fields: dict[str, Any]) -> None:
    low = fields["low_freq_factor"]
    high = fields["high_freq_factor"]
    if high <= low:
        raise config_error(
            f"high_freq_factor of rope type llama3 is {high:g}, expected a number "
            f"above low_freq_factor {low:g}"
        )


def _yarn_fields(
    given: dict[str, Any], factor: float, architecture: Architecture
) -> dict[str, Any]:
    fields: dict[str, Any] = {"truncate": bool(given.get("truncate", True))}
    if architecture.ropes_by_kind and not fields["truncate"]:
        # transformers reads `truncate` from the top level of rope_parameters. With one
        # object per kind of layer, the top level has no such key, so transformers
        # always uses true.
        raise unsupported_error(
            "truncate false of rope type yarn in this architecture", "truncate true"
        )
    # transformers ignores attn_factor. Baton applies it, like other servers and the
    # code of yarn's authors.
    if given.get("attn_factor"):
        attn_factor = read_number(given, "attn_factor", 1.0)
        fields["attention_factor"] = attn_factor * yarn_mscale(factor, 1.0)
    return fields


def _original_context(
    raw: dict[str, Any],
    given: dict[str, Any],
    rope_type: str,
    architecture: Architecture,
) -> int:
    """Returns original_max_position_embeddings, the context before scaling, in tokens.

    The field may be inside or outside of the rope's parameters. For a rope that all
    layers share, the outer field takes precedence. For ropes by kind of layer,
    transformers 4 reads the outer field and transformers 5 does not. So an outer field
    is refused if it would change the result.
    """
    field = "original_max_position_embeddings"
    max_position = read_size(raw, "max_position_embeddings")
    inner = given.get(field)
    outer = raw.get(field)
    if not architecture.ropes_by_kind:
        original = inner if outer is None else outer
        return int(read_number({field: original}, field, max_position))
    if outer not in (None, max_position) and inner is None and rope_type != "linear":
        raise config_error(
            f"{field} is {short_repr(outer)} outside of rope_parameters, where this "
            f"architecture does not read it: put it next to the rope_type "
            f"{short_repr(rope_type)}"
        )
    return int(read_number({field: inner}, field, max_position))


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns yarn's attention factor for a context that is extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _divisors(given: dict[str, Any], dim: int, *, is_long: bool) -> tuple[float, ...]:
    """Returns the long or the short factors of longrope, one for each pair.

    If any sequence may outgrow the original context (`is_long`), all sequences use the
    long factors. Keys in the cache cannot be rotated again when a sequence grows.
    """
    for name in ("short_factor", "long_factor"):
        num_factors = len(given.get(name) or ())
        if num_factors != dim // 2:
            raise config_error(
                f"{name} of rope type longrope has {num_factors} numbers, not "
                f"{dim // 2}"
            )
    name = "long_factor" if is_long else "short_factor"
    return tuple(read_number({name: factor}, name, 0.0) for factor in given[name])
