"""A tokenizer in the manner of Llama 2: a mark stands for each blank, and one begins every text.

Its decoder takes the blank of the first mark away.
"""

from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from narrowgauge.trainer.data.tokenization.tokenizer import Tokenizer, load_tokenizer

MARK = "\u2581"
_MERGES = [(MARK, "s"), ("t", "r"), (MARK, "tr"), ("a", "m"), (MARK, MARK), (MARK, "c")]


def write_llama2(path: Path) -> Tokenizer:
    """Write a tokenizer.json at `path`, and open it."""
    words = ["<unk>", "<s>", "</s>", MARK, *"abcdefghijklmnopqrstuvwxyz,.", *(a + b for a, b in _MERGES)]
    vocabulary = {word: i for i, word in enumerate(words)}
    library = Library(models.BPE(vocab=vocabulary, merges=_MERGES, unk_token="<unk>", fuse_unk=True))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    parts = [decoders.Replace(MARK, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    library.save(str(path))
    return load_tokenizer(path)
