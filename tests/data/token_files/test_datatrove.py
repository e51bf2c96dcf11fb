"""datatrove's files, made by the pipeline of the how-to: the documents, ids and tokenizer, or a refusal."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import load_tokenizer, open_data, prepare, train_bpe
from support.fault_table import case
from support.markdown import titled

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "tokens-from-datatrove.md"
ENDS = (4, 4, 9)  # of three documents, the second of them empty
IDS = [5, 6, 7, 0, 1, 2, 3, 4, 0]


def write(path, ids=IDS, ends=ENDS, tokenizer="tok.json", size=2, count=None):
    """A file, its index and its metadata."""
    np.array(ids, f"<u{size}").tofile(path)
    np.array(ends, "<u8").tofile(f"{path}.index")
    Path(f"{path}.metadata").write_text(f"{tokenizer}|{size}\n{len(ids) if count is None else count}\n9 T")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    train_bpe(["steam coal rail"] * 9, 270).save(tmp_path / "tok.json")
    return tmp_path


def test_documents_are_kept_apart_and_the_tokenizer_is_the_named_one(here):
    ids = np.resize(IDS, 9 * 40)
    ends = np.add.outer(9 * np.arange(40), ENDS).reshape(-1)
    path = write("x.ds", ids, ends)
    write("idle.ds", [], [], count=0)  # of a task that had nothing to read
    for source in ("x.ds", "x.*", "*.ds", "x.ds.index", "."):
        data = open_data(source)
        (train,), (val,) = data.train.streams, data.val.streams
        assert data.tokenizer.digest == load_tokenizer(here / "tok.json").digest
        assert [d.tolist() for d in train.documents()][:2] == [[5, 6, 7], [1, 2, 3, 4]]
        assert train.positions(0, train[:9]).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
        assert len(train) + len(val) == len(ids)
    write(path, ids, ends[1:])
    assert open_data("x.ds").digest != data.digest, "the index is a part of the digest"


def test_another_tokenizer_is_refused_and_one_that_is_not_here_is_asked_for(here):
    write("x.ds", np.resize(IDS, 180), np.arange(9, 181, 9))
    train_bpe(["steam coal rail"] * 9, 260).save(here / "other.json")
    words = r"x\.ds was made with tokenizer 'tok\.json' .* and not with the chosen"
    with pytest.raises(UserError, match=words):
        open_data("x.ds", "other.json")
    shutil.move("tok.json", "moved.json")
    for name in ("tok.json", "/nowhere/of another machine/tok.json"):
        write("x.ds", np.resize(IDS, 180), np.arange(9, 181, 9), name)
        with pytest.raises(UserError, match="which is not on this machine; name its"):
            open_data("x.ds")
        with pytest.warns(UserWarning, match="is not here, so the chosen one is not compared"):
            assert open_data("x.ds", "moved.json").tokenizer.vocab_size > 260
    write("x.ds", np.resize(IDS, 180), np.arange(9, 181, 9), size=4)
    shutil.copy("moved.json", "tok.json")
    with pytest.raises(UserError, match="ids of 4 bytes, and not with the chosen"):
        open_data("x.ds")
    write("y.ds", np.resize(IDS, 180), np.arange(9, 181, 9), "another")
    with pytest.raises(UserError, match=r"mixes layouts: x\.ds is datatrove with tokenizer tok\.json and y"):
        open_data("*.ds", "moved.json")


BAD = [
    (lambda: Path("x.ds.index").unlink(), "there is no .* next to it.*save_index=True"),
    (lambda: Path("x.ds.metadata").unlink(), "save_final_metadata=True"),
    (lambda: np.array(IDS[:-1], "<u2").tofile("x.ds"), "holds 8 ids, its index ends at 9"),
    (lambda: Path("x.ds.index").write_bytes(bytes(9)), "it has 9 bytes, and each end"),
    (lambda: write("x.ds", ends=(9, 4, 9)), "do not end one after the other"),
    (lambda: write("x.ds", count=12), "its metadata says 12"),
    (lambda: Path("x.ds.loss").write_bytes(bytes(9)), "masks targets, which is not read"),
]


@case("F2", tier="quick")
def test_a_damaged_file_is_refused(here):
    """A .ds was bare uint16, and its index was not read."""
    for change, words in BAD:
        write("x.ds")
        change()
        with pytest.raises(UserError, match=rf"x\.ds.* cannot be read as tokens: .*{words}"):
            open_data("x.ds")


@pytest.mark.tier("thorough")  # starts datatrove
def test_the_pipeline_of_the_how_to_makes_the_ids_of_prepare(here):
    (script,) = titled(PAGE.read_text(encoding="utf-8")).items()
    Path(script[0]).write_text(script[1], encoding="utf-8")
    Path("texts").mkdir()
    texts = [f"Document {i} of caf\u00e9s,  coal\n\n" + "steam and rail " * (i % 40) for i in range(200)]
    for part in range(2):
        parquet.write_table(pyarrow.table({"text": texts[part::2]}), f"texts/{part}.parquet")
    corpus = prepare("texts", "bpe-300", here / "corpora" / "sample")
    subprocess.run([sys.executable, script[0]], check=True, capture_output=True)
    data = open_data("tokens")
    assert data.tokenizer.digest == corpus.tokenizer.digest
    found = [d.tolist() for part in (data.train, data.val) for d in part.streams[0].documents()]
    assert sorted(found) == sorted(corpus.tokenizer.encode(text) for text in texts)
    assert sum(map(len, found)) + len(texts) == corpus.manifest.train_tokens + corpus.manifest.val_tokens
