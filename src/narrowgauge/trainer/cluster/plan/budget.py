"""Budgets as the user writes them: tokens, and the price of a device-hour with its currency."""

import re
from dataclasses import dataclass

from narrowgauge.system.errors import UserError
from narrowgauge.system.units import parse_count


@dataclass(frozen=True)
class Price:
    """An amount of a currency, which is "" if unspecified."""

    amount: float
    currency: str

    def __str__(self) -> str:
        if 0 < self.amount < 0.005:
            return f"below 0.01 {self.currency}".rstrip()
        decimals = 2 if self.amount < 1000 else 0
        return f"{self.amount:,.{decimals}f} {self.currency}".rstrip()


def parse_price(where: str, text: str) -> Price:
    """Parse a price such as 2.50USD, "2.50 EUR" or 2.50 (without a currency).

    `where` is the option or key, for the error message.
    """
    match = re.fullmatch(r"([^\W\d_]{1,5}|[$€£¥]|)\s*(\d+(?:\.\d+)?)\s*([^\W\d_]{1,5}|[$€£¥]|)", text.strip())
    if match is None or (match[1] and match[3]) or not 0 < float(match[2]) < 2**24:
        raise UserError(
            f"{where} {text!r}: it must be the price of a device-hour, a number above 0 and its currency, "
            "such as 2.50USD or 2.50EUR"
        )
    return Price(float(match[2]), match[1] or match[3])


def tokens_of(text: str) -> int:
    """Parse a token budget such as 300B, 1T or 1.5e12; at least 1."""
    if not (number := parse_count(text)):
        raise UserError(f"--tokens {text!r}: it must be a number such as 300B, 1T or 1.5e12")
    return int(number)
