"""Writes exact regular expressions for ranges of numbers, as Python's JSON has them.

The grammar library keeps numbers as float64 and int64. Integers beyond 2**53 and
decimals of more than 17 digits change there, so Baton writes their ranges digit by
digit. The expressions have no anchors and no groups with a meaning.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

Number = int | Decimal

# The library's ranges are exact below this: float64 holds every such integer.
EXACT_BELOW = 2**53
# Of one number, written without an exponent. The largest float64 has 309, the smallest
# 324.
MAX_DIGITS = 400

# The library keeps a `multipleOf` as uint32 * 10**-k.
_MAX_LIBRARY_COEFFICIENT = 2**32
_ANY_FRACTION = r"(\.[0-9]+)?"
_NOT_ZERO = "[0-9]*[1-9][0-9]*"


class Bound(NamedTuple):
    """One end of a range of numbers."""

    value: Number
    is_exclusive: bool = False


def num_digits(number: Number) -> int:
    """Return how many digits `number` has when it is written without an exponent."""
    _, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)
    return max(len(digits) + exponent, 1) + max(-exponent, 0)


def scaled(number: Number) -> tuple[int, int]:
    """Return the coefficient and the exponent of ten of a number above 0.

    The coefficient does not end with 0. Decimal.normalize would round to 28 digits.
    """
    _, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    stripped = text.rstrip("0")
    return int(stripped or "0"), exponent + len(text) - len(stripped)


def negated(bound: Bound) -> Bound:
    """Return the opposite bound. A minus sign would round a Decimal to 28 digits."""
    value = bound.value
    opposite = value.copy_negate() if isinstance(value, Decimal) else -value
    return Bound(opposite, bound.is_exclusive)


def library_keeps(number: Number) -> bool:
    """Whether the library changes neither `number` nor its neighbours in a range."""
    if not -EXACT_BELOW < number < EXACT_BELOW:
        return False
    return isinstance(number, int) or Decimal(repr(float(number))) == number


def library_multiple(multiple: Number) -> float | int | None:
    """Return the number that the library reads as exactly `multiple`, which is above 0.

    Returns None where there is no such number. The library multiplies a float64 by 10
    until it is an integer, so that the float64 next to 0.07 becomes 7000000000000001.
    This function starts from the integer, and finds a float64 that becomes 7.
    """
    coefficient, exponent = scaled(multiple)
    if exponent > 0:
        coefficient *= 10 ** min(exponent, 10)
        exponent = 0
    if coefficient >= _MAX_LIBRARY_COEFFICIENT or exponent < -300:
        return None
    if exponent == 0:
        return coefficient
    candidates = [float(coefficient)]
    for _ in range(-exponent):
        candidates = [before for value in candidates for before in _tenths(value)][:16]
    return min(candidates, default=None)


def _tenths(value: float) -> list[float]:
    """Return the non-integers that give `value` when they are multiplied by 10."""
    near = value / 10
    around = (near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return [number for number in around if number * 10 == value and number % 1]


def power_of_ten(multiple: Number) -> int | None:
    """Return k where `multiple` is 10**k, else None."""
    coefficient, exponent = scaled(multiple)
    return exponent if coefficient == 1 else None


def multiple_pattern(exponent: int) -> str:
    """Return a pattern for all multiples of 10**`exponent`."""
    if exponent > 0:
        return rf"-?(0|[1-9][0-9]*0{{{exponent}}})(\.0+)?"
    if exponent == 0:
        return r"-?[0-9]+(\.0+)?"
    return rf"-?[0-9]+(\.[0-9]{{1,{-exponent}}}0*)?"


def has_multiple(multiple: Number, lower: Bound | None, upper: Bound | None) -> bool:
    """Whether a multiple of a number above 0 is between two bounds."""
    if lower is None or upper is None:
        return True
    step = Fraction(multiple)
    start = Fraction(lower.value) / step
    first = math.ceil(start)
    if lower.is_exclusive and first == start:
        first += 1
    return first * step < upper.value or (
        first * step == upper.value and not upper.is_exclusive
    )


def integer_pattern(lower: Bound | None, upper: Bound | None) -> str | None:
    """Return a pattern for the integers between two bounds; None without any."""
    minimum = None if lower is None else _first_integer(lower)
    maximum = None if upper is None else -_first_integer(negated(upper))
    if minimum is not None and maximum is not None and minimum > maximum:
        return None
    parts = []
    if minimum is None or minimum < 0:
        smallest = 1 if maximum is None else max(1, -maximum)
        largest = None if minimum is None else -minimum
        parts += [f"-{_either(_natural_numbers(smallest, largest))}"]
    if maximum is None or maximum >= 0:
        parts += _natural_numbers(max(0, minimum or 0), maximum)
    return _either(parts)


def decimal_pattern(lower: Bound | None, upper: Bound | None) -> str | None:
    """Return a pattern for the numbers between two bounds; None without any."""
    parts = []
    zero = Bound(0)
    above_zero = Bound(0, is_exclusive=True)
    if lower is None or lower.value < 0:
        smallest = above_zero
        if upper is not None and upper.value < 0:
            smallest = negated(upper)
        largest = None if lower is None else negated(lower)
        negative = list(_magnitudes(smallest, largest))
        if negative:
            parts.append(f"-{_either(negative)}")
    if upper is None or upper.value >= 0:
        smallest = lower if lower is not None and lower.value >= 0 else zero
        parts += _magnitudes(smallest, upper)
    return _either(parts) if parts else None


def _first_integer(lower: Bound) -> int:
    """Return the smallest integer that a lower bound allows."""
    first = math.ceil(lower.value)
    return first + 1 if lower.is_exclusive and first == lower.value else first


def _either(parts: list[str]) -> str:
    return f"({'|'.join(parts)})"


def _some_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _one_digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _natural_numbers(minimum: int, maximum: int | None) -> list[str]:
    """Return the alternatives for the integers from `minimum` (>= 0) to `maximum`."""
    low = str(minimum)
    if maximum is None:
        longer = f"[1-9][0-9]{{{len(low)},}}"
        return [*_same_length(low, "9" * len(low)), longer]
    high = str(maximum)
    if len(low) == len(high):
        return list(_same_length(low, high))
    parts = list(_same_length(low, "9" * len(low)))
    if len(high) - len(low) > 1:
        parts.append(f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}")
    return [*parts, *_same_length("1" + "0" * (len(high) - 1), high)]


def _same_length(low: str, high: str) -> Iterator[str]:
    """Yield patterns for the digit strings from `low` to `high`, of equal length."""
    if low == high:
        yield low
        return
    at = next(at for at in range(len(low)) if low[at] != high[at])
    shared = low[:at]
    num_rest = len(low) - at - 1
    first = int(low[at])
    last = int(high[at])
    if low[at + 1 :].strip("0"):
        yield from _at_least(low[: at + 1], low[at + 1 :])
        first += 1
    if high[at + 1 :].strip("9"):
        yield from _at_most(high[: at + 1], high[at + 1 :])
        last -= 1
    if first <= last:
        yield shared + _one_digit(first, last) + _some_digits(num_rest)


def _at_least(prefix: str, low: str) -> Iterator[str]:
    """Yield patterns for `prefix` and as many digits as `low` has, at least `low`."""
    for at, digit in enumerate(low):
        if not low[at:].strip("0"):
            yield prefix + low[:at] + _some_digits(len(low) - at)
            return
        if digit != "9":
            larger = _one_digit(int(digit) + 1, 9)
            yield prefix + low[:at] + larger + _some_digits(len(low) - at - 1)
    yield prefix + low


def _at_most(prefix: str, high: str) -> Iterator[str]:
    """Yield patterns for `prefix` and as many digits as `high` has, at most `high`."""
    for at, digit in enumerate(high):
        if not high[at:].strip("9"):
            yield prefix + high[:at] + _some_digits(len(high) - at)
            return
        if digit != "0":
            smaller = _one_digit(0, int(digit) - 1)
            yield prefix + high[:at] + smaller + _some_digits(len(high) - at - 1)
    yield prefix + high


def _split(number: Number) -> tuple[int, str]:
    """Return the integer part of a number >= 0, and its fraction without last zeros."""
    whole, _, fraction = format(Decimal(number), "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _magnitudes(lower: Bound, upper: Bound | None) -> Iterator[str]:
    """Yield the alternatives for the numbers between two bounds that are >= 0."""
    whole, fraction = _split(lower.value)
    if upper is None:
        yield from _with_fractions(whole, _above("", fraction, lower), lower, None)
        yield _either(_natural_numbers(whole + 1, None)) + _ANY_FRACTION
        return
    last, last_fraction = _split(upper.value)
    if whole > last:
        return
    if whole == last:
        yield from _with_fractions(whole, _between(lower, upper), lower, upper)
        return
    yield from _with_fractions(whole, _above("", fraction, lower), lower, upper)
    if last - whole > 1:
        yield _either(_natural_numbers(whole + 1, last - 1)) + _ANY_FRACTION
    yield from _with_fractions(last, _below("", last_fraction, upper), lower, upper)


def _with_fractions(
    whole: int, fractions: Iterator[str], lower: Bound, upper: Bound | None
) -> Iterator[str]:
    """Yield an integer part with these fractions, and alone if it is in the range."""
    if parts := list(fractions):
        yield rf"{whole}\.{_either(parts)}"
    is_above = whole > lower.value or (whole == lower.value and not lower.is_exclusive)
    is_below = upper is None or whole < upper.value
    is_below = is_below or (
        upper is not None and whole == upper.value and not upper.is_exclusive
    )
    if is_above and is_below:
        yield str(whole)


def _above(prefix: str, low: str, lower: Bound) -> Iterator[str]:
    """Yield the fractions of `prefix` and digits from `low` on; no zero ends `low`."""
    for at, digit in enumerate(low):
        if digit != "9":
            yield prefix + low[:at] + _one_digit(int(digit) + 1, 9) + "[0-9]*"
    exact = prefix + low
    if lower.is_exclusive:
        yield exact + _NOT_ZERO
    else:
        yield exact + ("[0-9]*" if exact else "[0-9]+")


def _below(prefix: str, high: str, upper: Bound) -> Iterator[str]:
    """Yield the fractions of `prefix` and digits up to `high`; no zero ends `high`."""
    for at, digit in enumerate(high):
        if prefix + high[:at]:
            yield prefix + high[:at]
        if digit != "0":
            yield prefix + high[:at] + _one_digit(0, int(digit) - 1) + "[0-9]*"
    if not upper.is_exclusive:
        exact = prefix + high
        yield exact + ("0*" if exact else "0+")


def _between(lower: Bound, upper: Bound) -> Iterator[str]:
    """Yield the fractions of numbers between two bounds with the same integer part."""
    low = _split(lower.value)[1]
    high = _split(upper.value)[1]
    length = max(len(low), len(high))
    low = low.ljust(length, "0")
    high = high.ljust(length, "0")
    at = next((at for at in range(length) if low[at] != high[at]), length)
    if low > high or (at == length and (lower.is_exclusive or upper.is_exclusive)):
        return
    if not low[at:].strip("0") and not lower.is_exclusive:
        shortest = low.rstrip("0")
        yield shortest + ("0*" if shortest else "0+")
    if at == length:
        return
    shared = low[:at]
    first = int(low[at])
    last = int(high[at])
    yield from _above(low[: at + 1], low[at + 1 :].rstrip("0"), lower)
    if last - first > 1:
        yield shared + _one_digit(first + 1, last - 1) + "[0-9]*"
    yield from _below(high[: at + 1], high[at + 1 :].rstrip("0"), upper)
