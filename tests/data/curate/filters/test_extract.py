"""Pages become their main text, the same whatever was read before; everything else passes through."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.data.curate.step import Drop, Outcome
from bessemer.data.read.entry import Document
from bessemer.spec.text_steps import ExtractSpec

pytest.importorskip("trafilatura", exc_type=ImportError)

from bessemer.data.curate.filters.repair import Extract

SENTENCE = "The furnace was charged with pig iron and the blast was turned on for {} minutes that day. "
PROSE = "".join(SENTENCE.format(minutes) for minutes in range(10, 18))
PAGE = f"""<!DOCTYPE html><html lang="en"><head><title>Steel</title><style>p {{ color: red }}</style></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/shop">Shop now</a></li></ul></nav>
<article><h1>How steel was made</h1><p>{PROSE}</p><p>{PROSE.replace("furnace", "converter")}</p>
<table><tr><td>Carbon</td><td>0.2 per cent</td></tr><tr><td>Silicon</td><td>0.1 per cent</td></tr></table></article>
<div id="comments"><p>First comment: nice article, thank you for writing it, I liked it very much indeed.</p></div>
<script>var tracked = true;</script><footer>Copyright and cookie settings</footer></body></html>"""


def page(html: str = PAGE) -> Document:
    return Document(html, "a.warc.gz", 1, labels={"type": "html"})


def outcome(document: Document, **settings: Any) -> Outcome:
    (found,) = Extract(ExtractSpec(**settings), 0).apply([document])
    return found


def test_a_page_becomes_its_main_text() -> None:
    document = page()
    text = outcome(document)
    assert isinstance(text, str)
    assert PROSE.strip() in text and "How steel was made" in text
    for other in ("Shop now", "tracked", "cookie settings", "First comment", "color: red", "<p>"):
        assert other not in text
    assert document.labels["type"] == "text"
    assert document.text == PAGE  # the outcome says what changes; the document is not touched


def test_what_is_no_page_stays() -> None:
    for labels in ({}, {"type": "text"}, {"language": "en"}):
        document = Document(PAGE, "a.txt", 1, labels=dict(labels))
        assert outcome(document) is None
        assert document.labels == labels


def test_tables_can_be_left_out() -> None:
    assert "0.2 per cent" in str(outcome(page()))
    assert "0.2 per cent" not in str(outcome(page(), include_tables=False))


@pytest.mark.parametrize(
    "html", ["", "   ", "<html><body></body></html>", "<html><body><script>x()</script></body></html>", "\0\0<"]
)
def test_a_page_without_text_goes(html: str) -> None:
    assert outcome(page(html)) == Drop("no main text", 0)


def test_least_and_most_characters_hold_at_their_limits() -> None:
    text = outcome(page())
    assert isinstance(text, str)
    assert outcome(page(), min_chars=len(text)) == text
    assert outcome(page(), min_chars=len(text) + 1) == Drop("no main text", len(text))
    assert outcome(page(), max_page_chars=len(PAGE)) == text
    assert outcome(page(), max_page_chars=len(PAGE) - 1) == Drop("page too long", len(PAGE))


def test_favour_recall_keeps_no_less_than_precision() -> None:
    short = f"<html><body><div><p>{PROSE}</p></div><div class='teaser'><p>{PROSE[:90]}</p></div></body></html>"
    kept = {favour: len(str(outcome(page(short), favour=favour))) for favour in ("precision", "recall")}
    assert kept["recall"] >= kept["precision"] > 0


def test_the_outcome_does_not_depend_on_earlier_pages() -> None:
    """The library's deduplication, as other pipelines run it, would drop the text at its third time."""
    step = Extract(ExtractSpec(), 0)
    found = step.apply([page() for _ in range(5)])
    assert found == [outcome(page())] * 5


def test_a_page_with_control_characters_and_broken_tags_is_read() -> None:
    broken = PAGE.replace("<h1>", "<h1>\x00\x0b\ufffe").replace("</article>", "").replace("</p>", "")
    assert PROSE[:80] in str(outcome(page(broken)))


@pytest.mark.parametrize("tag", ["div", "blockquote", "table><tr><td", "li", "b><i"])
def test_deep_nesting_does_no_harm(tag: str) -> None:
    found = outcome(page("<html><body>" + f"<{tag}>" * 20_000 + PROSE))
    assert isinstance(found, (str, Drop))


def test_the_library_is_part_of_the_identity() -> None:
    assert Extract(ExtractSpec(), 0).identity.startswith("trafilatura ")
