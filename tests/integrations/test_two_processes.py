"""The integrations under torchrun: two processes, gloo, DDP as the trainers make it."""

import pytest

RECIPES = ["fp8-delayed", "nvfp4", "msamp-o3"]
PACKAGES = {
    "trainer": ["transformers", "accelerate"],
    "lightning": ["lightning"],
    "accelerated": ["accelerate"],
}
ADAPTERS, PREPARED = {"has_adapters": True}, {"is_prepared": True}

#: A job and a recipe; the first three run in CI.
CASES = [
    ("trainer", "nvfp4", {}),
    ("lightning", "msamp-o3", {}),
    ("accelerated", "msamp-o3", ADAPTERS),
    *[("accelerated", name, how) for name in ("nvfp4", "msamp-o3") for how in ({}, PREPARED)],
    ("accelerated", "msamp-o3", ADAPTERS | PREPARED),
    *[(job, name, {}) for job in ("trainer", "lightning") for name in RECIPES],
]


def needs(*packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=3)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("job", "recipe", "how"), CASES, ids=str)
def test_replicas_stay_equal_and_resume_to_the_last_digit(torchrun, tmp_path, job, recipe, how):
    """Accumulation, clipping and DDP; from the trainer's own checkpoint, or what `save_state` wrote."""
    needs(*PACKAGES[job], *["peft"] * ("has_adapters" in how))
    found = torchrun(2, f"jobs_trainers.{job}", recipe=recipe, folder=str(tmp_path / "out"), **how)
    for each in found:
        assert each["same"]
        assert each["again"] == each["losses"]
    losses = found[0]["losses"]  # of the whole batch, or of each process's part
    assert losses["6"] < losses["1"] if job == "trainer" else losses != found[1]["losses"]


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=("nvfp4",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", RECIPES)
def test_fabric_as_one_process_with_all_sequences(torchrun, recipe):
    """Random bits follow from a sequence's place in the whole batch."""
    needs("lightning")
    found = torchrun(2, "jobs_trainers.fabric", recipe=recipe)
    losses = [loss for pair in zip(*(each["losses"] for each in found), strict=True) for loss in pair]
    assert all(each["same"] for each in found)
    tolerance = 1e-2 if recipe == "msamp-o3" else 2e-3  # its gradients are rounded in each sum
    assert losses == pytest.approx(found[0]["alone"], rel=tolerance)
