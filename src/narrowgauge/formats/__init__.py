"""What is a number? Formats as records of a few facts, rounding to their grids, codes and bytes."""

from narrowgauge.formats.codes import decode, encode, encode_finite_, pack, unpack
from narrowgauge.formats.counter_rng import RANDOM_BITS, Randomness, RandomStream, random_stream, stream_key
from narrowgauge.formats.format import Format, Specials
from narrowgauge.formats.rounding import ROUNDINGS, round_finite, round_finite_, round_to
from narrowgauge.formats.table import format, format_names, torch_dtype

__all__ = [
    "RANDOM_BITS",
    "ROUNDINGS",
    "Format",
    "RandomStream",
    "Randomness",
    "Specials",
    "decode",
    "encode",
    "encode_finite_",
    "format",
    "format_names",
    "pack",
    "random_stream",
    "round_finite",
    "round_finite_",
    "round_to",
    "stream_key",
    "torch_dtype",
    "unpack",
]
