"""`recipes`: what differs between two, and a recipe for another tool."""

import pytest

from narrowgauge.cli.main import main


def said(capsys):
    printed = capsys.readouterr()
    return " ".join(printed.out.split()), printed.err


def test_only_what_differs_is_shown_and_places_that_are_alike_stand_together(capsys):
    assert main(["recipes", "fp8", "--diff", "fp8-row"]) == 0
    out, _ = said(capsys)
    assert "fprop.x, fprop.w, dgrad.w, wgrad.x e4m3 fp8-row power_of_two=true" in out
    assert "dgrad.dy, wgrad.dy e5m2 fp8-row power_of_two=true" in out
    assert "saved operand input" in out
    assert "master" not in out
    assert "keep" not in out


def test_a_recipe_does_not_differ_from_itself(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('compute = "bf16"\nfprop = "e4m3"\n')
    assert main(["recipes", str(file), "--diff", str(file)]) == 0
    assert "are equal in every place" in said(capsys)[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fp8", "--diff", "fp9"], "unknown recipe 'fp9'; the nearest is 'fp8'"),
        (["fp9", "--diff", "fp8"], "unknown recipe 'fp9'; the nearest is 'fp8'"),
        (["--diff", "fp8"], "--diff is about one recipe, and none is named"),
        (["--to", "te"], "--to is about one recipe, and none is named"),
        (["fp8", "--to", "torcha"], "unknown target 'torcha'; the nearest is 'torchao'"),
        (["fp8-row", "--to", "te"], 'block = "row", where te has "tensor"'),
        (["--from", "te"], "--from reads a file of another tool, and none is named"),
        (["fp8", "--from", "te"], "fp8 cannot be read"),
        (["fp8", "--from", "qwix"], "unknown source 'qwix'"),
        (["nvfp4", "--to", "megatron"], "give the number of blocks with --blocks N"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert main(["recipes", *words]) == 2
    out, err = said(capsys)
    assert not out
    assert sentence in err


def test_a_recipe_for_another_tool_is_printed_as_a_file(capsys):
    assert main(["recipes", "fp8-row", "--to", "torchao"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Recipe fp8-row of narrowgauge")
    compile(out, "torchao.py", "exec")


def test_a_file_of_a_tool_is_printed_as_a_recipe_and_goes_to_another_tool(capsys, tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("r = Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=False)\n")
    assert main(["recipes", str(file), "--from", "te"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("# Lost: fp8_gemm_fprop with use_split_accumulator=False")
    (tmp_path / "mine.toml").write_text(out)
    assert main(["recipes", str(tmp_path / "mine.toml"), "--to", "torchao"]) == 0
    mine = capsys.readouterr().out
    assert main(["recipes", str(file), "--from", "te", "--to", "torchao"]) == 0
    # The comments at the top name the line that wrote each, the file and its tool.
    theirs = capsys.readouterr().out
    assert "--from te --to torchao" in theirs
    assert theirs.partition("\n\n")[2] == mine.partition("\n\n")[2]
    assert "cast_config_input=CastConfig" in mine
