"""Wikitext to prose: what goes, what stays, what is not closed, and that time grows with length alone."""

import re
import time

import mwparserfromhell
import pytest

from narrowgauge.trainer.data.sources.wikitext import prose

CASES = {
    "link": ("a [[b]]s and [[c|d]].", "a bs and d."),
    "template": ("a {{t|x=1|y}} b", "a b"),
    "template alone in brackets": ("Iron ({{lang|de|Eisen}}) is", "Iron is"),
    "template first in brackets": ("Iron ({{lang|de|Eisen}}; born 1900) is", "Iron (born 1900) is"),
    "template last in brackets": ("Iron (a metal, {{t}}) is", "Iron (a metal) is"),
    "empty brackets of the author": ("the function main() is", "the function main() is"),
    "parameter": ("a {{{1|b}}} c", "a c"),
    "bold and italics": ("'''a''' ''b'' '''''c'''''", "a b c"),
    "apostrophes": ("l'eau d''or'' o''''clock''''", "l'eau dor o'clock'"),
    "comment": ("a<!-- b [[c]] -->d", "ad"),
    "comment without an end": ("a\n\n<!-- b", "a"),
    "reference": ("a<ref>b [[c]] {{d}}</ref>.", "a."),
    "reference without an end": ("a<ref>b c<ref>d</ref> e", "ab c e"),
    "file": ("[[File:a.jpg|thumb|a [[b]] and [[c|d]]]] e", "e"),
    "file by another language's word": ("[[Bild:a.jpg|mini|b]] c", "c"),
    "category": ("a\n[[Category:B]]\n[[category:C|d]]", "a"),
    "category that is spoken of": ("see [[:Category:B]]", "see Category:B"),
    "interlanguage": ("a\n[[fr:B]]\n[[zh-min-nan:C]]\n[[simple:D]]", "a"),
    "table": ('a\n{| class="x"\n! b\n|-\n| c || d\n{|\n| e\n|}\n|}\nf', "a\n\nf"),
    "table in a template": ("{{t|\n{|\n| a\n|}\n}}f", "f"),
    "HTML table": ("a<table><tr><td>b<table></table></td></tr></table>c", "ac"),
    "heading": ("a\n== B ==\nc\n=== D ===\ne", "a\n\nB\n\nc\n\nD\n\ne"),
    "heading of nothing": ("a\n== B ==\n== C ==\n=== D ===\n{{t}}\n== E ==\ne\n== F ==", "a\n\nE\n\ne"),
    "paragraphs": ("a\nb\n\n\n\nc", "a\nb\n\nc"),
    "entities": ("a&nbsp;b &ndash; c &amp; d &#65; &lt;", "a b \u2013 c & d A <"),
    "external link": ("[http://a.b/c?d=e the site] [//a.b f] [https://a.b]", "the site f"),
    "small tags": ("H<sub>2</sub>O <span style='x'>a</span><br />b", "H2O a\nb"),
    "less than": ("a <b and c> d, 1 <2", "a d, 1 <2"),
    "tag that nobody knows": ("a <foo> b", "a <foo> b"),
    "to the letter": ("a <nowiki>[[b]] ''c'' {{d}}</nowiki>", "a [[b]] ''c'' {{d}}"),
    "magic words": ("__TOC__a __ДЖЗ__ __init__", "a __init__"),
    "variants": ("-{zh-hans:a;zh-hant:b}- -{c}-", "a c"),
    "gallery": ("a\n<gallery>\nFile:b.jpg|c\n</gallery>\nd", "a\n\nd"),
    "template without an end": ("a {{b\n| c = d\n\ne", "a b\n\ne"),
    "link without an end": ("a [[b c\n\nd", "a b c\n\nd"),
    "ends without beginnings": ("a }} b ]] c\n|}\nd", "a b c\n\nd"),
    "template closes an open link": ("a {{b|[[c}} d", "a d"),
    "signs alone": ("a\n\n* {{t}}\n* .\n\nb", "a\n\nb"),
}


def test_prose():
    assert {name: prose(text) for name, (text, _) in CASES.items()} == {n: p for n, (_, p) in CASES.items()}
    text = "[[Файл:жж|мини|дж]][[Категория:Ж]] жд"  # what files and categories are called there
    assert prose(text, frozenset(["файл", "категория"])) == "жд"
    assert prose("a\x010\x01 ({{t}}\x00) b") == "a0 b", "characters of our own cannot be smuggled in"


def test_the_words_are_those_of_mwparserfromhell():
    """Both parsers give the same words for markup that both remove."""
    text = "The '''Iron Age''' is an [[epoch]] of [[prehistory|human ''prehistory'']].<!-- to where? -->\n"
    text += "== Uses ==\nTools, [http://a.b nails], O<sub>2</sub> &amp; {{a|{{b}}}} <nowiki>[[a]]</nowiki>"
    assert prose(text).split() == mwparserfromhell.parse(text).strip_code().split()


#: What is repeated, and what is repeated behind it.
HOSTILE = [*("{{", "[[", "{|\n", "<ref>", "<!--", "<a ", "{{a}} ", "({{a}};", "(", "'", "= a =", " ", "__A")]
HOSTILE += ["[http://a ", "-{", "&", "[[a {{ ]]", "*", ("[[a|", "]]"), ("{{", "}}")]


@pytest.mark.parametrize("text", HOSTILE, ids=str)
def test_time_grows_with_length_and_not_with_nesting(text):
    begin, end = text if isinstance(text, tuple) else (text, "")
    start = time.process_time()
    assert not re.search(r"\{\{|\}\}", prose(begin * 20_000 + "x" + end * 20_000))
    assert time.process_time() - start < 2  # hundredths, where it is not the square
