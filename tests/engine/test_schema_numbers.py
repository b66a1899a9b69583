"""Regular expressions for ranges of numbers agree with exact comparisons in Python."""

import decimal
import random
import re
from decimal import Decimal
from typing import Any

import pytest

from engine.text.schema.numbers import (
    Bound,
    decimal_pattern,
    integer_pattern,
    llguidance_multiple,
    multiple_pattern,
    power_of_ten,
)

_EDGES = [2**53, 2**63, 2**64, 10**19, 10**20, 10**308]


def _random_number(rng: random.Random) -> int | Decimal:
    match rng.randrange(4):
        case 0:
            return rng.randint(-200, 200)
        case 1:
            return rng.choice((-1, 1)) * rng.choice(_EDGES) + rng.randint(-3, 3)
        case 2:
            return Decimal(f"{rng.randint(-3000, 3000)}E-{rng.randint(0, 4)}")
        case _:
            return Decimal(f"{rng.randint(-(10**45), 10**45)}E-{rng.randint(0, 45)}")


def _is_within(number: Decimal, lower: Bound | None, upper: Bound | None) -> bool:
    if lower is not None and (
        number < lower.value or (lower.is_exclusive and number == lower[0])
    ):
        return False
    return upper is None or (
        number <= upper.value and not (upper.is_exclusive and number == upper.value)
    )


def _bounds(rng: random.Random) -> tuple[Bound | None, Bound | None]:
    first, last = sorted((_random_number(rng), _random_number(rng)))
    if rng.random() < 0.1:
        last = first
    lower = Bound(first, rng.random() < 0.4) if rng.random() < 0.85 else None
    return lower, Bound(last, rng.random() < 0.4) if rng.random() < 0.85 else None


def _near(rng: random.Random, *bounds: Bound | None) -> list[Decimal]:
    """Return numbers near the bounds, and random numbers."""
    values = [_random_number(rng) for _ in range(4)]
    values += [bound.value for bound in bounds if bound is not None]
    steps = [
        Decimal(step) for step in ("0", "1", "-1", "0.1", "-0.01", "1E-45", "-1E-45")
    ]
    with decimal.localcontext(prec=1000):
        return [Decimal(value) + step for value in values for step in steps]


@pytest.mark.parametrize("seed", range(4))
def test_range_matches_exactly_the_numbers_within_it(seed):
    rng = random.Random(seed)
    for _ in range(150):
        lower, upper = _bounds(rng)
        decimals = decimal_pattern(lower, upper)
        integers = integer_pattern(lower, upper)
        for number in _near(rng, lower, upper):
            expected = _is_within(number, lower, upper)
            text = format(number, "f")
            spelled = {text, text + ("0" if "." in text else ".0")}
            spelled.add(text.rstrip("0").rstrip(".") if "." in text else text)
            for spelling in spelled - {"-0"}:
                if number == 0 and spelling.startswith("-"):
                    # -0 may match or not, because it is a second spelling of 0.
                    continue
                assert (
                    decimals is not None and bool(re.fullmatch(decimals, spelling))
                ) == expected
            if number == int(number):
                digits = str(int(number))
                assert (
                    integers is not None and bool(re.fullmatch(integers, digits))
                ) == expected


def test_float64_bounds_make_short_expressions():
    largest = Decimal("1.7976931348623157E308")
    pattern = decimal_pattern(Bound(-largest), Bound(largest))
    assert pattern is not None and len(pattern) < 4000
    assert re.fullmatch(pattern, format(largest, "f"))
    assert not re.fullmatch(pattern, "2" + "0" * 308)


def _as_the_library_reads(value: Any) -> Decimal:
    """Return the decimal that llguidance makes from a float64 multiple."""
    number = float(value)
    exponent = 0
    while number % 1:
        number = number * 10
        exponent = exponent + 1
    return Decimal(f"{int(number)}E-{exponent}")


def test_multiples_are_exact_or_none():
    """The grammar library uses float64, in which 0.07 * 100 is 7.000000000000001."""
    num_exact = 0
    for coefficient in range(1, 400):
        for places in range(5):
            multiple = Decimal(f"{coefficient}E-{places}")
            if (value := llguidance_multiple(multiple)) is not None:
                assert _as_the_library_reads(value) == multiple
                num_exact += 1
    assert num_exact > 1800
    for usual in (
        "0.01",
        "0.05",
        "0.07",
        "0.1",
        "0.25",
        "0.5",
        "0.001",
        "1",
        "7",
        "100",
    ):
        assert llguidance_multiple(Decimal(usual)) is not None
    assert llguidance_multiple(5_000_000_000) is None


def test_powers_of_ten_as_multiples():
    assert [power_of_ten(Decimal(text)) for text in ("100", "1", "0.01", "20")] == [
        2,
        0,
        -2,
        None,
    ]
    assert [
        bool(re.fullmatch(multiple_pattern(2), text))
        for text in ("100", "0", "110", "-1200.0")
    ]
    for exponent, text, expected in [
        (2, "100", True), (2, "0", True), (2, "110", False), (2, "-1200.00", True),
        (0, "3.0", True), (0, "3.5", False), (-2, "1.23", True), (-2, "1.234", False),
    ]:  # fmt: skip
        assert bool(re.fullmatch(multiple_pattern(exponent), text)) == expected
