"""tiktoken's files give tiktoken's ids, and a BPE that tiktoken runs for us gives our own."""

from __future__ import annotations

import base64
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from bessemer.data.tokenizer.load import SPLITS, byte_characters, byte_level, fast_encoder
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

tiktoken = pytest.importorskip("tiktoken")

TEXT = Path(__file__).read_text() + "日本語のテキスト。 été naïve's WE'LL aaaa abab ====\n" * 20
TRAINED = Tokenizer.train([TEXT], 700, special=["<|a|>"])
NAMES = {"gpt2": "gpt2", "cl100k": "cl100k_base", "o200k": "o200k_base"}


def ranks() -> dict[bytes, int]:
    byte = {character: number for number, character in byte_characters().items()}
    tokens = sorted(TRAINED.inner.get_vocab().items(), key=lambda item: item[1])
    written = [bytes(byte[c] for c in token) for token, _ in tokens if token not in TRAINED.special]
    return {token: rank for rank, token in enumerate(written)}


def write(path: Path, table: dict[bytes, int]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in table.items()))
    return path


def theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tiktoken's own definition of an encoding, with our ranks instead of a download."""
    import tiktoken_ext.openai_public as public

    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *args, **kwargs: ranks())
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda *args, **kwargs: ranks())
    about = getattr(public, NAMES[name])()
    return tiktoken.Encoding(
        name, pat_str=about["pat_str"], mergeable_ranks=ranks(), special_tokens=about["special_tokens"]
    )


def texts() -> Iterator[str]:
    rng = random.Random(0)
    parts = [
        "'s",
        "'LL",
        "'ſ",
        "a",
        "A",
        "1",
        "²",
        "/",
        "á",
        "é",
        "語",
        "'",
        "the",
        "self",
        "return",
        "aaa",
        "ab",
        "=",
        "==",
        "<|endoftext|>",
    ]
    parts += ["\n", "\r\n", " ", "  ", "\t", "\u00a0", "\u3000", "\x85", "\x0b", " the"]
    for _ in range(1500):
        yield "".join(
            rng.choice([*parts, chr(rng.choice([rng.randrange(0x3000), rng.randrange(0xE000, 0x110000)]))])
            for _ in range(rng.randint(0, 14))
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_ids_as_tiktoken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = theirs(name, monkeypatch)
    ours = Tokenizer.load(write(tmp_path / "mine.tiktoken", ranks()), pattern=name)
    for text in [*texts(), TEXT]:
        assert ours.encode(text) == encoding.encode_ordinary(text)
    assert ours.special == {"<|endoftext|>": len(ranks())}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_every_character_is_split_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ground for running a BPE by tiktoken. Of characters without a name, and of the long rows of Chinese and
    Korean ones, every sixteenth."""
    ours = Tokenizer.load(write(tmp_path / "mine.tiktoken", ranks()), pattern=name)
    assert ours.fast is not None
    encoding = theirs(name, monkeypatch) if name in NAMES else None
    characters = [
        chr(code)
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000
        and (code % 16 == 0 or (unicodedata.name(chr(code), "CJK")[:3] not in ("CJK", "HAN", "TAN")))
    ]
    assert len(characters) > 80_000
    for first in range(0, len(characters), 256):
        text = "".join(f"a{c}{c}A1 {c}'{c}\n{c} b" for c in characters[first : first + 256])
        ids = ours.encode(text)
        assert ids == ours.fast(text).tolist()
        assert encoding is None or ids == encoding.encode_ordinary(text)


def test_a_token_that_no_merges_reach_is_found_as_a_whole_word(tmp_path: Path) -> None:
    word = " \u0175\u0177"
    table = ranks() | {word.encode(): len(ranks())}
    encoding = tiktoken.Encoding("x", pat_str=SPLITS["gpt2"], mergeable_ranks=table, special_tokens={})
    ours = Tokenizer.load(write(tmp_path / "gpt2.tiktoken", table), special=["<|a|>"])
    for text in [f"a{word} b", f"a{word}y", word.strip()]:
        assert ours.encode(text) == encoding.encode_ordinary(text)
    assert len(ranks()) in ours.encode(f"a{word} b")


def test_openai_files_bring_their_special_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "cl100k_base.tiktoken", ranks())
    ours, encoding = Tokenizer.load(path), theirs("cl100k", monkeypatch)
    assert ours.special == encoding._special_tokens
    assert ours.vocab_size == encoding.n_vocab
    assert Tokenizer.load(path, special=["<|user|>"]).special["<|user|>"] == encoding.n_vocab


def test_special_tokens_are_numbered_in_the_order_given(tmp_path: Path) -> None:
    path = write(tmp_path / "tokenizer.model", ranks())  # Llama 3 ships its ranks under this name
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    ours = Tokenizer.load(path, eos="<|end_of_text|>", special=names, pattern="llama3")
    assert [ours.special[name] - len(ranks()) for name in names] == [0, 1, 2]
    assert ours.eos_id == len(ranks()) + 1
    ours.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json", eos="<|end_of_text|>").special == ours.special


def test_files_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set tokenizer\.pattern to gpt2, cl100k"):
        Tokenizer.load(write(tmp_path / "mine.tiktoken", ranks()))
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(write(path, ranks()).read_bytes() + b"!!!! x\n")
    with pytest.raises(UserError, match=rf"gpt2\.tiktoken:{len(ranks()) + 1}: not a token"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match="no token for byte 0"):
        Tokenizer.load(write(path, {token: rank for token, rank in ranks().items() if token != b"\0"}))
    with pytest.raises(UserError, match="same rank"):
        Tokenizer.load(write(path, ranks() | {b"zzzz": 0}))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tiktoken_runs_our_bpe_with_the_same_ids(text: str) -> None:
    assert TRAINED.fast is not None
    assert TRAINED.fast(text).tolist() == TRAINED.encode(text)
    assert TRAINED.encode_arrays([text, text], [False, True])[1].tolist() == TRAINED.encode(text)


def test_tiktoken_runs_our_bpe_on_real_text() -> None:
    assert TRAINED.fast is not None
    for text in [TEXT, *texts(), "a" * 20_000, " " * 20_000, "=" * 20_000, "語" * 20_000]:
        assert TRAINED.fast(text).tolist() == TRAINED.encode(text)


def test_a_run_of_spaces_that_tiktoken_gives_up_on() -> None:
    text = " " * 1_200_000 + "x"
    assert TRAINED.encode_arrays([text])[0].tolist() == TRAINED.encode(text)


def bpe(merges: list[tuple[str, str]], pattern: str = SPLITS["llama3"], **options: Any) -> Inner:
    alphabet = [*byte_characters().values(), *(left + right for left, right in merges)]
    names = {name: i for i, name in enumerate(dict.fromkeys(alphabet))}
    inner = Inner(models.BPE(vocab=names, merges=merges, **options))
    inner.pre_tokenizer = byte_level(pattern)
    inner.add_special_tokens(["<end>"])
    return inner


def test_only_what_is_known_to_be_the_same_is_run_by_tiktoken() -> None:
    assert fast_encoder(bpe([("a", "b"), ("ab", "c")])) is not None
    # "abc" is made of (ab, c), but b and c merge first: its bytes never become the token, where tiktoken's would.
    assert fast_encoder(bpe([("b", "c"), ("a", "b"), ("ab", "c")])) is None
    assert Tokenizer(bpe([("b", "c"), ("a", "b"), ("ab", "c")]), "<end>").encode("abc") == [64, 256]
    assert fast_encoder(bpe([("a", "b")], pattern=r"\w+|\W+")) is None
    assert fast_encoder(bpe([("a", "b")], dropout=0.1)) is None
    added = bpe([("a", "b")])
    added.add_tokens(["<tool>"])
    assert fast_encoder(added) is None
    prefixed = bpe([("a", "b")])
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert fast_encoder(prefixed) is None
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert fast_encoder(prefixed) is not None
    assert fast_encoder(Tokenizer.train(["aa"], 300, kind="char").inner) is None


def test_ids_that_do_not_follow_the_merges() -> None:
    inner = bpe([("a", "b"), ("c", "d"), ("ab", "cd")])
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    names = {**{c: i + 3 for i, c in enumerate(byte_characters().values())}, "abcd": 0, "cd": 1, "ab": 2}
    inner.model = models.BPE(vocab=names, merges=merges)
    fast = fast_encoder(inner)
    assert fast is not None
    assert fast("abcdab cd").tolist() == inner.encode("abcdab cd").ids
