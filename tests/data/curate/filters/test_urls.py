"""The steps `block_urls` and `opt_out`: lists in all their forms, robots.txt against Python's own parser, ai.txt."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any
from urllib.robotparser import RobotFileParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bessemer.data.curate.filters.lists import NameList, UrlAddress, address_and_above, host_and_above, split_url
from bessemer.data.curate.filters.urls import (
    BlockUrls,
    OptOut,
    RobotsRule,
    forbidding_agent,
    forbids_training,
    normal_path,
    parse_robots,
)
from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import BlockUrlsSpec, OptOutSpec


def block(pages: list[str], **settings: Any) -> list[Any]:
    documents = [Document("text", "f", row, url=url) for row, url in enumerate(pages, 1)]
    return BlockUrls(BlockUrlsSpec(**settings), 0).apply(documents)


def gone(pages: list[str], **settings: Any) -> list[str]:
    """Which of the pages are dropped."""
    return [url for url, outcome in zip(pages, block(pages, **settings), strict=True) if isinstance(outcome, Drop)]


@pytest.mark.parametrize(
    ("url", "host", "path"),
    [
        ("https://Example.COM/a?b#c", "example.com", "/a?b"),
        ("example.com", "example.com", "/"),
        ("example.com:8080/x", "example.com", "/x"),
        ("//u:p@example.com:80?q=1", "example.com", "/?q=1"),
        ("http://bücher.example./x", "xn--bcher-kva.example", "/x"),
        ("http://[2001:db8::1]:80/x", "[2001:db8::1]", "/x"),
        ("ftp://1.2.3.4/x/y@z", "1.2.3.4", "/x/y@z"),
    ],
)
def test_urls_are_taken_apart(url: str, host: str, path: str) -> None:
    assert split_url(url) == UrlAddress(host, path)


@pytest.mark.parametrize("url", ["", "   ", "https://", "/path/only", "mailto:joe", "a b c"])
def test_what_is_no_url_has_no_host(url: str) -> None:
    assert split_url(url) is None
    assert block([url], domains=["com"]) == [None]


def test_a_domain_stands_for_its_subdomains_only() -> None:
    urls = [
        "http://bad.example/",
        "https://a.b.BAD.example:8/x",
        "http://notbad.example",
        "http://bad.example.org",
        "http://bad.exampl",
    ]
    assert gone(urls, domains=["bad.example"]) == urls[:2]
    assert block(urls[1:2], domains=["bad.example"]) == [Drop("blocked domain", "bad.example")]
    assert host_and_above("a.b.c") == ["a.b.c", "b.c", "c"]


def test_an_address_stands_for_what_is_below_it() -> None:
    urls = [
        "http://x.org/bad",
        "https://www.x.org/bad/more?a=1",
        "x.org/bad?q",
        "http://x.org/badger",
        "http://x.org/",
        "http://a.x.org/bad",
    ]
    assert gone(urls, urls=["https://x.org/bad/"]) == urls[:3]
    assert gone(["http://x.org/a?id=7&p=2", "http://x.org/a?id=77"], urls=["x.org/a?id=7"]) == [
        "http://x.org/a?id=7&p=2"
    ]
    assert address_and_above(UrlAddress("x.org", "/a/b")) == ["x.org", "x.org/a", "x.org/a/b"]


def test_patterns_words_and_soft_words() -> None:
    urls = [
        "http://x.org/CASINO-9",
        "http://x.org/casinos",
        "http://x.org/buy/cheap-%70ills",
        "http://cheap.org/cheap",
        "http://x.org/tag/7",
    ]
    assert gone(urls, words=["casino"]) == urls[:1]
    assert gone(urls, soft_words=["cheap", "pills", "buy"]) == urls[2:3]
    assert gone(urls, soft_words=["cheap", "pills", "buy"], soft_hits=4) == []
    assert gone(urls, soft_words=["cheap", "pills"], soft_hits=1) == urls[2:4]
    assert gone(urls, patterns=[r"/tag/\d$"]) == urls[4:]
    assert block(urls[2:3], soft_words=["pills", "cheap"]) == [Drop("blocked words", "cheap pills")]


def test_what_is_allowed_stays_whatever_else_says() -> None:
    urls = ["http://docs.bad.example/x", "http://bad.example/ok/page", "http://bad.example/no"]
    settings = {"domains": ["bad.example"], "patterns": ["bad"], "words": ["bad"]}
    assert gone(urls, allow=["docs.bad.example", "bad.example/ok"], **settings) == urls[2:]


def test_lists_in_plain_hosts_and_ut1_form(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.txt"
    mixed.write_text(
        "\ufeff# comment\n\nplain.example\n*.star.example  # why\n0.0.0.0 hosts.example other.example\n127.0.0.1 localhost\nhttps://x.org/page\n"
    )
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(b"packed.example\n"))
    category = tmp_path / "ut1" / "adult"
    category.mkdir(parents=True)
    (category / "domains").write_text("adult.example\n10.1.1.1\n")
    (category / "urls").write_text("y.org\nz.org/a\n")
    (category / "expressions").write_text("(sexy|nude)[0-9]+\n")
    urls = [f"http://{name}.example/" for name in ("plain", "a.star", "hosts", "other", "packed", "adult")]
    urls += ["http://x.org/page/2", "http://10.1.1.1/", "http://y.org/any", "http://z.org/a", "http://q.org/NUDE12"]
    kept = ["http://localhost/", "http://x.org/", "http://a.y.org/", "http://z.org/b", "http://q.org/nude"]
    for folder in ("ut1", "ut1/adult"):
        lists = [str(mixed), str(packed), str(tmp_path / folder)]
        assert gone(urls + kept, lists=lists) == urls


def test_the_same_from_large_lists_as_from_sets() -> None:
    names = [f"host{n}.example" for n in range(5000)]
    held = NameList.of(names[::2])
    assert held.contains(names) == [n % 2 == 0 for n in range(5000)]
    assert len(held) == 2500
    assert NameList.of([]).contains(["a"]) == [False] and held.contains([]) == []


@pytest.mark.parametrize(("content", "row"), [("ok.example\na b\n", 2), ("x/y z\n", 1), ("https:///\n", 1)])
def test_a_bad_line_is_named(tmp_path: Path, content: str, row: int) -> None:
    (tmp_path / "list").write_text(content)
    with pytest.raises(UserError, match=f"list:{row}"):
        block([], lists=[str(tmp_path / "list")])


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "expressions").write_text("fine\n(\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x.example\n" * 1000)[:-9])
    for name, message in (
        ("", "expressions:2"),
        ("empty", "domains, urls"),
        ("missing", "cannot be read"),
        ("cut.gz", "damaged gzip"),
    ):
        with pytest.raises(UserError, match=message):
            block([], lists=[str(tmp_path / name)])
    with pytest.raises(UserError, match="word_lists"):
        block([], word_lists=[str(tmp_path / "missing")])


@pytest.mark.parametrize(
    "settings", [{}, {"allow": ["x.org"]}, {"patterns": ["("]}, {"soft_words": ["a"], "soft_hits": 0}]
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BlockUrlsSpec(**settings)


def test_batches_do_not_matter_and_another_list_is_another_step(tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text("bad.example\n")
    urls = ["http://bad.example/", "", "http://good.example/", "http://a.bad.example/"]
    whole = block(urls, lists=[str(listed)])
    assert whole == [outcome for url in urls for outcome in block([url], lists=[str(listed)])]
    before = BlockUrls(BlockUrlsSpec(lists=[str(listed)]), 0).identity
    listed.write_text("bad.example\ngood.example\n")
    step = BlockUrls(BlockUrlsSpec(lists=[str(listed)]), 0)
    assert step.identity != before
    assert isinstance(step.apply([Document("t", "f", 1, url=urls[2])])[0], Drop)


# --- robots.txt ----------------------------------------------------------------------------------------------------

RFC = """\
User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot/2.0
Disallow: /example/page.html

User-Agent: quxbot
"""


@pytest.mark.parametrize(
    ("agent", "path", "allowed"),
    [
        ("foobot", "/example/page.html", True),
        ("FooBot", "/example/allowed.gif", True),
        ("foobot", "/example/other", False),
        ("foobot", "/", False),
        ("barbot", "/example/page.html", False),
        ("bazbot", "/example/page.html?x", False),
        ("bazbot", "/example/", True),
        ("quxbot", "/example/", True),  # a group without rules allows everything
        ("nobot", "/example/", True),  # only * speaks of it, and * was not asked for
    ],
)
def test_the_example_of_the_rfc(agent: str, path: str, allowed: bool) -> None:
    assert (forbidding_agent(parse_robots(RFC), [agent], False, path) is None) == allowed


def test_rules_for_everyone_count_when_asked_for() -> None:
    robots = parse_robots(RFC)
    assert forbidding_agent(robots, ["nobot"], True, "/example/") == "nobot"
    assert forbidding_agent(robots, ["nobot"], True, "/a/b.gif") == "nobot"
    assert forbidding_agent(robots, ["nobot"], True, "/a/b.gif?x") is None
    assert forbidding_agent(robots, ["quxbot"], True, "/example/") is None  # it has a group of its own


@pytest.mark.parametrize(
    ("rules", "path", "allowed"),
    [
        ("Disallow: /a\nAllow: /a/b", "/a/b/c", True),
        ("Allow: /a/b\nDisallow: /a", "/a/b", True),  # the order does not count
        ("Disallow: /a\nAllow: /a", "/a", True),  # as long: allowed
        ("Disallow: /a*b$", "/aXb", False),
        ("Disallow: /a*b$", "/aXbc", True),
        ("Disallow: /a*b$", "/ab", False),
        ("Disallow: /*b*b", "/b", True),  # one b is not two
        ("Disallow: /a*a$", "/a", True),
        ("Disallow: /*/x*y", "/q/x2y3", False),
        ("Disallow: /a$b", "/a$bc", False),
        ("Disallow: /a$", "/a", False),
        ("Disallow: /a$", "/ab", True),
        ("Disallow:", "/a", True),
        ("disallow : /a # comment", "/abc", False),
        ("Disallow: /%7Ejoe/", "/~joe/x", False),
        ("Disallow: /bücher", "/b%c3%bccher", False),
        ("Disallow: /a%2fb", "/a/b", True),
        ("Nonsense\nSitemap: x\nDisallow: /a", "/a", False),
    ],
)
def test_the_longest_rule_decides(rules: str, path: str, allowed: bool) -> None:
    robots = parse_robots(f"User-agent: bot\r\n{rules}".replace("\n", "\r\n"))
    assert (forbidding_agent(robots, ["bot"], False, path) is None) == allowed


@given(st.text("ab*$/", max_size=6), st.text("ab/", max_size=8))
def test_wildcards_match_as_a_slow_matcher_says(pattern: str, path: str) -> None:
    def slow(pattern: str, path: str) -> bool:
        if pattern == "$":
            return path == ""
        if not pattern:
            return True
        if pattern[0] == "*":
            return any(slow(pattern[1:], path[at:]) for at in range(len(path) + 1))
        return bool(path) and pattern[0] == path[0] and slow(pattern[1:], path[1:])

    assert RobotsRule(False, pattern).matches(path) == slow(pattern, path)


@given(
    st.lists(st.tuples(st.sampled_from(["Allow", "Disallow"]), st.text("ab", max_size=4).map("/".__add__)), max_size=5),
    st.text("ab", max_size=6).map("/".__add__),
)
def test_plain_rules_agree_with_pythons_parser_on_one_rule_and_more(rules: list[tuple[str, str]], path: str) -> None:
    """Python's takes the first rule that matches: given the longest first, allowing before others, it agrees."""
    lines = ["User-agent: bot", *(f"{kind}: {rule}" for kind, rule in rules)]
    sorted_lines = [
        "User-agent: bot",
        *(f"{kind}: {rule}" for kind, rule in sorted(rules, key=lambda r: (-len(r[1]), r[0]))),
    ]
    python = RobotFileParser()
    python.parse(sorted_lines)
    ours = forbidding_agent(parse_robots("\n".join(lines)), ["bot"], False, path) is None
    assert ours == python.can_fetch("bot", f"http://h{path}")


@pytest.mark.timeout(30)
def test_no_rule_is_slow() -> None:
    robots = parse_robots("User-agent: bot\nDisallow: /" + "*a" * 2000 + "$\n" + "Disallow: /x*y*z\n" * 5000)
    assert forbidding_agent(robots, ["bot"], False, "/" + "a" * 100_000 + "b") is None
    assert normal_path("%61%2f\u00fc") == "a%2F%C3%BC"


@pytest.mark.parametrize(
    ("text", "path", "forbidden"),
    [
        ("User-agent: *\nContent-Signal: search=yes, ai-train=no\nAllow: /", "/a", True),
        ("User-agent: *\nContent-Signal: search=yes, ai-train=yes", "/a", False),
        ("User-agent: *\nContent-Signal: search=no", "/a", False),
        ("Content-Signal: ai-train=no", "/a", True),
        ("User-agent: other\nContent-Signal: ai-train=no", "/a", False),
        ("User-agent: gptbot\nContent-Signal: ai-train=no", "/a", True),
        ("User-agent: *\nContent-Usage: train-ai=n", "/a", True),
        ("User-agent: *\nContent-Usage: /a train-ai=n\nContent-Usage: /a/b train-ai=y", "/a/b/c", False),
        ("User-agent: *\nContent-Usage: /a train-ai=n\nContent-Usage: /a/b train-ai=y", "/a/c", True),
    ],
)
def test_signals(text: str, path: str, forbidden: bool) -> None:
    assert forbids_training(parse_robots(text), ["GPTBot"], path) == forbidden


# --- opt_out -------------------------------------------------------------------------------------------------------


def opt_out(documents: list[Document], **settings: Any) -> list[Any]:
    return OptOut(OptOutSpec(**settings), 0).apply(documents)


def page(url: str) -> Document:
    return Document("text", "f", 1, url=url)


def test_ids_and_texts_that_opted_out(tmp_path: Path) -> None:
    ids, hashes = tmp_path / "ids", tmp_path / "hashes"
    ids.write_text("doc-1\ndoc-3\n")
    hashes.write_text(hashlib.sha256("gone ü".encode()).hexdigest().upper() + "  name.txt\n")
    documents = [
        Document("a", "f", 1, id="doc-1"),
        Document("gone ü", "f", 2),
        Document("gone u", "f", 3, id="doc-2"),
        Document("a", "f", 4),
    ]
    expected = [Drop("opted out by id"), Drop("opted out by its text"), None, None]
    assert opt_out(documents, ids=[str(ids)], hashes=[str(hashes)]) == expected
    assert opt_out(documents, ids=[str(ids)]) == [expected[0], None, None, None]
    hashes.write_text("abc\n")
    with pytest.raises(UserError, match="hashes:1"):
        opt_out(documents, hashes=[str(hashes)])


def test_domains_that_opted_out(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("a.example\nb.example/private\n")
    pages = [page(f"http://{url}") for url in ("www.a.example/x", "b.example/private/1", "b.example/", "c.example")]
    assert opt_out(pages, lists=[str(tmp_path / "list")], domains=["c.example"]) == [
        Drop("opted out by domain", "a.example"),
        Drop("opted out by address", "b.example/private"),
        None,
        Drop("opted out by domain", "c.example"),
    ]


def test_robots_of_each_host(tmp_path: Path) -> None:
    (tmp_path / "a.example").mkdir()
    (tmp_path / "a.example" / "robots.txt").write_text(
        "User-agent: GPTBot\nDisallow: /private\n\nUser-agent: *\nDisallow: /all\n"
    )
    (tmp_path / "b.example.robots.txt").write_text("User-agent: CCBot\nDisallow: /\n")
    (tmp_path / "c.example.robots.txt").write_text("User-agent: *\nContent-Signal: ai-train=no\n")
    urls = [
        "a.example/private/x",
        "www.a.example/private",
        "a.example/all",
        "a.example/",
        "b.example",
        "x.b.example",
        "c.example/p",
        "d.example",
        "../etc/x",
    ]
    pages = [page(f"http://{url}") for url in urls]
    robots = [str(tmp_path)]
    by_gpt, by_cc = Drop("opted out by robots.txt", "GPTBot"), Drop("opted out by robots.txt", "CCBot")
    signal = Drop("opted out by a signal in robots.txt")
    assert opt_out(pages, robots=robots) == [by_gpt, by_gpt, None, None, by_cc, None, signal, None, None]
    assert opt_out(pages, robots=robots, signals=False)[6] is None
    assert opt_out(pages, robots=robots, agents=["CCBot"], all_agents=True)[:3] == [None, None, by_cc]
    with pytest.raises(UserError, match="no folder"):
        opt_out(pages, robots=[str(tmp_path / "missing")])


def test_ai_txt_speaks_of_types_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.example.ai.txt").write_text(
        "# text\nUser-Agent: *\nDisallow: *.txt\nDisallow: *.html\nAllow: *.md\n"
    )
    (tmp_path / "b.example.ai.txt").write_text("User-Agent: *\nDisallow: /\nAllow: *.txt\n")
    gone = Drop("opted out by ai.txt")
    expected = {
        "a.example/x.txt": gone,
        "a.example/x.txt?v=1": gone,
        "a.example/x.txt.md": None,
        "a.example/page": gone,
        "a.example/": gone,
        "a.example/x.pdf": None,
        "b.example/x.txt": None,
        "b.example/page": gone,
        "c.example/page": None,
    }
    assert opt_out([page(f"http://{url}") for url in expected], robots=[str(tmp_path)]) == list(expected.values())


def test_another_robots_txt_is_another_step(tmp_path: Path) -> None:
    file = tmp_path / "a.example.robots.txt"
    file.write_text("User-agent: CCBot\nDisallow: /\n")
    before = OptOut(OptOutSpec(robots=[str(tmp_path)]), 0).identity
    assert OptOut(OptOutSpec(robots=[str(tmp_path)]), 0).identity == before
    file.write_text("User-agent: CCBot\nDisallow: /a\n")
    assert OptOut(OptOutSpec(robots=[str(tmp_path)]), 0).identity != before


def test_an_opt_out_needs_somebody() -> None:
    with pytest.raises(ValidationError, match="no opt-outs"):
        OptOutSpec()
    assert opt_out([Document("", "f", 1), page("nonsense url")], domains=["x.org"]) == [None, None]
