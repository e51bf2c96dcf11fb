"""Which code runs a recipe: by the facts of a device, always reported, and refused in a sentence."""

import tomllib
from collections import Counter

import pytest
import torch

from narrowgauge.cluster.doctor.torch_setup.builds import BUILDS
from narrowgauge.errors import UserError
from narrowgauge.files import shipped_text
from narrowgauge.recipes import (
    BACKENDS,
    SCHEMES,
    Device,
    choose_backend,
    device_facts,
    named_device,
    parse_recipe,
    products_on,
    recipe,
    recipe_names,
)

NARROW = [n for n in recipe_names() if recipe(n).is_narrow]
CPU = Device(maker="cpu")
H200 = Device(maker="nvidia", capability=(9, 0), library=(13, 0))
PER_TENSOR = {"fp8", "fp8-delayed", "msamp-o1", "msamp-o2", "msamp-o3", "coat"}
PER_ROW = {"fp8-row", "fp8-row-hp"}
BLACKWELL = {"mxfp8", "bf16-fwd-mxfp8-bwd", "nvfp4", "nvfp4-finish", "nvfp4-4over6", "fp4-all"}


def nvidia(major, minor, cuda=(13, 0)):
    return Device(maker="nvidia", capability=(major, minor), library=cuda)


@pytest.mark.parametrize(
    ("gradient", "operand", "device"),
    [
        ('"mxfp8-e5m2"', "mxfp8", nvidia(10, 0)),
        ('{element = "e5m2", block = [1, 128], scale = "fp32"}', "fp8-1x128", H200),
    ],
)
def test_torch_multiplies_e5m2_in_blocks_nowhere(gradient, operand, device):
    text = f'compute = "bf16"\nfprop = "{operand}"\nwgrad = "{operand}"\n'
    text += f'[dgrad]\ndy = {gradient}\nw = "{operand}"\n'
    backend = choose_backend(parse_recipe(text, "mine"), device)
    assert backend.name == "emulated"
    assert backend.reason.startswith("dgrad multiplies ")
    assert "which torch does on no device" in backend.reason


@pytest.mark.parametrize("requested", BACKENDS)
@pytest.mark.parametrize("device", [CPU, H200])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_references_are_native_everywhere(name, device, requested):
    backend = choose_backend(recipe(name), device, requested)
    assert backend.name == "native"
    assert backend.reason == f"torch multiplies {name} itself"


@pytest.mark.parametrize("requested", ["auto", "emulated"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_recipes_are_emulated_on_a_cpu_and_say_why(name, requested):
    backend = choose_backend(recipe(name), CPU, requested)
    assert backend.name == "emulated"
    assert backend.reason == "a CPU has no narrow matrix units; the same numbers in bf16 GEMMs"


@pytest.mark.parametrize(
    ("device", "native"),
    [
        (nvidia(8, 0), set()),
        (nvidia(8, 6), set()),
        (nvidia(8, 9), PER_TENSOR | PER_ROW),
        (nvidia(9, 0), PER_TENSOR | PER_ROW | {"fp8-block"}),
        (nvidia(9, 0, cuda=(12, 8)), PER_TENSOR | PER_ROW),
        (nvidia(10, 0), PER_TENSOR | PER_ROW | BLACKWELL),
        (nvidia(12, 0), PER_TENSOR | PER_ROW | BLACKWELL),
        (Device(maker="amd", architecture="gfx90a", library=(7, 0)), set()),
        (Device(maker="amd", architecture="gfx942", library=(7, 0)), {"fp8-fnuz"}),
        (Device(maker="amd", architecture="gfx950", library=(7, 0)), PER_TENSOR | PER_ROW),
        (Device(maker="mps"), set()),
    ],
    ids=lambda v: str(v) if isinstance(v, Device) else "",
)
def test_what_is_native_where(device, native):
    assert {n for n in NARROW if choose_backend(recipe(n), device).name == "native"} == native


@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("fp8", H200, "compute capability 9.0 multiplies FP8 with a scale per tensor"),
        (
            "fp8",
            nvidia(8, 6),
            "fprop needs FP8 with a scale per tensor, which takes compute capability 8.9 or later; this is "
            "compute capability 8.6 with CUDA 13.0; the same numbers in bf16 GEMMs",
        ),
        (
            "fp8-block",
            nvidia(9, 0, cuda=(12, 8)),
            "fprop needs FP8 in blocks of 128, which takes CUDA 12.9 or later; this is compute capability "
            "9.0 with CUDA 12.8; the same numbers in bf16 GEMMs",
        ),
        (
            "fp8-block",
            nvidia(10, 0),
            "fprop needs FP8 in blocks of 128, which takes compute capability 9.0; this is compute "
            "capability 10.0 with CUDA 13.0; the same numbers in bf16 GEMMs",
        ),
        (
            "mxfp4",
            nvidia(10, 0),
            "fprop multiplies mxfp4, which torch does on no device; the same numbers in bf16 GEMMs",
        ),
        (
            "fp8",
            Device(maker="amd", architecture="gfx942"),
            "fprop needs FP8 with a scale per tensor, which takes gfx950; this is gfx942; the same numbers "
            "in bf16 GEMMs",
        ),
    ],
)
def test_the_reason_in_words(name, device, reason):
    assert choose_backend(recipe(name), device).reason == reason


def test_a_wish_for_emulation_is_granted_and_said():
    backend = choose_backend(recipe("fp8"), H200, "emulated")
    assert (backend.name, backend.reason) == ("emulated", "asked for; the same numbers in bf16 GEMMs")


def test_one_narrow_place_makes_a_recipe_emulated():
    mixed = recipe("bf16").with_places({"wgrad.x": "e4m3"})
    assert choose_backend(mixed, H200).name == "emulated"
    assert choose_backend(mixed.with_places({"wgrad.dy": "e5m2"}), H200).name == "native"


def test_two_e5m2_operands_are_no_product_of_the_hardware():
    assert choose_backend(recipe("fp8").with_places({"wgrad.x": "e5m2"}), H200).name == "emulated"


def test_a_recipe_that_computes_in_fp32_is_emulated():
    backend = choose_backend(recipe("fp32").with_places({"fprop": "e4m3"}), H200)
    assert backend.reason.startswith("native GEMMs return bf16, and this recipe computes in fp32")


def test_every_rule_counts_and_rules_add_up():
    text = '[fprop]\nx = "e4m3"\nw = "e4m3"\n'
    assert choose_backend(parse_recipe(text, "mine"), H200).name == "native"
    late = text + '[[rule]]\nfrom_step = 5\nfprop = "mxfp4"\n'
    assert "mxfp4" in choose_backend(parse_recipe(late, "mine"), H200).reason
    two = text + '[[rule]]\nmodules = ["a"]\nfprop.x = "e5m2"\n[[rule]]\nmodules = ["b"]\nfprop.w = "e5m2"\n'
    assert "e5m2" in choose_backend(parse_recipe(two, "mine"), H200).reason  # of a layer that both select


@pytest.mark.parametrize("name", NARROW)
def test_native_is_refused_on_a_cpu_with_the_reason_and_the_way_out(name):
    with pytest.raises(UserError) as caught:
        choose_backend(recipe(name), CPU, "native")
    assert str(caught.value) == (
        f"recipe '{name}' cannot run natively here: a CPU has no narrow matrix units; "
        "use --backend emulated (the same numbers, computed in bf16)"
    )


def test_an_unknown_wish():
    with pytest.raises(UserError, match="unknown backend 'emulate'; the nearest is 'emulated'"):
        choose_backend(recipe("bf16"), CPU, "emulate")


def test_the_facts_of_this_machine():
    assert device_facts(torch.device("cpu")) == CPU
    if torch.cuda.is_available():
        facts = device_facts(torch.device("cuda"))
        assert facts.maker in ("nvidia", "amd")
        assert facts.architecture.startswith("gfx") or facts.capability >= (5, 0)


def test_no_two_schemes_have_one_name():
    assert set(Counter(s.words for s in SCHEMES).values()) == {1}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("sm_89", nvidia(8, 9)),
        ("8.9", nvidia(8, 9)),
        ("rtx4090", nvidia(8, 9)),
        ("NVIDIA GeForce RTX 4090", nvidia(8, 9)),
        ("H200", H200),
        ("sm_120", nvidia(12, 0)),
        ("gfx942", Device(maker="amd", architecture="gfx942")),
        ("AMD Instinct MI250X", Device(maker="amd", architecture="gfx90a")),
        ("cpu", CPU),
    ],
)
def test_a_device_that_is_not_here_has_many_names(name, device):
    assert named_device(name) == device


@pytest.mark.parametrize(
    ("name", "nearest"), [("rtx490", "rtx4090"), ("sm_99", "sm_90, sm_89"), ("gfx94", "gfx942")]
)
def test_an_unknown_device_is_told_the_nearest(name, nearest):
    with pytest.raises(UserError, match=f"unknown device '{name}'; the nearest are .*{nearest}"):
        named_device(name)


def test_each_product_of_a_recipe_has_its_own_verdict():
    """FP4 forward is emulated on every device, its FP8 gradients would be native: all of it is emulated."""
    products = products_on(recipe("fp4"), named_device("rtx4090"))
    verdicts = {(p.gemm, p.operands[0].name): bool(p.obstacle) for p in products}
    assert verdicts[("fprop", "fp4-row")]
    assert not any(verdicts[key] for key in (("dgrad", "e5m2"), ("wgrad", "e5m2"), ("fprop", "bf16")))
    assert choose_backend(recipe("fp4"), named_device("rtx4090")).name == "emulated"


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


@pytest.mark.parametrize("name", ["p100", "v100", "t4", "rtx2080ti", "mi50"])
def test_bf16_is_emulated_where_no_matrix_unit_has_it(name):
    """Matrix units for bf16 came with Ampere and CDNA; before, fp16 is what trains fast."""
    device = named_device(name)
    backend = choose_backend(recipe("bf16"), device)
    assert backend.name == "emulated"
    assert backend.reason.endswith("the same numbers in fp32 GEMMs; recipe fp16 is native")
    assert choose_backend(recipe("fp16"), device).name == "native"
    narrow = choose_backend(recipe("fp8"), device)
    assert narrow.reason.endswith("the same numbers in bf16 GEMMs, which are fp32 GEMMs here")
    assert {product.obstacle for product in products_on(recipe("bf16"), device)} != {""}
    with pytest.raises(UserError, match=r"bf16 takes .*use --backend emulated .*computed in fp32"):
        choose_backend(recipe("bf16"), device, "native")


@pytest.mark.parametrize("name", ["a100", "rtx3090", "mi100", "mi250x", "cpu"])
def test_bf16_is_native_elsewhere(name):
    assert choose_backend(recipe("bf16"), named_device(name)).reason == "torch multiplies bf16 itself"


def test_a_device_elsewhere_has_a_cuda_that_torch_is_built_for():
    """CUDA 13 has no code for what came before Turing."""
    assert {named_device("v100").library, named_device("p100").library} == {(12, 6)}
    for capability in tomllib.loads(shipped_text("recipes", "devices"))["nvidia"]:
        device = named_device(capability)
        (build,) = (build for build in BUILDS if build.cuda == device.library)
        assert build.capability[0] <= device.capability <= build.capability[1]


def test_the_ending_of_a_name_stands_for_the_one_product_that_has_it():
    assert named_device("4090") == named_device("rtx4090")
    with pytest.raises(UserError, match="unknown device '100'"):
        named_device("100")
