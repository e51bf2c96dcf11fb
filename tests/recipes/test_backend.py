"""Which code runs a recipe: by the facts of a device, always reported, and refused in a sentence."""

import pytest
import torch

from narrowgauge.recipes import (
    BACKENDS,
    Device,
    choose_backend,
    device_facts,
    named_device,
    parse_recipe,
    products_on,
    recipe,
    recipe_names,
)
from narrowgauge.system.errors import UserError


def nvidia(major, minor, cuda=(13, 0)):
    return Device(maker="nvidia", capability=(major, minor), library=cuda)


def amd(architecture):
    return Device(maker="amd", architecture=architecture, library=(7, 0))


NARROW = [n for n in recipe_names() if recipe(n).is_narrow]
CPU, H200 = Device(maker="cpu"), nvidia(9, 0)
PER_TENSOR = {"fp8", "fp8-delayed", "msamp-o1", "msamp-o2", "msamp-o3", "coat"}
PER_ROW = {"fp8-row", "fp8-row-hp"}
BLACKWELL = {"mxfp8", "bf16-fwd-mxfp8-bwd", "nvfp4", "nvfp4-finish", "nvfp4-4over6", "fp4-all"}
#: The recipes that are native, by device.
NATIVE = {
    nvidia(8, 0): set(),
    nvidia(8, 6): set(),
    nvidia(8, 9): PER_TENSOR | PER_ROW,
    nvidia(9, 0): PER_TENSOR | PER_ROW | {"fp8-block"},
    nvidia(9, 0, cuda=(12, 8)): PER_TENSOR | PER_ROW,
    nvidia(10, 0): PER_TENSOR | PER_ROW | BLACKWELL,
    nvidia(12, 0): PER_TENSOR | PER_ROW | BLACKWELL,
    amd("gfx90a"): set(),
    amd("gfx942"): {"fp8-fnuz"},
    amd("gfx950"): PER_TENSOR | PER_ROW,
    Device(maker="mps"): set(),
    CPU: set(),
}


@pytest.mark.parametrize("device", NATIVE, ids=str)
def test_what_is_native_where(device):
    assert {n for n in NARROW if choose_backend(recipe(n), device).name == "native"} == NATIVE[device]


E4M3 = '[fprop]\nx = "e4m3"\nw = "e4m3"\n'
BY_LAYERS = (
    f'{E4M3}[[rule]]\nmodules = ["a"]\nfprop.x = "e5m2"\n[[rule]]\nmodules = ["b"]\nfprop.w = "e5m2"\n'
)
BLOCKS_OF_E5M2 = (
    'fprop = "{0}"\nwgrad = "{0}"\ndgrad = {{dy = {{cast = "{0}", element = "e5m2"}}, w = "{0}"}}'
)
A100, CAPABILITY = nvidia(8, 0), "which takes compute capability"
#: (a recipe or its text, device): the backend and its reason, up to what follows.
REASONS = [
    ("bf16", H200, "native", "torch multiplies bf16 itself"),
    ("fp16", nvidia(7, 0), "native", "torch multiplies fp16 itself"),
    ("fp8", CPU, "emulated", "a CPU has no narrow matrix units; the same numbers in bf16 GEMMs"),
    ("fp8", H200, "native", "compute capability 9.0 multiplies FP8 with a scale per tensor"),
    ("fp8", A100, "emulated", f"fprop needs FP8 with a scale per tensor, {CAPABILITY} 8.9 or later; this is"),
    (
        "fp8",
        amd("gfx942"),
        "emulated",
        "fprop needs FP8 with a scale per tensor, which takes gfx950; this is",
    ),
    (
        "fp8-block",
        nvidia(9, 0, (12, 8)),
        "emulated",
        "fprop needs FP8 in blocks of 128, which takes CUDA 12.9",
    ),
    ("fp8-block", nvidia(10, 0), "emulated", f"fprop needs FP8 in blocks of 128, {CAPABILITY} 9.0; this is"),
    ("mxfp4", nvidia(10, 0), "emulated", "fprop multiplies mxfp4, which torch does on no device; "),
    # two operands of a product, in e5m2, in blocks of it, or one of them alone
    (f'{E4M3}[wgrad]\nx = "e4m3"', H200, "emulated", "wgrad "),
    (f'{E4M3}[wgrad]\nx = "e5m2"\ndy = "e5m2"', H200, "emulated", "wgrad multiplies e5m2"),
    (BLOCKS_OF_E5M2.format("mxfp8"), nvidia(10, 0), "emulated", "dgrad multiplies "),
    (BLOCKS_OF_E5M2.format("fp8-1x128"), H200, "emulated", "dgrad multiplies "),
    ('compute = "fp32"\nfprop = "e4m3"', H200, "emulated", "native GEMMs return bf16, and this recipe"),
    # rules count, and those of a layer that two select add up
    (E4M3, H200, "native", ""),
    (f'{E4M3}[[rule]]\nfrom_step = 5\nfprop = "mxfp4"\n', H200, "emulated", "fprop multiplies mxfp4"),
    (BY_LAYERS, H200, "emulated", "fprop multiplies e5m2"),
]


@pytest.mark.parametrize(("name", "device", "backend", "reason"), REASONS)
def test_a_backend_is_chosen_and_says_why(name, device, backend, reason):
    ours = parse_recipe(name, "mine") if "=" in name else recipe(name)
    found = choose_backend(ours, device)
    assert (found.name, found.reason[: len(reason)]) == (backend, reason)
    asked = choose_backend(ours, device, "emulated")
    assert asked.name == ("native" if backend == "native" and not ours.is_narrow else "emulated")
    assert (
        backend == "emulated" or not ours.is_narrow or asked.reason.startswith("asked for; the same numbers")
    )


def test_rules_of_attention_add_up():
    ours = parse_recipe('[[rule]]\nattention.q = "e4m3"\n[[rule]]\nattention.k = "e5m2"', "mine")
    assert ("e4m3", "e5m2") in [tuple(c.name for c in p.operands) for p in products_on(ours, CPU)]


@pytest.mark.parametrize("name", ["p100", "v100", "t4", "rtx2080ti", "mi50"])
def test_bf16_is_emulated_where_no_matrix_unit_has_it(name):
    device = named_device(name)
    backend = choose_backend(recipe("bf16"), device)
    assert backend.name == "emulated"
    assert backend.reason.endswith("the same numbers in fp32 GEMMs; recipe fp16 is native")
    narrow = choose_backend(recipe("fp8"), device)
    assert narrow.reason.endswith("the same numbers in bf16 GEMMs, which are fp32 GEMMs here")
    assert {product.obstacle for product in products_on(recipe("bf16"), device)} != {""}
    for newer in ("a100", "rtx3090", "mi100", "mi250x", "cpu"):
        assert choose_backend(recipe("bf16"), named_device(newer)).name == "native"


REFUSED = {
    "recipe 'fp8' cannot run natively here: a CPU has no narrow matrix units; use --backend emulated": (
        *("fp8", CPU, "native"),
    ),
    "bf16 takes .*use --backend emulated .*computed in fp32": ("bf16", nvidia(7, 0), "native"),
    "unknown backend 'emulate'; the nearest is 'emulated'": ("bf16", CPU, "emulate"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_backend_that_cannot_be(sentence):
    name, device, requested = REFUSED[sentence]
    with pytest.raises(UserError, match=sentence):
        choose_backend(recipe(name), device, requested)
    assert requested not in BACKENDS or choose_backend(recipe("fp32"), device, requested).name == "native"


#: Many names of a device that is not here.
NAMED = {
    **{"sm_89": nvidia(8, 9), "8.9": nvidia(8, 9), "rtx4090": nvidia(8, 9), "4090": nvidia(8, 9)},
    **{"NVIDIA GeForce RTX 4090": nvidia(8, 9), "H200": H200, "sm_120": nvidia(12, 0), "cpu": CPU},
    "gfx942": Device(maker="amd", architecture="gfx942"),
    "AMD Instinct MI250X": Device(maker="amd", architecture="gfx90a"),
}
UNKNOWN = {"rtx490": ".*rtx4090", "sm_99": ".*sm_90, sm_89", "gfx94": ".*gfx942", "100": ""}


def test_a_device_has_many_names_and_an_unknown_one_is_told_the_nearest():
    assert {name: named_device(name) for name in NAMED} == NAMED
    for name, nearest in UNKNOWN.items():
        with pytest.raises(UserError, match=f"unknown device '{name}'{nearest}"):
            named_device(name)
    assert device_facts(torch.device("cpu")) == CPU
    if torch.cuda.is_available():
        facts = device_facts(torch.device("cuda"))
        assert facts.maker in ("nvidia", "amd")
        assert facts.architecture.startswith("gfx") or facts.capability >= (5, 0)


@pytest.mark.parametrize(
    ("name", "device", "made_by", "gap"),
    [
        ("nvfp4", "b200", "Triton kernel", ""),
        ("nvfp4-4over6", "b200", "torch operations", "no Triton kernel implements candidates, choose"),
        ("nvfp4-4over6", "cpu", "C passes", ""),
        ("fp4", "h100", "Triton kernel", ""),  # the row kernel, which knows outliers
        ("fp4-ue5m3", "h100", "torch operations", "no Triton kernel implements refresh"),
        ("fp8", "v100", "torch operations", "Triton has no kernels for compute capability 7.0"),
        ("bf16", "h100", "torch conversion", ""),
    ],
)
def test_each_operand_names_the_code_that_makes_it(name, device, made_by, gap):
    (forward, *_) = products_on(recipe(name), named_device(device))
    assert forward.made_by is not None
    assert forward.made_by[0] == (made_by, gap)
