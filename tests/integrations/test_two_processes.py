"""The integrations on two processes, gloo, DDP as the trainers make it."""

import pytest

PACKAGES = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("thorough", nightly=("trainer-nvfp4", "lightning-msamp-o3"))
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "msamp-o3"])
@pytest.mark.parametrize("job", PACKAGES)
def test_replicas_stay_equal_and_resume_to_the_last_digit(ranks, tmp_path, job, recipe):
    """Accumulation, clipping and DDP; from the trainer's own checkpoint."""
    for package in PACKAGES[job]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    found = ranks(2, f"jobs_trainers.{job}", recipe=recipe, folder=str(tmp_path / "out"))
    for each in found:
        assert each["same"]
        assert each["again"] == each["losses"]
    losses = found[0]["losses"]  # of the whole batch, or of each process's part
    assert losses["6"] < losses["1"] if job == "trainer" else losses != found[1]["losses"]
