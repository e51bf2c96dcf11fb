"""A prepared corpus is opened as it was written, or refused by the name of the file that is not."""

import json

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import open_corpus, prepare
from support.fault_table import case

DAMAGE = {"flip": lambda raw: raw[:-9] + bytes([raw[-9] ^ 0x80]) + raw[-8:], "cut": lambda raw: raw[:-2]}
DAMAGE |= {"empty": lambda raw: b"", "missing": None}


@case("F2", tier="quick")
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "train.bin", "val.bin"])
def test_damage_to_any_file_is_found_at_opening_and_named(source, tmp_path, name):
    directory = prepare(source, "bytes", tmp_path / "out").directory
    path, whole = directory / name, (directory / name).read_bytes()
    for kind, damage in DAMAGE.items():
        path.write_bytes(damage(whole)) if damage else path.unlink()
        with pytest.raises(UserError) as caught:
            open_corpus(directory)
        if (name, kind) == ("manifest.json", "missing"):
            assert f"there is no prepared corpus in {directory}; make one with" in str(caught.value)
        else:
            assert f"{path} is damaged" in str(caught.value)
            assert f"delete the directory {directory} and prepare it again" in str(caught.value)
    with pytest.raises(UserError):
        prepare(source, "bytes", directory)


def test_a_manifest_of_another_vocabulary_than_the_tokenizers_is_refused(source, tmp_path):
    directory = prepare(source, "bpe-300", tmp_path / "out").directory
    manifest = open_corpus(directory).manifest.model_copy(update={"vocab_size": 280})
    (directory / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(UserError, match="it has 300 ids, but the tokens need 280"):
        open_corpus(directory)


def test_a_manifest_of_another_kind_is_refused(source, tmp_path):
    directory = prepare(source, "bytes", tmp_path / "out").directory
    path = directory / "manifest.json"
    whole = json.loads(path.read_text())
    for change in ({"layout": 3}, {"layout": "1"}, {"extra": 1}, {"val_tokens": True}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=r"has layout 3|is damaged: its keys or their types do not match"):
            open_corpus(directory)


def test_the_manifest_of_another_program_is_no_damage(tmp_path):
    """The advice was to delete the folder that was named with --out."""
    path = tmp_path / "manifest.json"
    path.write_text('{"name": "an app"}')
    (tmp_path / "a.txt").write_text("text " * 5000)
    with pytest.raises(UserError, match=f"^{path} is not the manifest of a prepared corpus; name another"):
        prepare(str(tmp_path / "a.txt"), "bytes", tmp_path)
