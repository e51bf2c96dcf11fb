"""The integrations under torchrun: two processes, gloo, DDP as the trainers make it."""

import pytest

RECIPES = ["fp8-delayed", "nvfp4", "msamp-o3"]


def needs(*packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=("nvfp4",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer(torchrun, tmp_path, recipe):
    """Replicas stay equal, and training from the trainer's checkpoint continues to the same digits."""
    needs("transformers", "accelerate")
    found, other = torchrun(2, "jobs_trainers.trainer", recipe=recipe, folder=str(tmp_path / "out"))
    assert found["same"]
    assert other["same"]
    assert len(found["losses"]) == 6
    assert found["losses"]["6"] < found["losses"]["1"]
    assert found["again"] == found["losses"]


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("thorough")
def test_trainer_with_fsdp2_is_refused(torchrun, tmp_path):
    needs("transformers", "accelerate")
    for sentence in torchrun(2, "jobs_trainers.refused_by_trainer", folder=str(tmp_path / "out")):
        assert "train with DDP (torchrun) under any recipe" in sentence


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=("msamp-o3",))
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("recipe", RECIPES)
def test_lightning(torchrun, tmp_path, recipe):
    """Accumulation, clipping, DDP: equal replicas, resumed by Lightning's own means to the last digit."""
    needs("lightning")
    found = torchrun(2, "jobs_trainers.lightning", recipe=recipe, folder=str(tmp_path / "out"))
    assert found[0]["losses"] != found[1]["losses"]
    for each in found:
        assert each["same"]
        assert each["again"] == each["losses"]


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=2)
@pytest.mark.tier("thorough")
@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "plain"])
@pytest.mark.parametrize(
    ("recipe", "has_adapters"),
    [("nvfp4", False), ("msamp-o3", False), ("msamp-o3", True)],
    ids=["nvfp4", "msamp-o3", "msamp-o3 with PEFT"],
)
def test_accelerate(torchrun, tmp_path, recipe, has_adapters, is_prepared):
    """Processes that start again continue to the same digits, from what `save_state` wrote."""
    needs("accelerate", *["peft"] * has_adapters)
    how = {"recipe": recipe, "folder": str(tmp_path / "state"), "has_adapters": has_adapters}
    whole = torchrun(2, "jobs_trainers.accelerated", is_prepared=is_prepared, **how)
    again = torchrun(2, "jobs_trainers.accelerated", is_prepared=is_prepared, start=3, **how)
    assert whole[0]["losses"] != whole[1]["losses"]
    for each, continued in zip(whole, again, strict=True):
        assert each["same"]
        assert continued["same"]
        assert continued["losses"] == each["losses"][3:]


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("nightly", keep=1)
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
