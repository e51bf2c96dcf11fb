"""SplitMix64: a hash of 64-bit words, for random-bit keys and for the order of samples."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Word = TypeVar("_Word", int, NDArray[np.uint64])
_MASK_64 = 2**64 - 1


def splitmix64(x: _Word) -> _Word:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants by David Stafford).

    A bijection of 64-bit words in arithmetic mod 2^64: good enough for shuffling, not for cryptography.

        z <- x + 0x9e3779b97f4a7c15
        z <- (z xor z >> 30) * 0xbf58476d1ce4e5b9
        z <- (z xor z >> 27) * 0x94d049bb133111eb
        z xor z >> 31

    Args:
        x: An integer, or a uint64 array (not a scalar: numpy warns when scalars wrap).
    """
    z: Any = x  # integers and arrays share these operators, with different types
    z = (z + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK_64
    mixed: _Word = z ^ z >> 31
    return mixed
