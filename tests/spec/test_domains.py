"""Target shares add up over whatever is there, and a source's domain is found from what is written about it."""

from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.spec.data import Domain, SourceSpec
from bessemer.spec.mixture import GROUPS, domain_of, target_shares

DOMAINS = list(get_args(Domain))


def test_the_groups_have_the_published_shares() -> None:
    assert [group.share for group in GROUPS] == [0.50, 0.25, 0.17, 0.08]  # Llama 3, in this order
    assert all(sum(group.inside.values()) == pytest.approx(1) for group in GROUPS)
    named = [domain for group in GROUPS for domain in group.inside]
    assert sorted([*named, "other"]) == sorted(DOMAINS)


@given(st.sets(st.sampled_from(DOMAINS), min_size=1))
def test_shares_of_the_domains_present_add_up_to_one(present: set[Domain]) -> None:
    shares = target_shares(present)
    assert sum(shares.values()) == pytest.approx(1)
    assert set(shares) == {"web" if domain == "other" else domain for domain in present}
    assert min(shares.values()) > 0


def test_two_present_domains_keep_their_ratio_unless_a_neighbour_of_their_group_is_missing() -> None:
    everything = target_shares(DOMAINS)
    assert everything["web"] == pytest.approx(0.4)
    assert everything["math"] + everything["science"] == pytest.approx(0.25)
    assert target_shares(["code", "multilingual"])["code"] == pytest.approx(17 / 25)
    assert target_shares(["books", "code"])["books"] == pytest.approx(50 / 67)  # all of general knowledge
    for one, other in combinations(["web", "books", "reference", "dialogue", "news"], 2):
        shares = target_shares([one, other])
        assert shares[one] / shares[other] == pytest.approx(everything[one] / everything[other])


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("fineweb", "web"),
        ("fineweb-edu", "web"),
        ("FineWeb2", "multilingual"),
        ("fineweb-2", "multilingual"),
        ("c4", "web"),
        ("mc4", "multilingual"),
        ("open-web-math", "math"),
        ("OpenWebMath", "math"),
        ("the-stack-v2", "code"),
        ("stack_exchange", "dialogue"),
        ("algebraic-stack", "math"),
        ("starcoderdata", "code"),
        ("wikipedia.en", "reference"),
        ("arxiv", "science"),
        ("peS2o", "science"),
        ("cc-news", "news"),
        ("multi_news", "news"),
        ("gutenberg", "books"),
        ("german", "multilingual"),
        ("sharegpt", "dialogue"),
        ("mydata", "other"),
        ("decoder", "other"),  # holds "code", but not as a word
        ("", "other"),
    ],
)
def test_a_name_tells_the_domain(name: str, domain: str) -> None:
    found, why = domain_of(name, SourceSpec(path=["x.jsonl"]))
    assert found == domain
    assert ("set domain" in why) == (domain == "other")


def test_what_is_written_comes_before_the_name_and_the_name_before_path_and_format() -> None:
    source = SourceSpec(path=["data/github/*.jsonl"], domain="books")
    assert domain_of("wikipedia", source) == ("books", "written in the spec")
    source = SourceSpec(path=["data/github/*.jsonl"])
    assert domain_of("wikipedia", source)[0] == "reference"
    assert domain_of("mine", source) == ("code", "its path contains 'github'")
    source = SourceSpec(path=["x.jsonl"], messages_field="turns")
    assert domain_of("mine", source)[0] == "dialogue"
    assert domain_of("mine", SourceSpec(path=["x"], format="source"))[0] == "code"
    assert domain_of("mine", SourceSpec(path=["x"]), ["source"])[0] == "code"
    assert domain_of("mine", SourceSpec(path=["x"]), ["source", "text"])[0] == "other"
    assert domain_of("mine", SourceSpec(path=["x"], format="warc"))[0] == "web"


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=3))
def test_any_name_gives_some_domain(name: str, path: list[str]) -> None:
    domain, why = domain_of(name, SourceSpec(path=path))
    assert domain in DOMAINS and why
