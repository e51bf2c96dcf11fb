"""Wikipedia dumps: articles in order as prose, from any kind of file; and the error of a broken one."""

import bz2
import gzip
import os
import re
from pathlib import Path

import pytest

from narrowgauge.data import documents, prepare
from narrowgauge.errors import UserError

# A small dump, made up: what an article can hold, and the pages that are none.
HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="xx">
  <siteinfo>
    <sitename>Example</sitename>
    <namespaces>
      <namespace key="-2" case="first-letter">Medium</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Bilddatei</namespace>
      <namespace key="14" case="first-letter">Sachgebiet</namespace>
    </namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"

IRON = """{{Infobox|name=Iron|image=[[Bilddatei:Fe.jpg|thumb|An [[ingot]]]]|note={{nested|{{deep}}}}}}
'''Iron''' ({{lang-la|ferrum}}) is a [[metal]]&nbsp;of [[group 8 element|group 8]].<ref name="a">A
[[book]], p. 3.</ref> It ''rusts''.<!-- does it? -->

[[Bilddatei:Rust.jpg|thumb|Rust on a [[bridge]], see [[File:x.png|10px]]]]
== Uses ==
Tools &ndash; and [http://example.org nails].
{| class="wikitable"
! Year !! Tons
|-
| 1900 || 40
|}
=== Steel ===
* H<sub>2</sub>O is not in it
== References ==
{{reflist}}
[[Sachgebiet:Metals]]
[[de:Eisen]]
__NOTOC__
"""
IRON_TEXT = """Iron

Iron is a metal of group 8. It rusts.

Uses

Tools \u2013 and nails.

Steel

H2O is not in it
"""


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def page(title: str, text: str, namespace: int = 0, extra: str = "", model: str = "wikitext") -> str:
    return f"""  <page>
    <title>{escaped(title)}</title>
    <ns>{namespace}</ns>
    <id>1</id>{extra}
    <revision>
      <id>2</id>
      <model>{model}</model>
      <text bytes="{len(text)}" xml:space="preserve">{escaped(text)}</text>
    </revision>
  </page>
"""


def pages() -> list[str]:
    return [
        page("Iron", IRON),
        page("Ferrum", "#REDIRECT [[Iron]]", extra='\n    <redirect title="Iron" />'),
        page("Eisen", "#WEITERLEITUNG [[Iron]]"),
        page("Talk:Iron", "What about [[rust]]?", namespace=1),
        page("Template:Deep", "{{{1}}}", namespace=10),
        page("Iron.css", "a { color: red }", model="css"),
        page("Blank", "{{stub}}"),
        page("Coal & <coke>", "'''Coal''' is black."),
        page("Steam", "Steam is '''white'''."),
    ]


def dump(body: list[str] | None = None) -> str:
    return HEAD + "".join(pages() if body is None else body) + TAIL


def multistream(body: list[str], each: int) -> bytes:
    """As the big wikis hand theirs out: streams of some pages each, end to end."""
    groups = ["".join(body[i : i + each]) for i in range(0, len(body), each)]
    return b"".join(bz2.compress(part.encode()) for part in [HEAD, *groups, TAIL])


WANTED = [
    ("Iron", IRON_TEXT),
    ("Coal & <coke>", "Coal & <coke>\n\nCoal is black.\n"),
    ("Steam", "Steam\n\nSteam is white.\n"),
]


def pairs(path):
    return [(document.name, document.text) for document in documents(str(path))]


def written(path, data):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("kind", ["xml", "xml.bz2", "xml.gz", "multistream", "utf-16", "short blocks"])
def test_articles_become_prose_and_other_pages_nothing(tmp_path, kind, monkeypatch):
    if kind == "short blocks":
        monkeypatch.setattr("narrowgauge.data.sources.byte_stream._READ", 7)
    data = {
        "xml": lambda: dump(),
        "xml.bz2": lambda: bz2.compress(dump().encode()),
        "xml.gz": lambda: gzip.compress(dump().encode()),
        "multistream": lambda: multistream(pages(), 2),
        "utf-16": lambda: bz2.compress(dump().encode("utf-16")),
        "short blocks": lambda: dump().encode(),
    }[kind]()
    suffix = {"multistream": "xml.bz2", "utf-16": "xml.bz2", "short blocks": "xml"}.get(kind, kind)
    assert pairs(written(tmp_path / f"wiki.{suffix}", data)) == WANTED


def refusal(path):
    with pytest.raises(UserError) as caught:
        list(documents(str(path)))
    return str(caught.value)


BROKEN = {
    "not XML": (
        page("A", "a").replace("</title>", "</titel>"),
        "begins a page that is not XML: mismatched tag",
    ),
    "no title": (re.sub("<title>.*</title>", "", page("A", "a")), "begins a page without <title>"),
    "no namespace": (re.sub("<ns>.*</ns>", "", page("A", "a")), "begins a page without <ns>"),
    "no text": (re.sub("<text.*</text>", "", page("A", "a")), "begins a page without <text>"),
    "NUL": (page("A", "a\x00b"), "begins a page that is not XML: not well-formed"),
    "no beginning": (page("A", "a").replace("<page>", "<seite>"), "is not the beginning of a page"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_page_is_named_by_file_and_line_and_set_aside_alone(tmp_path, case):
    broken, says = BROKEN[case]
    first = page("First", "'''one'''")
    path = written(tmp_path / "wiki.xml", dump([first, broken, page("Last", "two")]))
    line = (HEAD + first).count("\n") + 1
    said = refusal(path)
    assert re.search(rf"{path}:({line}|{line - 1}) {re.escape(says)}", said), said
    assert "prepare --tolerant" in said


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    data = dump([page("A", "caf\u00e9")]).encode().replace(b"\xc3\xa9", b"\xe9")
    assert "not well-formed (invalid token)" in refusal(written(tmp_path / "wiki.xml", data))


def test_a_truncated_dump_is_refused_after_what_it_holds(tmp_path):
    whole = bz2.compress(dump().encode())
    cut = written(tmp_path / "a.xml.bz2", whole[:-20])
    assert re.search(rf"{cut}:\d+ (ends before its compressed data does|is damaged)", refusal(cut))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x55
    assert "is damaged" in refusal(written(tmp_path / "b.xml.bz2", bytes(flipped)))
    body = dump()[: dump().index("<title>Steam")]
    assert "ends before </mediawiki>, so it is truncated" in refusal(written(tmp_path / "c.xml", body))
    # Of a multistream dump, whole pages are read before the damage.
    source = documents(str(written(tmp_path / "d.xml.bz2", multistream(pages(), 2)[:-30])))
    assert next(source).name == "Iron"


def test_an_empty_file_and_another_xml_are_refused(tmp_path):
    assert "ends before its compressed data does" in refusal(written(tmp_path / "a.xml.bz2", b""))
    assert "ends before </mediawiki>" in refusal(written(tmp_path / "b.xml", b""))
    assert "so it is not a dump" in refusal(written(tmp_path / "c.xml", "<feed><item/></feed>"))


def test_a_page_beyond_the_most_is_refused_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.data.sources.byte_stream.MOST_BYTES", 1 << 20)
    body = [page("First", "one"), page("Long", "x" * (3 << 20)), page("Last", "two")]
    corpus_text = written(tmp_path / "wiki.xml", dump(body))
    assert "begins a page of more than 1 MiB, the limit for one document" in refusal(corpus_text)


def test_an_article_alone_is_cut_so_that_some_of_it_is_held_out(tmp_path):
    article = "\n\n".join(f"Paragraph {i} of [[many]] words, " + "and more " * 40 for i in range(60))
    path = written(tmp_path / "wiki.xml", HEAD + page("Long", article) + TAIL)
    corpus = prepare(str(path), "bytes", tmp_path / "out")
    assert corpus.manifest.train_documents >= 1
    assert corpus.manifest.val_documents >= 1


LEFTOVER = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|\{\||^\|| \|\| |'''|''|^=+.*=+$|<!--|-->|</?(?:ref|br|div|span|small|nowiki)\b|"
    r"&(?:nbsp|amp|lt|gt|quot|ndash);|__[A-Z]+__|thumb\||(?:File|Image|Category|\u0424\u0430\u0439\u043b):",
    re.MULTILINE,
)


@pytest.mark.skipif("NARROWGAUGE_TEST_DATA" not in os.environ, reason="NARROWGAUGE_TEST_DATA names no folder")
def test_real_dumps_hold_no_markup_afterwards(tmp_path):
    dumps = sorted(Path(os.environ["NARROWGAUGE_TEST_DATA"]).glob("*.xml.bz2"))
    assert dumps
    for path in dumps:
        found = list(documents(str(path)))
        assert found
        for document in found:
            assert document.text.startswith(document.name + "\n\n")
            assert len(document.text) > 500
            assert "\n\n" in document.text.rstrip()
            assert not LEFTOVER.search(document.text), (document.name, LEFTOVER.search(document.text))
        corpus = prepare(str(path), "bytes", tmp_path / path.name)
        text = corpus.tokenizer.decode([*corpus.train, *corpus.val])
        assert not LEFTOVER.search(text.replace("<|endoftext|>", ""))
