"""The executor of PTX: integers against Python's, what threads tell each other, branches, what is refused."""

import operator
import random

import numpy as np
import pytest
import torch

from ptx.machine import ELEMENTWISE, run
from ptx.memory import Global
from ptx.parse import Refused, parse
from ptx.types import width
from ptx_tests.test_ptx import HEAD, computed, executed

EDGES = [
    0,
    1,
    2,
    7,
    31,
    32,
    63,
    64,
    0x7F,
    0x80,
    0x7FFF,
    0x8000,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def number(bits, kind):
    """Bits as a Python integer of a type."""
    size = 8 * width(kind)
    bits &= (1 << size) - 1
    return bits - (1 << size) if kind.startswith("s") and bits >> (size - 1) else bits


def bfe(x, start, length, kind):
    """As the ISA writes it down."""
    bits, start, length = 32, start & 255, length & 255
    at = min(start + length - 1, bits - 1)
    sign = 0 if kind == "u32" or length == 0 else x >> at & 1
    result = 0
    for i in range(bits):
        bit = x >> (start + i) & 1 if i < length and start + i < bits else sign
        result |= bit << i
    return result


def prmt(a, b, selector):
    source = [(b << 32 | a) >> (8 * i) & 255 for i in range(8)]
    result = 0
    for i in range(4):
        chosen = selector >> (4 * i) & 15
        byte = source[chosen & 7]
        result |= ((255 if byte & 128 else 0) if chosen & 8 else byte) << (8 * i)
    return result


def shifted(x, by, bits, kind):
    if kind.startswith("b"):
        return x << by if by < bits else 0
    return number(x, kind) >> min(by, bits)


TWO = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "mul.wide": operator.mul,
    "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "setp.eq": operator.eq, "setp.ne": operator.ne, "setp.lt": operator.lt, "setp.le": operator.le,
    "setp.gt": operator.gt, "setp.ge": operator.ge,
}  # fmt: skip


def due(opcode, does, operands):
    """What an instruction gives for integers (bits), by Python."""
    name, _, kind = opcode.rpartition(".")
    values = [number(v, k) for v, k in zip(operands, does.sources, strict=True)]
    if name in TWO:
        return TWO[name](*values)
    if name in ("shl", "shr"):
        return shifted(values[0], values[1], 8 * width(kind), kind)
    if name in ("mad.lo", "mad.wide"):
        return values[0] * values[1] + values[2]
    if name == "div":
        return int(abs(values[0]) // abs(values[1])) * (1 if values[0] * values[1] > 0 else -1)
    if name == "selp":
        return values[0] if values[2] else values[1]
    if name == "bfe":
        return bfe(operands[0] & 0xFFFFFFFF, values[1], values[2], kind)
    if name == "prmt":
        return prmt(*values)
    one = {"neg": operator.neg, "not": lambda x: ~x if kind != "pred" else 1 - x, "popc": int.bit_count}
    return one.get(name, lambda x: x)(values[0])


OF_INTEGERS = [
    opcode
    for opcode, does in ELEMENTWISE.items()
    if not any(k.startswith(("f", "bf")) for k in (*does.sources, does.result, opcode.split(".")[-1]))
    and not opcode.startswith(("abs", "neg.bf", "neg.f", "cvt.rn", "cvt.rz", "selp.f"))
    and "s16x2" not in opcode
]


@pytest.mark.parametrize("opcode", OF_INTEGERS)
def test_integers_are_those_of_python(opcode):
    does, draw = ELEMENTWISE[opcode], random.Random(opcode)
    rows = []
    for _ in range(384):
        row = [
            draw.choice([draw.choice(EDGES), draw.getrandbits(64), draw.randrange(40)]) for _ in does.sources
        ]
        bits = [1 if k == "pred" else max(32, 8 * width(k)) for k in does.sources]
        rows.append([v & (1 << b) - 1 for v, b in zip(row, bits, strict=True)])
    if opcode.startswith("div"):
        rows = [r for r in rows if number(r[1], does.sources[1])]
    found = computed(opcode, *(np.array(c, dtype=np.uint64) for c in zip(*rows, strict=True)))
    seen = [[v & (1 << 8 * width(k)) - 1 for v, k in zip(r, does.sources, strict=True)] for r in rows]
    mask = (1 << 8 * width(does.result)) - 1
    assert found.tolist() == [int(due(opcode, does, r)) & mask for r in seen]


def test_halves_are_added_apart():
    rows = [(random.Random(i).getrandbits(32), random.Random(-i - 1).getrandbits(32)) for i in range(99)]
    found = computed("add.s16x2", *(np.array(c, dtype=np.uint64) for c in zip(*rows, strict=True)))
    halves = [(x + y & 0xFFFF) | ((x >> 16) + (y >> 16) & 0xFFFF) << 16 for x, y in rows]
    assert found.tolist() == halves


def test_integers_become_the_nearest_float32():
    x = np.array([0, 1, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.uint64)
    for kind, signed in (("u32", np.uint32), ("s32", np.int32)):
        found = computed(f"cvt.rn.f32.{kind}", x).astype(np.uint32).view(np.float32)
        assert found.tolist() == torch.from_numpy(x.astype(signed).astype(np.int64)).float().tolist()


def test_signs_are_flipped_and_dropped():
    for opcode, mask in (("f32", 0x80000000), ("bf16", 0x8000), ("f16x2", 0x80008000)):
        x = np.array([0x80018001, 0x7F803C00, 0xFFC0FE00], dtype=np.uint64) & np.uint64(mask | mask - 1)
        assert computed(f"neg.{opcode}", x).tolist() == [int(v) ^ mask for v in x]
        assert computed(f"abs.{opcode}", x).tolist() == [int(v) & ~mask for v in x]


LOAD = "ld.global.b64 %rd20, [%rd13]; cvt.u32.u64 %r20, %rd20;\n"
STORE = "cvt.u64.u32 %rd21, %r21; st.global.b64 [%rd14], %rd21;\n"
VALUES = np.random.default_rng(0).integers(0, 2**32, 256).astype(np.uint64)


@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16, 5])
def test_a_shuffle_swaps_neighbours(distance):
    found = executed(f"{LOAD} shfl.sync.bfly.b32 %r21, %r20, {distance}, 31, -1; {STORE}", VALUES, 2)
    assert found.tolist() == [VALUES[i ^ distance] for i in range(256)]


def test_a_shuffle_reads_one_thread_of_its_warp():
    found = executed(f"{LOAD} shfl.sync.idx.b32 %r21, %r20, 3, 31, -1; {STORE}", VALUES, 2)
    assert found.tolist() == [VALUES[i // 32 * 32 + 3] for i in range(256)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add.s32", lambda v: v.sum(1, dtype=np.uint32)),
        ("max.s32", lambda v: v.view(np.int32).max(1).view(np.uint32)),
        ("max.f32", lambda v: np.nanmax(v.view(np.float32), 1).view(np.uint32)),
    ],
)
def test_a_warp_is_reduced(name, expected):
    found = executed(f"{LOAD} mov.b32 %r22, -1; redux.sync.{name} %r21, %r20, %r22; {STORE}", VALUES, 2)
    assert found.tolist() == np.repeat(expected(VALUES.astype(np.uint32).reshape(8, 32)), 32).tolist()


TURNED = """
	shl.b32 %r22, %r10, 2; mov.b32 %r23, global_smem; add.s32 %r24, %r23, %r22;
	st.shared.b32 [%r24], %r20;
	{barrier}
	xor.b32 %r25, %r22, 508; add.s32 %r26, %r23, %r25;
	ld.shared.b32 %r21, [%r26];
"""


def test_shared_memory_turns_a_block_round():
    found = executed(LOAD + TURNED.format(barrier="bar.sync 0;") + STORE, VALUES, 2)
    assert np.array_equal(found.reshape(2, 128), VALUES.reshape(2, 128)[:, ::-1])


def test_a_missing_barrier_is_a_race():
    with pytest.raises(Refused, match="without a barrier"):
        executed(LOAD + TURNED.format(barrier="") + STORE, VALUES, 2)


def test_matrices_are_loaded_and_stored_by_their_layout():
    """Thread t has elements 2 (t % 4) and the next of row t // 4: stored, and loaded as columns."""
    body = (
        LOAD
        + """
	shl.b32 %r22, %r10, 4; mov.b32 %r23, global_smem; add.s32 %r24, %r23, %r22;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r24], {%r20};
	bar.warp.sync -1;
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r21}, [%r24];
	"""
    )
    found = executed(body + STORE, VALUES, 1, 4096)[:32].astype(np.uint32)
    matrix = VALUES[:32].astype(np.uint32).view(np.uint16).reshape(8, 8)
    assert np.array_equal(found.view(np.uint16).reshape(8, 8), matrix.T)


def test_threads_part_and_meet_again():
    """Each counts its own number of turns; afterwards all shuffle."""
    body = """
	mov.b32 %r20, 0; and.b32 %r22, %r10, 7;
$L1:
	setp.ge.u32 %p1, %r20, %r22;
	@%p1 bra $L2;
	add.s32 %r20, %r20, 1;
	bra.uni $L1;
$L2:
	shfl.sync.bfly.b32 %r21, %r20, 1, 31, -1;
	"""
    found = executed(body + STORE, VALUES, 2)
    assert found.tolist() == [(i ^ 1) & 7 for i in range(256)]


def test_a_scope_of_inline_assembly_is_not_the_end():
    found = executed(LOAD + "{\n.reg .b32 a;\nadd.s32 a, %r20, 1;\nmov.b32 %r21, a;\n}\n" + STORE, VALUES, 2)
    assert found.tolist() == [(int(v) + 1) % 2**32 for v in VALUES]


def test_a_guard_holds_for_its_threads_alone():
    found = executed("setp.lt.u32 %p1, %r10, 9; mov.b32 %r21, 1; @!%p1 mov.b32 %r21, 2; " + STORE, VALUES, 2)
    assert found.tolist() == [1 if i % 128 < 9 else 2 for i in range(256)]


def test_a_maximum_in_memory_takes_every_thread():
    body = LOAD + "red.global.gpu.relaxed.max.s32 [%rd11], %r20; red.global.gpu.relaxed.add.u32 [%rd11+8], 1;"
    found = executed(body, VALUES, 2)
    assert int(found[0]) == VALUES.astype(np.uint32).view(np.int32).max()
    assert int(found[1]) == 256


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "wgmma.fence.sync.aligned;",
            "wgmma.fence.sync.aligned is an instruction that this executor does not",
        ),
        ("add.rz.f32 %r1, %r2, %r3;", "add.rz.f32 is an instruction"),
        ("ld.global.b32 %r20, [%rd13+999996];", "in no tensor"),
        ("ld.global.b32 %r20, [%rd13+2];", "not a multiple of 4"),
        ("ld.shared.b32 %r20, [global_smem+1024];", "beyond its 1024 bytes"),
        ("setp.lt.u32 %p1, %r10, 9; @%p1 bar.sync 0;", "a part of a block waits"),
        ("setp.lt.u32 %p1, %r10, 9; @%p1 shfl.sync.bfly.b32 %r21, %r20, 1, 31, -1;", "a part of a warp"),
        ("shfl.sync.bfly.b32 %r21, %r20, 1, 15, -1;", "segments of a warp"),
        ("add.s64 %rd1, %r2, %r3;", "too narrow"),
        ("mov.b32 %q1, 0;", "does not declare"),
    ],
)
def test_what_is_unknown_or_undefined_is_refused(body, why):
    with pytest.raises(Refused, match=why):
        executed(body, VALUES, 2)


def test_every_table_entry_has_its_types():
    for opcode, does in ELEMENTWISE.items():
        assert width(does.result), opcode
        assert all(width(kind) for kind in does.sources), opcode


def test_a_kernel_takes_the_arguments_that_it_has():
    with pytest.raises(Refused, match="2 parameters, not 1"):
        run(parse(HEAD + "ret;\n}\n"), (1, 1, 1), [0], 0, Global([]))
