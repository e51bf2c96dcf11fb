"""torchtitan's own trainer under a recipe, on a CPU (`torchtitan_on_cpu.py` lists what is replaced)."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from integrations.test_trainers_page import PAGE, PROGRAMS


def close(losses, expected):
    """Within the order of sums: torchtitan's loss takes the head's input in pieces."""
    return losses == pytest.approx(expected, rel=1e-4)


def is_on_page(sentence):
    return " ".join(sentence.split()) in " ".join(PAGE.split())


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("thorough")
def test_one_process(ranks, tmp_path):
    """All in one process, since it takes ten seconds to import torchtitan."""
    (found,) = ranks(1, "jobs_torchtitan.one_process", folder=str(tmp_path / "out"))
    assert found["fp32"] == found["stock"]
    for mine, alone in found["own loops"].values():
        assert close(mine, alone)
    for recipe, whole in found["whole"].items():
        assert found["begun"][recipe] + found["went on"][recipe] == whole
        assert whole != found["stock"]
    assert found["converter"] == found["narrow"]
    assert "(fp8, mxfp8, nvfp4, coat and others)" in found["narrow weights"]
    assert is_on_page(found["only the layers"])
    assert "matches no linear layer" in found["no such layer"]


# a trainer with its own processes; distributed/ and the other integrations show its parts
@pytest.mark.tier("thorough")
def test_the_program_of_the_page(ranks):
    (losses,) = ranks(1, "jobs_torchtitan.page", program=PROGRAMS["torchtitan"])
    assert losses[-1] < 0.9 * losses[0]
