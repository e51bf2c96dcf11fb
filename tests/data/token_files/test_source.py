"""Tokens of others as a data source: which files, which are held out, which tokenizer; what is refused."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.data import ids_tokenizer, open_data, write_megatron, write_token_file
from narrowgauge.trainer.data.token_files.source import token_files
from support.fault_table import case
from support.hostile import Bomb

END = 50256


def text_like(count, seed=0, end=END):
    """Ids as of a text: documents of 5 to 40 tokens, each after the id that ends the one before."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.geometric(0.02, count), 500)
    borders = np.cumsum(rng.integers(5, 40, count // 5))
    ids[borders[borders < count]] = end
    ids[0] = end
    return ids


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(source):
    found = token_files(source)
    return found and tuple([str(file.path) for file in part] for part in found)


def write(*paths):
    for i, path in enumerate(paths):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_token_file(Path(path), [text_like(2000, i)], 50257)


def test_the_held_out_part_is_found_by_name():
    write(*(f"a/{name}.bin" for name in ("x_train_1", "x_train_2", "x_val_0", "x_test", ".hidden")))
    Path("a/notes.txt").write_text("text beside tokens\n")
    write("b/train.bin", "b/val.bin", "c/train-000.bin", "c/eval.bin", "d/validation.bin", "d/valiant.bin")
    train, val = ["a/x_train_1.bin", "a/x_train_2.bin"], ["a/x_val_0.bin"]
    for source, found in {
        **dict.fromkeys(("a", "a/x_train_*.bin"), (train, val)),
        "a/x_train_1.bin": (train[:1], []),
        "a/x_val_0.bin": (val, []),
        "b/train.bin": (["b/train.bin"], ["b/val.bin"]),
        "c": (["c/train-000.bin"], ["c/eval.bin"]),
        "d": (["d/valiant.bin"], ["d/validation.bin"]),
    }.items():
        assert names(source) == found, source


def test_documents_and_further_tokens_beside_token_files_are_named():
    """A folder with a token file is a source of tokens, and its lines were left out in silence."""
    write("a/x.bin", "a/more/y.bin")
    Path("a/z.jsonl").write_text('{"text": "document"}')
    Path("a/tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"'a' leaves out 2 of 3 files .*: y\.bin, z\.jsonl; convert"):
        assert names("a") == (["a/x.bin"], [])


def test_what_holds_no_tokens_is_left_to_others():
    os.makedirs("text")
    Path("text/a.txt").write_text("words and words\n" * 100)
    Path("text/picture.bin").write_bytes(np.random.default_rng(0).bytes(10000))
    for source in ("text", "text/a.txt", "text/*", "text/*.txt", "nothing", "none/*.bin", "stdlib"):
        assert names(source) is None


def test_a_megatron_pair_goes_by_any_of_its_names():
    write_megatron(Path("wiki_text_document"), [text_like(3000)], 50257)
    for source in ("wiki_text_document", "wiki_text_document.bin", "wiki_text_document.idx", "wiki*"):
        assert names(source) == (["wiki_text_document.bin"], [])
    Path("wiki_text_document.bin").unlink()
    with pytest.raises(UserError, match=r"document\.idx .* there is no wiki_text_document\.bin next to"):
        names("wiki_text_document")


def test_token_source_without_a_held_out_file_holds_out_the_tail_from_a_document_start():
    ids = text_like(30_000)
    write_token_file(Path("x.bin"), [ids], 50257)
    data = open_data("x.bin")
    (train,), (val,) = data.train.streams, data.val.streams
    assert np.array_equal(np.concatenate([train[:], val[:]]), ids)
    assert val[0:1].tolist() == [END]
    assert 2800 < len(val) <= 3000
    documents = [part for part in np.split(ids, np.flatnonzero(ids == END)) if len(part)]
    write_megatron(Path("y"), [np.append(d[1:], END) for d in documents], 50257)
    (val,) = open_data("y").val.streams
    assert val.starts is not None
    assert val.first in val.starts


@pytest.mark.tier("thorough")  # GPT-2's tokenizer takes a second
def test_tokens_without_a_word_on_their_tokenizer_are_gpt2s_or_refused():
    write("x.bin")
    tokenizer = open_data("x.bin").tokenizer
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50257, END)
    assert tokenizer.decode([12, END]) == " 12 <|endoftext|>"
    Path("bare").write_bytes(text_like(5000).astype("<u2").tobytes())
    assert open_data("bare").tokenizer.digest == tokenizer.digest
    Path("letters").write_bytes((text_like(5000, end=64) % 65).astype("<u2").tobytes())
    words = r"letters \(bare uint16\) does not state which tokenizer made it, and its largest id is 64; name"
    with pytest.raises(UserError, match=words + r" .* --data\.tokenizer ids-66"):
        open_data("letters")
    write_token_file(Path("llama.bin"), [np.append(text_like(3000, end=128000), 128255)], 128256)
    data = open_data("llama.bin")
    assert (data.tokenizer.vocab_size, data.train.streams[0].boundaries) == (128256, (128000,))


def test_a_tokenizer_beside_the_tokens_is_theirs():
    os.makedirs("x")
    write_token_file(Path("x/train.bin"), [text_like(3000, end=500)], 501)
    ids_tokenizer(501, 500).save(Path("x/tokenizer.json"))
    data = open_data("x")
    assert (data.tokenizer.vocab_size, data.train.streams[0].boundaries) == (501, (500,))
    for name, words in (
        ("bpe-300", "tokenizer 'bpe-300' would be trained on text; name the tokenizer that"),
        ("bytes", r"x/train\.bin .* token \d+ has id 500, but the vocabulary ends at 256"),
    ):
        with pytest.raises(UserError, match=words):
            open_data("x", name)


@case("F3", tier="quick")
def test_token_source_refuses_an_id_beyond_the_vocabulary_with_its_place_each_time():
    ids = text_like(3000, end=500)
    write_megatron(Path("y"), [ids], 100_000)
    ids[1234] = 600
    write_token_file(Path("x.bin"), [ids], 65536)
    raw = np.memmap("y.bin", dtype="<i4", mode="r+")
    raw[7] = -1
    raw.flush()
    for _ in range(2):
        with pytest.raises(UserError, match=r"x\.bin .* token 1234 has id 600, but .* ends at 500"):
            open_data("x.bin", "ids-501")
        with pytest.raises(UserError, match=r"y\.bin .* token 7 has id -1"):
            open_data("y", "ids-501")


def test_other_tokens_are_another_digest_also_under_the_old_time():
    """rsync, tar and cp -p set the time of the file they copy; the digest was that of the old tokens."""
    write_token_file(Path("x.bin"), [text_like(2000, end=500)], 501)
    before, was = open_data("x.bin", "ids-501").digest, os.stat("x.bin")
    shutil.copy("x.bin", "copy.bin")
    assert open_data("copy.bin", "ids-501").digest == before != open_data("copy.bin", "ids-502").digest
    ids = np.fromfile("x.bin", "<u2")
    for other in (60_000, 7):
        ids[513] = other
        ids.tofile("x.bin")
        os.utime("x.bin", ns=(was.st_atime_ns, was.st_mtime_ns))
        if other == 7:
            assert open_data("x.bin", "ids-501").digest != before
        else:
            with pytest.raises(UserError, match="token 1 has id 60000, but the vocabulary ends at 500"):
                open_data("x.bin", "ids-501")


def test_mixed_and_useless_sources_are_refused():
    write("m/a.bin", "v/val.bin", "v/test.bin")
    Path("m/b.bin").write_bytes(text_like(5000).astype("<u2").tobytes())
    Path("cut.bin").write_bytes(Path("m/a.bin").read_bytes()[:-2])
    shutil.copytree("m", "n")
    Path("n/meta.pkl").write_bytes(pickle.dumps({"itos": list(range(3000))}))
    no_tokens = r"leads to token files and to n/meta\.pkl, which does not hold tokens; narrow the glob"
    for source, words in (
        ("m", r"mixes layouts: m/a\.bin is llm\.c uint16 and m/b\.bin is bare uint16"),
        ("n/*", no_tokens),
        ("v", "'v' holds nothing to train on: by their names its files are held out"),
        ("cut.bin", r"cut\.bin cannot be read as tokens: its header promises 2000 tokens"),
    ):
        with pytest.raises(UserError, match=words):
            open_data(source)


@case("C5", tier="quick")
def test_a_pickle_is_never_opened(tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    np.save("objects.npy", np.array([bomb], object), allow_pickle=True)
    for name in ("objects.npy", "train.bin", "train.txt", "meta.pkl"):
        if name != "objects.npy":
            Path(name).write_bytes(pickle.dumps(bomb))
        with pytest.raises(UserError):
            open_data(name)
    assert not (tmp_path / "exploded").exists()
