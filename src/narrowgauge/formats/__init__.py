"""What is a number format? Records of a few facts, rounding to their grids, codes and bytes."""

from typing import TYPE_CHECKING

from narrowgauge.system.lazy import import_on_use

if TYPE_CHECKING:
    from narrowgauge.formats.codes import codes_of as codes_of
    from narrowgauge.formats.codes import decode as decode
    from narrowgauge.formats.codes import encode as encode
    from narrowgauge.formats.codes import encode_finite_ as encode_finite_
    from narrowgauge.formats.codes import pack as pack
    from narrowgauge.formats.codes import unpack as unpack
    from narrowgauge.formats.counter_rng import Randomness as Randomness
    from narrowgauge.formats.counter_rng import RandomStream as RandomStream
    from narrowgauge.formats.counter_rng import random_stream as random_stream
    from narrowgauge.formats.counter_rng import stream_key as stream_key
    from narrowgauge.formats.format import Format as Format
    from narrowgauge.formats.format import Specials as Specials
    from narrowgauge.formats.rounding import holds as holds
    from narrowgauge.formats.rounding import require_values as require_values
    from narrowgauge.formats.rounding import round_finite as round_finite
    from narrowgauge.formats.rounding import round_finite_ as round_finite_
    from narrowgauge.formats.rounding import round_to as round_to
    from narrowgauge.formats.table import RANDOM_BITS as RANDOM_BITS
    from narrowgauge.formats.table import ROUNDINGS as ROUNDINGS
    from narrowgauge.formats.table import format as format
    from narrowgauge.formats.table import format_facts as format_facts
    from narrowgauge.formats.table import format_from_facts as format_from_facts
    from narrowgauge.formats.table import format_names as format_names
    from narrowgauge.formats.table import is_in_torch as is_in_torch
    from narrowgauge.formats.table import known_format as known_format
    from narrowgauge.formats.table import own_formats as own_formats
    from narrowgauge.formats.table import register_format as register_format
    from narrowgauge.formats.table import torch_dtype as torch_dtype
else:
    __all__, __getattr__, __dir__ = import_on_use(__name__)
