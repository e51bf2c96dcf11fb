"""The passes in C give the bits of torch's operations, and no library of others is loaded."""

import contextlib
import os
import stat
import subprocess

import pytest
import torch

from kernels.common import assert_same, assert_same_for_threads, needs_c, same_bits
from narrowgauge.formats import RandomStream, decode, format, random_stream, torch_dtype
from narrowgauge.quantization import DEFAULT_CONTEXT, QuantContext, emulate, make_cast, quantize_in_context
from narrowgauge.quantization.blocks import Blocks, blocks_of
from narrowgauge.quantization.passes import build, implementations, in_c, in_torch
from narrowgauge.quantization.passes.in_torch import Split
from narrowgauge.quantization.quantize import block_amax
from narrowgauge.quantization.scales import scales_from
from narrowgauge.system import operating_system
from quantization.casts import CASTS

#: Numbers by shape, dtype and power of two, and whether some are not finite. The small ones are stored as
#: subnormal bf16, where an element times its scale is rounded.
GIVEN = [
    ((64, 96), torch.bfloat16, 0, True),
    ((37, 50), torch.float32, 0, False),
    ((5, 80), torch.float32, -129, False),
    ((3, 32, 48), torch.bfloat16, 0, False),
]


def numbers(shape, dtype, power=0, is_broken=False):
    """With blocks of zeros, huge and subnormal ones, and perhaps an infinity and a NaN."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 2.0**power).to(dtype)
    flat = x.view(-1)
    flat[:40], flat[50], flat[-1] = -0.0, -1e38 * 2.0**power, 1e-40
    if is_broken:
        flat[flat.numel() // 3], flat[flat.numel() // 2] = float("inf"), float("nan")
    return x


def outcome(x, cast, axis):
    # an offset at which the upper word of an element's index changes
    context = QuantContext(RandomStream(random_stream(1, 2, 3).key, 5 * 2**32 - 300))
    operand, scale = emulate(x, cast, axis, torch.bfloat16, context)
    q = quantize_in_context(x, cast, axis, context)
    return [operand, torch.ones(()) if scale is None else scale, q.codes, q.scales, q.tensor_scale]


@needs_c
@pytest.mark.parametrize("name", CASTS)
def test_c_gives_the_bits_of_torch(name, monkeypatch):
    cast, calls = CASTS[name], []
    monkeypatch.setattr(in_c, "call", lambda *one, call=in_c.call: calls.append(one) or call(*one))
    first = list(CASTS).index(name)
    for n, given in enumerate(GIVEN):
        axis = -1 if (first + n) % 2 or (cast.block and cast.block[0] > 1 and n == 3) else 0
        x = numbers(*given)
        monkeypatch.setenv("NARROWGAUGE_KERNELS", "0")
        expected = outcome(x, cast, axis)
        assert not calls
        monkeypatch.delenv("NARROWGAUGE_KERNELS")
        assert_same(outcome(x, cast, axis), expected)
        assert calls or len(x.shape) == 3
        calls.clear()


@needs_c
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", [name for name, c in CASTS.items() if c.candidates or c.correct])
def test_errors_and_sums_of_blocks_have_the_bits_of_torch(name, axis):
    """Which decide between candidates, and so show in codes only where two are nearly equal."""
    cast = CASTS[name].of_the_rest.uncorrected
    x, context = numbers((36, 50), torch.float32), QuantContext(random_stream(1, 2, 3))
    blocks = blocks_of(x.shape, cast, axis)
    split = blocks.split(x)
    amax = block_amax(split, blocks)
    over = context.row_amax(amax, blocks, axis, cast) if cast.has_row_scales else amax.amax()
    s = Split(split, blocks, cast, axis, context, amax, None if cast.tensor_scale == "none" else over)
    if not cast.candidates:
        assert_same(*(engine.scales(s, with_sums=True)[1] for engine in (in_c, in_torch)))
        return
    errors, least = torch.empty(blocks.aligned), None
    in_c._narrow(s, "scales", {"sums": errors})
    for candidate in cast.candidates:
        error = in_torch.block_errors(s, scales_from(amax, cast, over=s.over, candidate=candidate))
        least = error if least is None else torch.where(error < least, error, least)
    assert_same([errors], [least])


@needs_c
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "e4m3"])
def test_threads_share_a_pass_and_change_nothing(name, monkeypatch):
    x, cast = numbers((96, 512), torch.bfloat16), make_cast({"cast": name, "rounding": "stochastic"})
    assert_same_for_threads(lambda: outcome(x, cast, -1), monkeypatch)


OF_SCALES = ("element", "scale", "scale_rule", "power_of_two", "headroom", "scale_rounding", "zero_scale")
OF_SCALES += ("tensor_scale", "scale_target", "candidates", "choose")
NEAREST = {n: c for n, c in CASTS.items() if c.to_nearest.scale_rounding == "nearest-even" and not c.correct}
#: One cast for all that scales are computed from.
BY_SCALES = {tuple(c.values()[key] for key in OF_SCALES): name for name, c in NEAREST.items()}


def amaxes():
    """Each exponent with the mantissas at which a rule changes its mind, 0, subnormals, infinity and NaN."""
    # 2 - 2^-k and the number below it: where the rule "even" goes up to the next power of two
    changes = [2**23 - 2 ** (22 - k) for k in (1, 2, 3, 6)]
    places = [0, 1, 2**19, 2**20 - 1, 2**21, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 1, *changes]
    mantissas = torch.tensor([*places, *(place - 1 for place in changes)])
    words = (torch.arange(256)[:, None] << 23 | mantissas).flatten().to(torch.int32)
    return torch.cat([words.view(torch.float32), torch.logspace(-8, 8, 1000)])


def scales_by(engine, amax, cast, over):
    """The scales of blocks of one element, each its amax."""
    blocks = Blocks.of(amax.shape, (1,) * amax.ndim)
    return engine.scales(Split(amax, blocks, cast, -1, DEFAULT_CONTEXT, amax, over))[0]


@needs_c
@pytest.mark.parametrize("name", BY_SCALES.values())
def test_scales_have_the_bits_of_torch(name):
    """Under the amax of a tensor, or of each row; of the best candidate."""
    c, amax = CASTS[name].to_nearest, amaxes().view(3, -1, 1)
    of_row = torch.tensor([0.0, 0.3, 3e38]).view(3, 1, 1)
    overs = [torch.tensor(x) for x in (0.0, 1e-44, 0.3, 448.0, 3e38)] if c.tensor_scale != "none" else [None]
    for over in [of_row, of_row.expand_as(amax)] if c.has_row_scales else overs:
        found, expected = (scales_by(engine, amax, c, over) for engine in (in_c, in_torch))
        assert found.divides == expected.divides
        assert_same(found[:4], expected[:4])


@needs_c
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amaxes_have_the_bits_of_torch(dtype, size):
    x = amaxes()[:5040].to(dtype)
    blocks = Blocks.of(x.shape, (size,))
    assert_same(*([engine.amax(blocks.split(x), blocks)] for engine in (in_c, in_torch)))


@needs_c
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m1", "int8"])
def test_codes_are_those_of_formats(name):
    element = format(name)
    codes = torch.arange(2**element.bits, dtype=torch.uint8).repeat(3).view(3, -1)
    values = decode(codes, element, torch.bfloat16)
    assert torch.equal(
        in_c.decoded(codes, element, torch.bfloat16).view(torch.int16), values.view(torch.int16)
    )
    same = codes.T if (fp8 := torch_dtype(element)) is None else values.T.to(fp8).view(torch.uint8)
    assert same_bits(in_c.decoded(same, element, torch.bfloat16), values.T)


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """An empty cache, and a library that is compiled in a moment and runs as slowly."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_FLAGS", ("-O0", *build._FLAGS[1:]))


@pytest.mark.tier("thorough")
@needs_c
def test_a_library_that_rounds_otherwise_is_not_used(compiles, tmp_path, monkeypatch):
    """Such as one made with flags that let the compiler change numbers."""
    sources = {name: text.replace("rintf(x)", "floorf(x)") for name, text in build.sources().items()}
    monkeypatch.setattr(build, "sources", lambda: sources)
    assert in_c.c_library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture
def planted(compiles, tmp_path):
    """A cache with a library that leaves a mark when it is loaded, as an attacker would plant it."""
    mark, code, library = tmp_path / "loaded", tmp_path / "planted.c", tmp_path / "planted.so"
    code.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{mark}", 0600); }}'
    )
    subprocess.run([*build.compiler(), "-shared", "-fPIC", str(code), "-o", str(library)], check=True)
    assert in_c.c_library.__wrapped__() is not None
    (there,) = (tmp_path / "cache").rglob("*.so")
    there.write_bytes(library.read_bytes())
    return there, mark


def named_as_its_content(there):
    """The file under the name that a whole library of these bytes has."""
    build.keep(there.read_bytes())
    there.unlink()
    (named,) = there.parent.glob("*.so")
    return named


def rounds_as_torch():
    return in_c._is_right(in_c.c_library.__wrapped__())


@pytest.mark.tier("thorough")
@needs_c
def test_a_cached_library_is_loaded_again_unless_it_has_other_bytes(planted):
    there, mark = planted
    library = there.read_bytes()
    assert rounds_as_torch()
    assert not mark.exists(), "the file is not named as its content"
    there.write_bytes(b"cut off")
    assert rounds_as_torch()
    mask = os.umask(0o002)  # which lets a group write
    try:
        there.parent.rename(there.parent.with_name("old"))
        build.keep(library)
    finally:
        os.umask(mask)
    in_c.c_library.__wrapped__()
    assert mark.exists()


WRITABLE = ["library mode", "library link", "library owner", "folder mode", "folder link", "folder owner"]


@pytest.mark.tier("thorough")
@needs_c
@pytest.mark.parametrize("what", [*WRITABLE, "a file for a folder"])
def test_what_others_could_write_is_not_loaded(planted, what, monkeypatch):
    """Of a folder the sentence names it, and each process compiles for itself."""
    there, mark = planted
    named = named_as_its_content(there)
    folder, is_private = named.parent, operating_system.is_private
    of = named if "library" in what else folder
    if "mode" in what:
        of.chmod(0o660 if of is named else 0o775)
    elif "link" in what:
        of.symlink_to(of.rename(of.parent / "elsewhere"))
    elif what == "library owner":
        monkeypatch.setattr(build, "is_private", lambda s: not stat.S_ISREG(s.st_mode) and is_private(s))
    elif what == "folder owner":  # the next user's folder, made by this one
        folder = folder.rename(folder.with_name("passes-12345"))
        monkeypatch.setattr(operating_system.os, "geteuid", lambda: 12345)
    else:
        folder.rename(folder.parent / "elsewhere")
        folder.write_text("")
    before = sorted(folder.parent.rglob("*"))
    with contextlib.ExitStack() as expected:
        if of is not named:
            sentence = rf"{folder} is not a directory that only this user can write to"
            expected.enter_context(pytest.warns(UserWarning, match=sentence))
        assert rounds_as_torch()
    assert not mark.exists()
    assert of is named or sorted(folder.parent.rglob("*")) == before


def test_without_a_compiler_torch_computes(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.compiler() == []
    assert in_c.c_library.__wrapped__() is None


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8-row"])
def test_a_part_of_a_tensor_without_numbers_is_not_read(name):
    """Memory is estimated with such tensors; the address of a part of one is not zero."""
    part = torch.empty(3, 64, 128, device="meta", dtype=torch.bfloat16)[1:]
    for x in (part, part[1], part[0, 5:]):
        values, _ = emulate(x, make_cast(name), -1, torch.bfloat16)
        assert (values.is_meta, values.shape) == (True, x.shape)


def test_a_value_that_no_engine_knows_is_for_torch(monkeypatch):
    monkeypatch.setitem(implementations.ORDER, "scale_rule", ("floor",))
    cast = make_cast("mxfp8")
    gaps = [implementations.passes_gap(cast), implementations.kernel_gap.__wrapped__(cast)]
    assert gaps == ["no C pass implements scale_rule", "no Triton kernel implements scale_rule"]
