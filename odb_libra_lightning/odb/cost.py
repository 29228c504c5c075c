"""What a batch costs, in tokens of budget: a pure rule, exact in whole numbers.

Source: the linear rule is ODB's (equation 1); the quadratic term, and the way of stating it as a length, are
lhotse's (`TokenConstraint(quadratic_length=...)`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral


@dataclass(frozen=True)
class TokenCost:
    """Cost of a batch of `n` samples, padded to the longest of them, `l` tokens, in tokens of budget.

    - linear (`quadratic_length=None`): `n * l`, the padded tokens;
    - quadratic: `n * (l + l*l / quadratic_length)`, for models whose memory holds a term that grows with the
      square of the length, such as attention that stores its scores.

    Everything is computed in whole numbers or fractions of them, so a batch is within a budget or not, whatever
    the size of the numbers.

    Example:
        >>> TokenCost().fits(100, 1000), TokenCost(quadratic_length=100).fits(100, 1000)
        (10, 5)

    Attributes:
        quadratic_length: length, in tokens, at which the quadratic term equals the linear one, at least 1;
            None for no such term.

    Raises:
        ValueError: `quadratic_length` is neither None nor a whole number of at least 1.
    """

    quadratic_length: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no length, and keep a plain int."""
        given: object = self.quadratic_length
        if given is None:
            return
        if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
            raise ValueError(f"quadratic_length must be a whole number of tokens of at least 1, or None, got {given!r}")
        object.__setattr__(self, "quadratic_length", int(given))  # a NumPy integer would overflow in products

    @classmethod
    def linear(cls) -> TokenCost:
        """`n * l`: the cost is the padded tokens."""
        return cls()

    @classmethod
    def quadratic(cls, quadratic_length: int) -> TokenCost:
        """`n * (l + l*l / quadratic_length)`.

        Raises:
            ValueError: `quadratic_length` is not a whole number of at least 1.
        """
        if quadratic_length is None:
            raise ValueError("a quadratic cost needs quadratic_length, the length at which both terms are equal")
        return cls(quadratic_length)

    def of(self, samples: int, length: int) -> Fraction:
        """Cost of a batch of so many samples, the longest of so many tokens; exact, in tokens of budget."""
        samples, length = int(samples), int(length)
        if self.quadratic_length is None:
            return Fraction(samples * length)
        return Fraction(samples * length * (self.quadratic_length + length), self.quadratic_length)

    def exceeds(self, length: int, l_max: int) -> bool:
        """Whether one sample of this length alone costs more than the budget."""
        return self.of(1, length) > l_max

    def longest(self, l_max: int) -> int:
        """Length of the longest sample that a budget holds, tokens; `exceeds` is true just above it.

        Quadratic: `l * (q + l) <= l_max * q` holds just where `(2*l + q)**2 <= q*q + 4*l_max*q` does.
        """
        if self.quadratic_length is None:
            return l_max
        q = self.quadratic_length
        return (math.isqrt(q * q + 4 * int(l_max) * q) - q) // 2

    def fits(self, length: int, l_max: int) -> int:
        """Most samples of this length that a budget holds, and at least 1.

        Linear: `max(l_max // length, 1)`. Quadratic: `n * (l + l*l / q) <= l_max` holds just where
        `n * l * (q + l) <= l_max * q` does, which is a division of whole numbers.

        Args:
            length: tokens, at least 1, unchecked.
            l_max: budget of a batch, tokens, at least 1, unchecked.
        """
        if self.quadratic_length is None:
            return max(l_max // length, 1)
        length, q = int(length), self.quadratic_length
        return max(int(l_max) * q // (length * (q + length)), 1)
