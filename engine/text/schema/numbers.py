"""Writes regular expressions for numbers between exact bounds, without exponents.

The library llguidance stores numbers as float64 and int64. It would round integers
beyond 2**53 and decimals of more than 17 digits. So this module writes patterns for
ranges with such bounds digit by digit. The patterns have no anchors, and groups only
for precedence.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

Number = int | Decimal

# llguidance's ranges are exact below this number, because float64 represents every
# integer below it.
EXACT_BELOW = 2**53
# Maximum number of digits of a number that is written without an exponent. For
# comparison, the largest float64 has 309 digits, and the smallest float64 above 0 needs
# 324 decimal places.
MAX_DIGITS = 400

# llguidance stores a `multipleOf` as uint32 * 10**-k.
_MAX_LLGUIDANCE_COEFFICIENT = 2**32
_ANY_FRACTION = r"(\.[0-9]+)?"
_NOT_ZERO = "[0-9]*[1-9][0-9]*"  # digits that are not all zero


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
    """Return c and k such that `number` is c * 10**k and c does not end with 0.

    The number must be above 0. Unlike Decimal.normalize, this function does not round
    to 28 digits.
    """
    _, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    stripped = text.rstrip("0")
    return int(stripped or "0"), exponent + len(text) - len(stripped)


def negated(bound: Bound) -> Bound:
    """Return the bound with the opposite sign.

    The unary minus is not used for Decimal, because it would round to 28 digits.
    """
    value = bound.value
    opposite = value.copy_negate() if isinstance(value, Decimal) else -value
    return Bound(opposite, bound.is_exclusive)


def is_exact_in_llguidance(number: Number) -> bool:
    """Whether llguidance represents `number` exactly, also as the bound of a range."""
    if not -EXACT_BELOW < number < EXACT_BELOW:
        return False
    return isinstance(number, int) or Decimal(repr(float(number))) == number


def llguidance_multiple(multiple: Number) -> float | int | None:
    """Return a number that llguidance reads as exactly `multiple`, which is above 0.

    llguidance multiplies a float64 by 10 until the result is an integer. With this
    method, the float64 that is nearest to 0.07 becomes 7000000000000001. So for 0.07,
    this function starts from the integer 7, and searches for a float64 that becomes 7.

    Returns:
        None if there is no such number.
    """
    coefficient, exponent = scaled(multiple)
    if exponent > 0:
        coefficient *= 10 ** min(exponent, 10)
        exponent = 0
    if coefficient >= _MAX_LLGUIDANCE_COEFFICIENT or exponent < -300:
        return None
    if exponent == 0:
        return coefficient
    candidates = [float(coefficient)]
    for _ in range(-exponent):
        candidates = [tenth for value in candidates for tenth in _tenths(value)][:16]
    return min(candidates, default=None)


def _tenths(value: float) -> list[float]:
    """Return the float64 non-integers that become `value` if multiplied by 10."""
    nearest = value / 10
    neighbours = (
        nearest,
        math.nextafter(nearest, 0),
        math.nextafter(nearest, math.inf),
    )
    return [number for number in neighbours if number * 10 == value and number % 1]


def power_of_ten(multiple: Number) -> int | None:
    """Return k if `multiple` is 10**k, else None."""
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
    """Whether a multiple of the number `multiple` (above 0) lies between two bounds.

    A bound of None means that the range has no end.
    """
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
    """Return a pattern for the integers between two bounds; None if there are none.

    A bound of None means that the range has no end.
    """
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
    """Return a pattern for the numbers between two bounds; None if there are none.

    A bound of None means that the range has no end.
    """
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
    """Return patterns for the integers from `minimum` (>= 0) to `maximum`.

    Args:
        maximum: the largest integer; None: the range has no end.
    """
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
    """Yield patterns for all digit strings from `low` to `high` of the same length."""
    if low == high:
        yield low
        return
    # `split` is the position of the first digit that differs.
    split = next(index for index in range(len(low)) if low[index] != high[index])
    shared = low[:split]
    num_rest = len(low) - split - 1
    first = int(low[split])
    last = int(high[split])
    if low[split + 1 :].strip("0"):
        yield from _digits_from(low[: split + 1], low[split + 1 :])
        first += 1
    if high[split + 1 :].strip("9"):
        yield from _digits_up_to(high[: split + 1], high[split + 1 :])
        last -= 1
    if first <= last:
        yield shared + _one_digit(first, last) + _some_digits(num_rest)


def _digits_from(prefix: str, low: str) -> Iterator[str]:
    """Yield patterns for `prefix` followed by digit strings from `low` to "99...9".

    All digit strings have the length of `low`.
    """
    for index, digit in enumerate(low):
        if not low[index:].strip("0"):
            yield prefix + low[:index] + _some_digits(len(low) - index)
            return
        if digit != "9":
            larger = _one_digit(int(digit) + 1, 9)
            yield prefix + low[:index] + larger + _some_digits(len(low) - index - 1)
    yield prefix + low


def _digits_up_to(prefix: str, high: str) -> Iterator[str]:
    """Yield patterns for `prefix` followed by digit strings from "00...0" to `high`.

    All digit strings have the length of `high`.
    """
    for index, digit in enumerate(high):
        if not high[index:].strip("9"):
            yield prefix + high[:index] + _some_digits(len(high) - index)
            return
        if digit != "0":
            smaller = _one_digit(0, int(digit) - 1)
            yield prefix + high[:index] + smaller + _some_digits(len(high) - index - 1)
    yield prefix + high


def _whole_and_fraction(number: Number) -> tuple[int, str]:
    """Return the integer part of a number >= 0, and the digits of its fraction.

    Zeros at the end of the fraction are left out.
    """
    whole, _, fraction = format(Decimal(number), "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _magnitudes(lower: Bound, upper: Bound | None) -> Iterator[str]:
    """Yield patterns for the numbers between two bounds, which are both >= 0.

    An upper bound of None means that the range has no end.
    """
    whole, fraction = _whole_and_fraction(lower.value)
    if upper is None:
        yield from _with_fractions(whole, _above("", fraction, lower), lower, None)
        yield _either(_natural_numbers(whole + 1, None)) + _ANY_FRACTION
        return
    upper_whole, upper_fraction = _whole_and_fraction(upper.value)
    if whole > upper_whole:
        return
    if whole == upper_whole:
        yield from _with_fractions(whole, _between(lower, upper), lower, upper)
        return
    yield from _with_fractions(whole, _above("", fraction, lower), lower, upper)
    if upper_whole - whole > 1:
        yield _either(_natural_numbers(whole + 1, upper_whole - 1)) + _ANY_FRACTION
    below_upper = _below("", upper_fraction, upper)
    yield from _with_fractions(upper_whole, below_upper, lower, upper)


def _with_fractions(
    whole: int, fractions: Iterator[str], lower: Bound, upper: Bound | None
) -> Iterator[str]:
    """Yield patterns for the numbers with the integer part `whole` between two bounds.

    Args:
        fractions: patterns for the digits after the point.
    """
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
    """Yield patterns for the fractions that begin with `prefix`, from a lower bound on.

    Args:
        prefix: the first digits of all these fractions and of the bound's fraction.
        low: the remaining digits of the bound's fraction, without zeros at the end.
        lower: the bound. Only `is_exclusive` is used.
    """
    for index, digit in enumerate(low):
        if digit != "9":
            yield prefix + low[:index] + _one_digit(int(digit) + 1, 9) + "[0-9]*"
    exact = prefix + low
    if lower.is_exclusive:
        yield exact + _NOT_ZERO
    else:
        yield exact + ("[0-9]*" if exact else "[0-9]+")


def _below(prefix: str, high: str, upper: Bound) -> Iterator[str]:
    """Yield patterns for the fractions that begin with `prefix`, up to an upper bound.

    Args:
        prefix: the first digits of all these fractions and of the bound's fraction.
        high: the remaining digits of the bound's fraction, without zeros at the end.
        upper: the bound. Only `is_exclusive` is used.
    """
    for index, digit in enumerate(high):
        if prefix + high[:index]:
            yield prefix + high[:index]
        if digit != "0":
            yield prefix + high[:index] + _one_digit(0, int(digit) - 1) + "[0-9]*"
    if not upper.is_exclusive:
        exact = prefix + high
        yield exact + ("0*" if exact else "0+")


def _between(lower: Bound, upper: Bound) -> Iterator[str]:
    """Yield patterns for the fractions between two bounds.

    The bounds have the same integer part.
    """
    low = _whole_and_fraction(lower.value)[1]
    high = _whole_and_fraction(upper.value)[1]
    length = max(len(low), len(high))
    low = low.ljust(length, "0")
    high = high.ljust(length, "0")
    # `split` is the position of the first digit that differs.
    split = next((i for i in range(length) if low[i] != high[i]), length)
    if low > high or (split == length and (lower.is_exclusive or upper.is_exclusive)):
        return
    if not low[split:].strip("0") and not lower.is_exclusive:
        shortest = low.rstrip("0")
        yield shortest + ("0*" if shortest else "0+")
    if split == length:
        return
    shared = low[:split]
    first = int(low[split])
    last = int(high[split])
    yield from _above(low[: split + 1], low[split + 1 :].rstrip("0"), lower)
    if last - first > 1:
        yield shared + _one_digit(first + 1, last - 1) + "[0-9]*"
    yield from _below(high[: split + 1], high[split + 1 :].rstrip("0"), upper)
