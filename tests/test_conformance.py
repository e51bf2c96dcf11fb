"""The conformance vectors: made again they are the same, none is missing, the fast path agrees with each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import RandomStream, decode, format
from narrowgauge.kernels.amax import raise_amax
from narrowgauge.nn.histories import AmaxHistory
from narrowgauge.quantization import (
    QuantContext,
    cast,
    cast_names,
    emulate,
    make_cast,
    quantize,
    quantize_in_context,
)
from narrowgauge.recipes import GEMM_PLACES, recipe, recipe_names

FOLDER = Path(__file__).parent.parent / "conformance"
FILES = ("inputs", "casts", "recipes")
INPUTS, CASTS, RECIPES = (
    json.loads((FOLDER / f"{n}.json").read_text()) for n in ("inputs", "casts", "recipes")
)
VECTORS = {v["name"]: v for v in [*CASTS["vectors"], *RECIPES["operands"]]}
DTYPES = {"bf16": (torch.bfloat16, 4), "fp16": (torch.float16, 4), "fp32": (torch.float32, 8)}
SCALED = [n for n in VECTORS if "scales" in VECTORS[n]]


def numbers(text, name):
    """A tensor of a wide format from hex codes, which stand most significant digit first."""
    dtype, digits = DTYPES[name]
    raw = b"".join(bytes.fromhex(text[i : i + digits])[::-1] for i in range(0, len(text), digits))
    return torch.frombuffer(bytearray(raw), dtype=dtype)


def codes(text):
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def tensor_of(v):
    if "of" in v:  # the numbers that another operand stands for
        first = VECTORS[v["of"]]
        q = quantize_in_context(tensor_of(first), cast_of(first), first["axis"], context_of(first))
        return q.dequantize()
    stored = INPUTS["inputs"][v["input"]]
    return numbers(stored["codes"], stored["format"]).view(stored["shape"])


def cast_of(v):
    """The cast from the facts in the file."""
    facts = {k: t for k, t in v["cast"].items() if k not in ("name", "block")}
    if "scale" in facts:
        block = v["cast"].get("block")
        facts["block"] = "tensor" if block is None else block if block[1] else "row"
    return make_cast(facts)


def context_of(v):
    """What a vector gives besides the tensor and its cast."""
    return QuantContext(
        random=RandomStream(torch.tensor(v["key"], dtype=torch.int32)) if "key" in v else None,
        signs=torch.tensor(v["signs"]) if "signs" in v else None,
        scale=numbers(v["encode_scale"], "fp32").reshape(()) if "encode_scale" in v else None,
    )


def same(a, b):
    return torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("of", sorted({name.partition(" ")[0] for name in SCALED}))
def test_codes_and_scales(of):
    for v in (VECTORS[name] for name in SCALED if name.partition(" ")[0] == of):
        q = quantize_in_context(tensor_of(v), cast_of(v), v["axis"], context_of(v))
        assert torch.equal(q.codes.flatten(), codes(v["codes"])), v["name"]
        if q.scale_codes is None:
            assert same(q.scales.flatten(), numbers(v["scales"], v["cast"]["scale"]).float()), v["name"]
        else:
            assert torch.equal(q.scale_codes.flatten(), codes(v["scales"])), v["name"]
        if "tensor_scale" in v:
            assert torch.equal(q.tensor_scale.flatten(), numbers(v["tensor_scale"], "fp32")), v["name"]
        if "mean" in v:
            assert torch.equal(q.mean.flatten(), numbers(v["mean"], "fp32")), v["name"]
        if "kept" in v:
            assert q.channels.nonzero().flatten().tolist() == v["channels"], v["name"]
            assert torch.equal(q.kept.flatten(), numbers(v["kept"], "fp32")), v["name"]
        if "result" in v:
            assert same(q.dequantize().flatten(), numbers(v["result"], "fp32")), v["name"]


def test_plain_conversions():
    for v in (v for name, v in VECTORS.items() if name not in SCALED):
        element = v["cast"]["element"]
        assert same(tensor_of(v).to(DTYPES[element][0]).flatten(), numbers(v["codes"], element)), v["name"]


def test_what_clamping_took_away_is_in_the_operand():
    for v in (v for v in VECTORS.values() if "rest" in v):
        operand, scale = emulate(tensor_of(v), cast_of(v), v["axis"], torch.float32)
        q = quantize(tensor_of(v), cast_of(v), v["axis"])
        rest = numbers(v["rest"], "fp32").view(q.codes.shape)
        assert scale is None
        assert rest.any()
        assert torch.equal(operand, q.dequantize() + rest), v["name"]


def test_delayed_scales():
    for v in (v for v in VECTORS.values() if "amaxes" in v):
        history = AmaxHistory(cast_of(v))
        for amax in v["amaxes"]:
            raise_amax(history.amax, torch.tensor([amax]))
            history.end_step()
        assert torch.equal(history.scale.reshape(1), numbers(v["encode_scale"], "fp32")), v["name"]


def test_random_bits_are_those_of_the_key():
    given = [v for v in VECTORS.values() if v.get("random")]
    streams = [(v["random"], v, RandomStream(torch.tensor(v["key"], dtype=torch.int32))) for v in given]
    streams += [(v["scale_random"], v, s.of_scales()) for _, v, s in streams if "scale_random" in v]
    for text, v, stream in streams:
        expected = [int(text[i : i + 6], 16) for i in range(0, len(text), 6)]
        uniform = stream.uniform((len(expected),))
        assert [int(u) for u in (uniform.double() * 2**24).floor()] == expected, v["name"]
    assert len(given) >= 4
    assert len(streams) >= len(given) + 2


def test_six_operands_of_every_recipe():
    """The file has the values of the recipes as they ship."""
    assert set(RECIPES["recipes"]) == set(recipe_names())
    for name, operands in RECIPES["recipes"].items():
        assert set(operands) == set(GEMM_PLACES)
        for place, vector in operands.items():
            c = recipe(name).casts[place]
            if c.of and not c.is_scaled:
                assert vector == operands[c.of]
            elif vector is None:  # its transform of numbers in fp32 has no exact sums
                assert c.of
                assert c.hadamard
            else:
                v = VECTORS[vector]
                assert v.get("of") == (operands[c.of] if c.of else None)
                assert v["input"] == place.partition(".")[2]
                assert v["axis"] == (0 if place in ("dgrad.w", "wgrad.dy", "wgrad.x") else -1)
                assert cast_of(v) == c


def test_nothing_is_missing():
    assert {v["cast"].get("name", "fp32") for v in CASTS["vectors"]} >= set(cast_names())
    for name in cast_names():
        kinds = {v["input"] for v in CASTS["vectors"] if v["cast"].get("name") == name}
        if cast(name).is_scaled:
            assert {"normal", "wide", "tiny", "huge", "zeros", "special", "not finite", "fp32"} <= kinds
    rules = {v["cast"].get("scale_rule") for v in CASTS["vectors"]}
    assert rules == {None, "floor", "ceil", "even", "rceil"}
    assert {v["cast"].get("rounding") for v in CASTS["vectors"]} >= {"half-away", "toward-zero", "stochastic"}
    for name, limits in INPUTS["formats"].items():
        assert limits == {"max": ng.format(name).max, "smallest": ng.format(name).smallest_subnormal}
    v = VECTORS["mxfp8 not finite"]  # scales that are not finite are marked
    assert codes(v["scales"]).tolist().count(0xFF) == 3
    assert decode(torch.tensor([0xFF], dtype=torch.uint8), format("e8m0")).isnan()


@pytest.mark.tier("thorough")  # twenty seconds of Fractions
def test_the_files_are_what_the_oracle_makes(tmp_path):
    subprocess.run([sys.executable, FOLDER / "make.py", tmp_path], check=True)
    for name in FILES:
        assert (tmp_path / f"{name}.json").read_bytes() == (FOLDER / f"{name}.json").read_bytes()


def test_the_example_of_the_page(capsys):
    """A reader with only the standard library."""
    page = (FOLDER / "README.md").read_text()
    example = page.partition("## An example")[2].split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], cwd=FOLDER, capture_output=True, text=True)
    assert done.stdout == "480 of 480 codes\n"
