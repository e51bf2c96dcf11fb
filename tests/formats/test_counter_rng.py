"""Random bits are a function of (seed, step, tensor, element) and look random."""

import pytest
import torch

from narrowgauge.formats import random_stream, stream_key
from narrowgauge.formats.counter_rng import RandomStream


def test_a_uniform_value_has_the_upper_24_bits_of_its_word():
    stream = random_stream(1, 2, 3)
    words = [bits % 2**32 for bits in stream.bits((1000,)).tolist()]
    assert stream.uniform((1000,)).tolist() == [(word >> 8) / 2**24 for word in words]


def _word(x: int) -> int:
    """The mixing function of the module's text, in Python's integers."""
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
    return x ^ x >> 15


def _bits(key: list[int], place: int) -> int:
    low = _word(place % 2**32 ^ key[0] % 2**32)
    return _word(low ^ (place >> 32) * 0x9E3779B9 % 2**32 ^ key[1] % 2**32)


@pytest.mark.parametrize("offset", [0, 5, 2**31 - 3, 2**32 - 64, 2**32 - 3, 2**33 + 7, 2**40])
def test_bits_are_those_of_the_formula_in_whole_numbers(offset):
    for seed in (0, 1, 2**40):
        key = random_stream(seed, 3, 2).key
        expected = [_bits(key.tolist(), place) for place in range(offset, offset + 64)]
        assert [bits % 2**32 for bits in RandomStream(key, offset).bits((64,)).tolist()] == expected


def _split_mix(z: int) -> int:
    """SplitMix64's finalizer, in Python's integers."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize(("seed", "step", "tensor"), [(0, 0, 0), (7, 3, 2), (-1, 2**33, 2**34 + 5)])
def test_stream_key_mixes_the_seed_then_the_step_then_the_tensor(seed, step, tensor):
    key = _split_mix(_split_mix(_split_mix(seed % 2**64) ^ step) ^ tensor)
    low, high = stream_key(seed, step, tensor)
    assert (low % 2**32, high % 2**32) == (key % 2**32, key >> 32)


@pytest.mark.parametrize("offset", [3, torch.tensor(3)])
def test_from_element_counts_from_the_first_element_of_the_stream(offset):
    stream = RandomStream(random_stream(7, 3, 2).key, offset)
    assert torch.equal(stream.from_element(5).bits((64,)), stream.bits((69,))[5:])
