"""Wikipedia dumps: articles in order as prose, from any kind of file; and the error of a broken one."""

import bz2
import gzip
import re

import pytest

from data.reading import documents, pairs, refusal
from data.reading import write as written
from narrowgauge.trainer.data import prepare

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

IRON = """{{Infobox|image=[[Bilddatei:Fe.jpg|thumb|An [[ingot]]]]}}
'''Iron''' is a [[metal]]&nbsp;of <ref name="a">A [[book]].</ref> [[group 8 element|group 8]].
== References ==
{{reflist}}
[[Sachgebiet:Metals]]
"""
IRON_TEXT = "Iron\n\nIron is a metal of group 8.\n"


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


PAGES = [
    page("Iron", IRON),
    page("Ferrum", "#REDIRECT [[Iron]]", extra='\n    <redirect title="Iron" />'),
    page("Eisen", "#WEITERLEITUNG [[Iron]]"),
    page("Talk:Iron", "What about [[rust]]?", namespace=1),
    page("Iron.css", "a { color: red }", model="css"),
    page("Blank", "{{stub}}"),
    page("Coal & <coke>", "'''Coal''' is black."),
]


def dump(body: list[str] = PAGES) -> str:
    return HEAD + "".join(body) + TAIL


def multistream(body: list[str], each: int) -> bytes:
    """As the big wikis hand theirs out: streams of some pages each, end to end."""
    groups = ["".join(body[i : i + each]) for i in range(0, len(body), each)]
    return b"".join(bz2.compress(part.encode()) for part in [HEAD, *groups, TAIL])


WANTED = [("Iron", IRON_TEXT), ("Coal & <coke>", "Coal & <coke>\n\nCoal is black.\n")]


@pytest.mark.parametrize("kind", ["multistream", "utf-16", "short blocks"])
def test_articles_become_prose_and_other_pages_nothing(tmp_path, kind, monkeypatch):
    if kind == "short blocks":
        monkeypatch.setattr("narrowgauge.trainer.data.sources.records._READ", 7)
    suffix, data = {
        "multistream": ("xml.bz2", multistream(PAGES, 2)),
        "utf-16": ("xml.gz", gzip.compress(dump().encode("utf-16"))),
        "short blocks": ("xml", dump()),
    }[kind]
    assert pairs(written(tmp_path / f"wiki.{suffix}", data)) == WANTED


PAGE = page("A", "a")
BROKEN = {
    "begins a page that is not XML: mismatched tag": PAGE.replace("</title>", "</titel>"),
    "begins a page without <title>": re.sub("<title>.*</title>", "", PAGE),
    "begins a page without <ns>": re.sub("<ns>.*</ns>", "", PAGE),
    "begins a page without <text>": re.sub("<text.*</text>", "", PAGE),
    "begins a page that is not XML: not well-formed": page("A", "a\x00b"),
    "is not the beginning of a page": PAGE.replace("<page>", "<seite>"),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_page_is_named_by_file_and_line(tmp_path, says):
    first = page("First", "'''one'''")
    path = written(tmp_path / "wiki.xml", dump([first, BROKEN[says], page("Last", "two")]))
    line = (HEAD + first).count("\n") + 1
    said = refusal(path)
    assert re.search(rf"{path}:({line}|{line - 1}) {re.escape(says)}", said), said
    assert "prepare --tolerant" in said


def test_a_damaged_dump_is_refused_after_what_it_holds(tmp_path, monkeypatch):
    whole = bz2.compress(dump().encode())
    latin = dump([page("A", "caf\u00e9")]).encode().replace(b"\xc3\xa9", b"\xe9")
    for name, data, says in (
        ("cut.xml.bz2", whole[:-20], r":\d+ (ends before its compressed data does|is damaged)"),
        ("cut.xml", dump()[: dump().index("<title>Coal")], "ends before </mediawiki>, so it is truncated"),
        ("empty.xml", b"", "ends before </mediawiki>"),
        ("feed.xml", "<feed><item/></feed>", "so it is not a dump"),
        ("latin.xml", latin, r"not well-formed \(invalid token\)"),
    ):
        path = written(tmp_path / name, data)
        assert re.search(f"{path}.*{says}", refusal(path)), name
    # Of a multistream dump, whole pages are read before the damage.
    source = documents(str(written(tmp_path / "d.xml.bz2", multistream(PAGES, 2)[:-30])))
    assert next(source).name == "Iron"
    monkeypatch.setattr("narrowgauge.trainer.data.sources.records.MOST_BYTES", 1 << 20)
    body = [page("First", "one"), page("Long", "x" * (3 << 20)), page("Last", "two")]
    said = refusal(written(tmp_path / "wiki.xml", dump(body)))
    assert "begins a page of more than 1 MiB, the limit for one document" in said


def test_an_article_alone_is_cut_so_that_some_of_it_is_held_out(tmp_path):
    article = "\n\n".join(f"Paragraph {i} of [[many]] words, " + "and more " * 40 for i in range(60))
    path = written(tmp_path / "wiki.xml", HEAD + page("Long", article) + TAIL)
    facts = prepare(str(path), "bytes", tmp_path / "out").manifest
    assert min(facts.train_documents, facts.val_documents) >= 1
