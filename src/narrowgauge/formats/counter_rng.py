"""Random numbers without hidden state: bits are a pure function of (seed, step, tensor, element).

A generator that advances must be saved, restored and kept in the same order on every rank, and a resumed
run that gets this wrong is silently another run. Here nothing advances. A `RandomStream` is a 64-bit key,
mixed from (seed, step, tensor id); element i gets

    r_i = mix(mix(low(i) ^ k0) ^ high(i) * GOLDEN ^ k1)          all in 32-bit arithmetic, wrapping

where mix is a bijection of 32 bits with nearly perfect avalanche (C. Wellons, "Prospecting for Hash
Functions", 2018: two multiplications, shifts 16, 15, 15). So the same element gets the same bits
after a resume, in any order of evaluation, and on any number of devices as long as i is its index in the
*global* tensor (`offset`).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

from narrowgauge.formats.splitmix import splitmix64

_MIX_1, _MIX_2 = 0x21F0AAAD, 0xD35A2D97 - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
_COUNTING = torch.arange(2**16, dtype=torch.int32, device="cpu")


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of an int32 tensor (torch's >> keeps the sign)."""
    return (x >> count) & (2 ** (32 - count) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * _MIX_1
    x = (x ^ _shift_right(x, 15)) * _MIX_2
    return x ^ _shift_right(x, 15)


def _start_mix(out: torch.Tensor, first: int, key: int) -> None:
    """Write x ^ (x >> 16), the first of `_mix`, of x = index ^ key for consecutive indices from `first` on.

    Among 2^16 indices whose upper halves are the same, x >> 16 is one number, and so all of it is one xor.
    """
    done = 0
    for piece in out.split(_sizes(first, out.numel())):
        start = first + done
        upper = (start >> 16 ^ key >> 16) & 0xFFFF
        word = _signed(upper << 16 | (key ^ upper) & 0xFFFF)
        torch.bitwise_xor(_COUNTING.narrow(0, start % 2**16, piece.numel()), word, out=piece)
        done += piece.numel()


def _sizes(first: int, count: int) -> list[int]:
    """The lengths of the pieces of `count` indices from `first` on, cut at multiples of 2^16."""
    bounds = [first, *range((first // 2**16 + 1) * 2**16, first + count, 2**16), first + count]
    return [b - a for a, b in pairwise(bounds)]


def _finish_mix_(x: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """`_mix` after its first shift, in place, as new memory slows a CPU down."""
    _xor_shifted_(x.mul_(_MIX_1), 15, spare)
    return _xor_shifted_(x.mul_(_MIX_2), 15, spare)


def _xor_shifted_(x: torch.Tensor, count: int, spare: torch.Tensor) -> torch.Tensor:
    torch.bitwise_right_shift(x, count, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_(2 ** (32 - count) - 1))


def _signed(word: int) -> int:
    """A 32-bit word as a signed number."""
    return word - 2**32 * (word >= 2**31)


def stream_key(seed: int, step: int, tensor: int) -> tuple[int, int]:
    """The two signed 32-bit key words of (seed, step, tensor id)."""
    key = splitmix64(splitmix64(splitmix64(seed % 2**64) ^ step) ^ tensor)
    return _signed(key % 2**32), _signed(key >> 32)


@dataclass(frozen=True, slots=True)
class RandomStream:
    """A source of random numbers for one tensor in one step.

    Attributes:
        key: An int32 tensor of two words (a tensor, so that code is not compiled anew for each step).
        offset: The index in the global tensor of the first element: an integer or a 0-dim int64 tensor.
    """

    key: torch.Tensor
    offset: int | torch.Tensor = 0

    def bits(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """Int32 tensor of `shape`: 32 random bits for each element in row-major order."""
        count = torch.Size(shape).numel()
        if self.key.device.type == "cpu" and not torch.compiler.is_compiling():
            first = int(self.offset)
            if first >> 32 == (first + count) >> 32:  # one upper word for all
                return self._bits_in_place(count, first).view(shape)
        return self.bits_at(torch.arange(count, device=self.key.device)).view(shape)

    def bits_at(self, index: torch.Tensor) -> torch.Tensor:
        """Int32 tensor: 32 random bits for the elements `index` (int64), counted from the first."""
        index = index + self.offset
        low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
        return _mix(_mix(low ^ self.key[0]) ^ (high * _GOLDEN) ^ self.key[1])

    def _bits_in_place(self, count: int, first: int) -> torch.Tensor:
        """`bits` of elements whose indices have the same upper word."""
        k0, k1 = self.key.tolist()
        x = torch.empty(count, dtype=torch.int32)
        spare = torch.empty_like(x)
        _start_mix(x, first % 2**32, k0)
        _finish_mix_(x, spare).bitwise_xor_(_signed((first >> 32) * _GOLDEN % 2**32) ^ k1)
        _xor_shifted_(x, 16, spare)
        return _finish_mix_(x, spare)

    def of_scales(self) -> "RandomStream":
        """Another stream of the same tensor and step, for the scales of its blocks."""
        return RandomStream(self.key ^ _OF_SCALES, self.offset)

    def from_element(self, first: int) -> "RandomStream":
        """The stream whose first element is element `first` of this one."""
        return RandomStream(self.key, self.offset + first)

    def uniform(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """Float32 tensor of `shape` from the 2^24 numbers k / 2^24 of [0, 1), each of them exact."""
        return _uniform(self.bits(shape))

    def uniform_at(self, index: torch.Tensor) -> torch.Tensor:
        """Uniform numbers for the elements `index` (int64), counted from the first."""
        return _uniform(self.bits_at(index))


_OF_SCALES = 0x5CA1AB1E  # into both words of a key

# The source of random numbers in [0, 1); a tensor has one for each element.
Randomness = torch.Generator | RandomStream | torch.Tensor | None


def uniform_for(x: torch.Tensor, source: Randomness) -> torch.Tensor:
    """A random number in [0, 1) for each element of `x`; None is torch's default generator."""
    if isinstance(source, RandomStream):
        return source.uniform(x.shape)
    if isinstance(source, torch.Tensor):
        return source
    return torch.rand(x.shape, dtype=torch.float32, generator=source, device=x.device)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return bits.bitwise_right_shift_(8).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)


def random_stream(seed: int, step: int, tensor: int, device: torch.device | str = "cpu") -> RandomStream:
    """The stream of (seed, step, tensor id) on a device."""
    return RandomStream(torch.tensor(stream_key(seed, step, tensor), dtype=torch.int32, device=device))
