"""Stateless random numbers: bits are a pure function of (seed, step, tensor, element).

A stateful generator must be saved, restored and advanced in the same order on every rank; a resumed run that
gets this wrong silently becomes a different run. Here nothing advances. A `RandomStream` is a 64-bit key,
mixed from (seed, step, tensor id), and element i gets

    r_i = mix(mix(low(i) ^ k0) ^ high(i) * GOLDEN ^ k1)          all in 32-bit arithmetic, wrapping

where mix is a 32-bit bijection with nearly perfect avalanche (C. Wellons, "Prospecting for Hash Functions",
2018: two multiplications, shifts 16, 15, 15). An element therefore gets the same bits after a resume, in any
order of evaluation, and on any number of devices, as long as i is its index in the *global* tensor
(`offset`).
"""

from dataclasses import dataclass

import torch

from narrowgauge.formats.splitmix import splitmix64

_MIX_1, _MIX_2 = 0x21F0AAAD, 0xD35A2D97 - 2**32
_GOLDEN = 0x9E3779B9 - 2**32


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of an int32 tensor (torch's >> keeps the sign)."""
    return (x >> count) & (2 ** (32 - count) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 16)) * _MIX_1
    x = (x ^ _shift_right(x, 15)) * _MIX_2
    return x ^ _shift_right(x, 15)


def _signed(word: int) -> int:
    """Interpret a 32-bit word as a signed integer."""
    return word - 2**32 * (word >= 2**31)


def stream_key(seed: int, step: int, tensor: int) -> tuple[int, int]:
    """The two signed 32-bit key words of (seed, step, tensor id)."""
    key = splitmix64(splitmix64(splitmix64(seed % 2**64) ^ step) ^ tensor)
    return _signed(key % 2**32), _signed(key >> 32)


@dataclass(frozen=True, slots=True)
class RandomStream:
    """The random bits of one tensor in one step."""

    # an int32 tensor of two words (a tensor, so that compiled code is not recompiled every step)
    key: torch.Tensor
    # index of the first element in the global tensor: an int or a 0-dim int64 tensor
    offset: int | torch.Tensor = 0

    def bits(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """32 random bits per element in row-major order, as an int32 tensor of `shape`."""
        return self.bits_at(torch.arange(torch.Size(shape).numel(), device=self.key.device)).view(shape)

    def bits_at(self, index: torch.Tensor) -> torch.Tensor:
        """32 random bits for each element in `index` (int64, relative to the first element), as int32."""
        index = index + self.offset
        low, high = index.to(torch.int32), (index >> 32).to(torch.int32)
        return _mix(_mix(low ^ self.key[0]) ^ (high * _GOLDEN) ^ self.key[1])

    def of_scales(self) -> "RandomStream":
        """A separate stream of the same tensor and step, for the scales of its blocks."""
        return RandomStream(self.key ^ _OF_SCALES, self.offset)

    def from_element(self, first: int) -> "RandomStream":
        """The stream whose first element is element `first` of this one."""
        return RandomStream(self.key, self.offset + first)

    def uniform(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of `shape` with values k / 2^24 in [0, 1), each exact."""
        return _uniform(self.bits(shape))

    def uniform_at(self, index: torch.Tensor) -> torch.Tensor:
        """Uniform values for the elements in `index` (int64, relative to the first element)."""
        return _uniform(self.bits_at(index))


_OF_SCALES = 0x5CA1AB1E  # xored into both words of a key

# The source of uniform values in [0, 1), one per element of a tensor.
Randomness = torch.Generator | RandomStream | torch.Tensor | None


def uniform_for(x: torch.Tensor, source: Randomness) -> torch.Tensor:
    """A uniform value in [0, 1) for each element of `x`; None uses torch's default generator."""
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
