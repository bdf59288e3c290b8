"""`bessemer data check`: each kind of trouble at and around its threshold, with count, place and fix."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.cli import main
from bessemer.data import check as check_module
from bessemer.data.check import ENORMOUS_CHARS, CheckReport, check_files
from bessemer.data.read import list_files, read_part
from bessemer.data.read.parts import divide_source
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.rows import PadRows
from bessemer.data.tokenizer.chat import render, special_tokens
from bessemer.data.tokenizer.encode import encode_documents
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.observe.format import short_path
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.data import SourceSpec

TOKENIZER = Tokenizer.train(
    ["user assistant How do I temper steel? Heat it.\n" * 20], 300, special=special_tokens("chatml")
)


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; what is text already stands as it is."""
    written = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{row}\n" for row in written), encoding="utf-8")
    return path


def texts(tmp_path: Path, *found: str, name: str = "a.jsonl") -> Path:
    return lines(tmp_path / name, [{"text": text} for text in found])


def check(*paths: Path, **settings: Any) -> CheckReport:
    more = {key: settings.pop(key) for key in ("tokenizer", "context", "classify") if key in settings}
    return check_files(SourceSpec(path=[str(path) for path in paths], **settings), **more)


def kinds(checked: CheckReport) -> dict[str, int]:
    return {problem.what: problem.count for problem in checked.problems}


def talk(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more} for role, content in turns]}


def test_good_text_has_no_problem(tmp_path: Path) -> None:
    path = texts(tmp_path, "Ångström à la carte.\n\tIndented,\r\nand\fpaged.", "Zweiter Text: 5 µm ± 2 °C …")
    found = check(path)
    assert (found.files, found.documents, found.problems) == (1, 2, [])
    assert found.characters == sum(len(json.loads(line)["text"]) for line in path.read_text().splitlines())


def test_rows_that_cannot_be_read_are_counted_by_kind_with_places(tmp_path: Path) -> None:
    rows = [{"text": "fine"}, '{"text": "cut', '{"text": "cut off la', {"body": 1}, "[1, 2]", '{"text": 7}', "x"]
    found = check(lines(tmp_path / "a.jsonl", [*rows, {"text": "fine too"}]))
    assert found.documents == 2
    by_kind = {problem.what: problem for problem in found.problems if problem.what.startswith("unreadable")}
    cut = [problem for what, problem in by_kind.items() if "not valid JSON" in what]
    assert [problem.count for problem in cut] == [2, 1]  # at another column it is the same kind
    assert cut[0].examples[0].startswith(f"{tmp_path}/a.jsonl:2: ")
    assert cut[0].fix == "correct or delete this line"
    missing = next(problem for what, problem in by_kind.items() if "no field 'text'" in what)
    assert missing.examples == [f'{tmp_path}/a.jsonl:4: {{"body": 1}}']
    assert "set text_field" in missing.fix
    assert sum(problem.count for problem in by_kind.values()) == 6


def test_examples_are_few_and_short(tmp_path: Path) -> None:
    found = check(lines(tmp_path / "a.jsonl", ["{" + "x" * 500] * 50))
    [problem] = found.problems
    assert problem.count == 50 and len(problem.examples) == 3
    assert all(len(example) < 250 for example in problem.examples)


def test_a_damaged_file_is_named_and_the_others_are_looked_at(tmp_path: Path) -> None:
    texts(tmp_path, "one " * 400, "two", name="b.jsonl")
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "lost"}\n' * 2000)[:60])
    found = check(packed, tmp_path / "b.jsonl")
    assert found.files == 2
    assert kinds(found)["unreadable file"] == 1
    [problem] = [problem for problem in found.problems if problem.what == "unreadable file"]
    assert "a.jsonl.gz" in problem.examples[0] and problem.fix == "restore it or leave it out"


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    found = check(texts(tmp_path, "", " \n\t ", "x"))
    assert kinds(found) == {"empty document": 2} and found.documents == 1
    assert "a.jsonl" in found.problems[0].examples[0]


@pytest.mark.parametrize(("size", "count"), [(ENORMOUS_CHARS, 0), (ENORMOUS_CHARS + 1, 1)])
def test_an_enormous_document(tmp_path: Path, size: int, count: int) -> None:
    found = check(texts(tmp_path, "small", "é" * size))
    assert sum(kinds(found).values()) == count
    if count:
        assert found.problems[0].examples == [f"{tmp_path}/a.jsonl:2: {size:,} characters"]
        assert "`- length: {max_chars: 1000000}`" in found.problems[0].fix


def test_files_without_a_document_are_named(tmp_path: Path) -> None:
    good = texts(tmp_path, "some good text", name="good.jsonl")
    for name in ("empty.jsonl", "empty.txt"):
        (tmp_path / name).touch()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    checked = check(good, *(tmp_path / name for name in ("empty.jsonl", "empty.parquet")))
    assert kinds(checked) == {"file without a document": 2}
    assert checked.problems[0].examples == [str(tmp_path / "empty.jsonl"), str(tmp_path / "empty.parquet")]
    assert kinds(check(tmp_path / "empty.txt")) == {"file without a document": 1, "empty document": 1}


def test_a_column_of_numbers_is_named_as_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "a.parquet")
    [problem] = check(tmp_path / "a.parquet").problems
    assert problem.what == "column 'text' holds int64, not text"
    assert problem.fix == "it has 'body': set text_field to the one that holds the text"
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert check(tmp_path / "a.parquet").problems[0].fix.startswith("there is no other")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_text_without_a_mark_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("Heat the steel and let it cool.".encode(encoding))
    assert kinds(check(tmp_path / "a.txt")) == {f"text in {encoding[:6].upper()} without a byte-order mark": 1}


def test_lost_characters_are_shown_in_their_place(tmp_path: Path) -> None:
    found = check(texts(tmp_path, "whole", "x" * 90 + " caf� au lait " + "y" * 90))
    assert kinds(found) == {"lost characters (U+FFFD)": 1}
    assert "caf� au lait" in found.problems[0].examples[0] and ":2: " in found.problems[0].examples[0]


def test_a_file_that_is_not_utf8_is_named_with_its_first_bad_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("été à la façade".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfok caf\xe9")
    (tmp_path / "c.txt").write_text("été � déjà perdu")
    found = check(tmp_path)
    assert kinds(found) == {"not UTF-8": 2, "lost characters (U+FFFD)": 1}
    assert [example.removeprefix(f"{tmp_path}/") for example in found.problems[0].examples] == [
        "a.txt: not UTF-8 (byte 0)", "b.txt: not UTF-8 (byte 9)",
    ]  # fmt: skip
    assert "iconv" in found.problems[0].fix


def test_links_and_pipes_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("readable")
    (tmp_path / "gone.txt").symlink_to("/nowhere/gone.txt")
    (tmp_path / "left-out.txt").symlink_to("/nowhere/left-out.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    problem = check(tmp_path, exclude=["left-out*"]).problems[0]
    assert (problem.what, problem.count) == ("skipped: not a readable file", 2)
    assert "gone.txt: a symbolic link to /nowhere/gone.txt" in problem.examples[0]
    assert "pipe.txt: a named pipe" in problem.examples[1]
    assert kinds(check(tmp_path / "[ag]*.txt")) == {"skipped: not a readable file": 1}


TRUE = "café|naïve|don’t|“quoted”|5 £|Straße|Ñandú|à la carte|año|привет|Ελλάδα|中文字符|😀 hm|…|עברית|مرحبا"
SPOILT = {
    text.encode().decode(encoding)
    for text in TRUE.split("|")
    for encoding in ("latin-1", "cp1252")
    if encoding == "latin-1" or not any(byte in b"\x81\x8d\x8f\x90\x9d" for byte in text.encode())
}
HONEST = [
    "Ângström â la carte", "Ângstroem à la carte", "“MINHA IRMÃ” disse ela", "AMANHÃ… talvez", "A MANHÃ» disse",
    "DE MANHÃ\xa0ATÉ À NOITE", "la letra «Ñ»… y la “Ñ”…", "café”…", "garçon déjà «vu»…", "Ðat ís gott – góð’… ",
    "“Â” and “Ã”", "ÂME", "São Paulo — 25 °C", "15 Å² ± 2 µm", "Île — ¿Qué? ¡Sí!", "NÃO É", "naïve…", "fiancé’s",
    "œuvre Šimon Žižka",
]  # fmt: skip


@pytest.mark.parametrize("text", sorted(SPOILT))
def test_text_read_in_a_wrong_encoding_is_found(tmp_path: Path, text: str) -> None:
    found = check(texts(tmp_path, f"the {text}, they said"))
    [problem] = [problem for problem in found.problems if problem.what.startswith("mojibake")]
    assert problem.count == 1 and "`unicode`" in problem.fix
    assert problem.examples[0].startswith(f"{tmp_path}/a.jsonl:1: ")


@pytest.mark.parametrize("text", HONEST)
def test_accented_text_is_no_mojibake(tmp_path: Path, text: str) -> None:
    assert kinds(check(texts(tmp_path, text))) == {}


def test_the_step_named_as_the_fix_mends_it(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    from bessemer.data.curate.step import make_step
    from bessemer.spec.text_steps import UnicodeSpec

    path = texts(tmp_path, "l'Ã©tÃ© â€” dÃ©jÃ\xa0", "bell \x07 and \x00 nul")
    assert len(kinds(check(path))) == 2
    step = make_step(UnicodeSpec(), 0)
    [part] = divide_source("", list_files(SourceSpec(path=[str(path)])), SourceSpec(path=[str(path)]))
    mended = [step.apply([document])[0] for document in read_part(part, SourceSpec(path=[str(path)]))]
    assert kinds(check(texts(tmp_path, *[str(text) for text in mended], name="b.jsonl"))) == {}


@pytest.mark.parametrize("sign", ["\x00", "\x08", "\x0b", "\x0e", "\x1b", "\x1f", "\x7f"])
def test_control_characters_are_shown_escaped(tmp_path: Path, sign: str) -> None:
    found = check(texts(tmp_path, f"before{sign}after"))
    assert kinds(found) == {"control characters": 1}
    assert repr(f"before{sign}after") in found.problems[0].examples[0]


@pytest.mark.parametrize("sign", ["\t", "\n", "\r", "\f", "\x20", "\x80"])
def test_white_space_is_no_control_character(tmp_path: Path, sign: str) -> None:
    assert kinds(check(texts(tmp_path, f"before{sign}after"))) == {}


def test_copies_are_found_across_files_and_point_to_the_first(tmp_path: Path) -> None:
    first = texts(tmp_path, "The same text.", "Another.", "the same text.")
    second = texts(tmp_path, "New.", "The  same\ntext. ", "Another.", name="b.jsonl")
    found = check(first, second)
    assert kinds(found) == {"copy of an earlier document": 2}  # case counts, white space does not
    assert found.problems[0].examples == [f"{second}:2: is {first}:1", f"{second}:3: is {first}:2"]


def test_copies_are_those_that_the_step_named_as_the_fix_drops(tmp_path: Path) -> None:
    from bessemer.data.curate.corpus import Corpus
    from bessemer.data.curate.engine import LocalEngine, Meter
    from bessemer.data.curate.passes import ValidationSplit
    from bessemer.spec.data import DataSpec

    path = texts(tmp_path, *(f"text {i % 7}" + " " * (i % 3) for i in range(40)), "Text 1", "text  2")
    data = DataSpec.model_validate({"sources": {"a": str(path)}, "clean": ["dedup_exact"]})
    corpus = Corpus(data, {"a": list_files(data.sources["a"])}, tmp_path / "cache", LocalEngine(), Meter())
    corpus.curate(ValidationSplit(0, 0.0))
    tally = corpus.stages[0].counts_by_source["a"]
    assert kinds(check(path)) == {"copy of an earlier document": tally.documents_in - tally.documents_out}


def test_copies_are_compared_beyond_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = texts(tmp_path, *(f"text {i % (1 << 16)}" for i in range((1 << 16) + 3)))
    monkeypatch.setattr(check_module, "_check_text", lambda *_: None)
    monkeypatch.setattr(check_module, "_compare_schemas", lambda *_: None)
    assert kinds(check(path)) == {"copy of an earlier document": 3}


def test_mixed_types_name_the_rarer_one(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"row {i}", "tag": "a", "score": i / 2, "note": None} for i in range(10)]
    rows[6]["tag"], rows[7]["score"], rows[8]["note"] = 5, 3, "x"
    found = check(lines(tmp_path / "a.jsonl", rows))
    assert kinds(found) == {"mixed types in field 'tag'": 1}  # numbers are one type, null is none
    assert found.problems[0].examples == [f"{tmp_path}/a.jsonl:7: 1 number, 9 str"]


@pytest.mark.parametrize(("having", "count"), [(10, 0), (9, 1), (6, 4), (5, 0), (1, 0)])
def test_a_field_that_few_rows_lack_is_a_slip_one_that_most_lack_is_optional(
    tmp_path: Path, having: int, count: int
) -> None:
    rows = [{"text": f"row {i}", **({"lang": "en"} if i < having else {})} for i in range(10)]
    found = check(lines(tmp_path / "a.jsonl", rows))
    assert kinds(found) == ({"rows without field 'lang'": count} if count else {})
    if count:
        assert found.problems[0].examples == [f"{tmp_path}/a.jsonl:{having + 1}"]
    rows.reverse()
    if count:
        assert check(lines(tmp_path / "a.jsonl", rows)).problems[0].examples == [f"{tmp_path}/a.jsonl:1"]


def test_keys_without_end_are_not_compared_without_end(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", **{f"{i}-{k}": 1 for k in range(100)}} for i in range(100)]
    assert kinds(check(lines(tmp_path / "a.jsonl", rows))) == {}


def test_fields_that_the_source_reads_are_left_to_the_reader(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}", "id": str(i)} for i in range(9)] + [{"text": "row 9"}]
    assert kinds(check(lines(tmp_path / "a.jsonl", rows), id_field="id")) == {}


@pytest.mark.parametrize(
    ("row", "what", "where"),
    [
        (talk(("user", "Hello"), ("bot", "Hi")), "conversation: unknown role", "message 2 has 'bot'"),
        (talk(("user", "Hello"), ("assistant", "  ")), "conversation: empty content", "message 2"),
        (talk(("user", "Hello")), "conversation: no assistant turn", "there is nothing to learn from"),
        (
            talk(("user", "Hello"), ("system", "Be kind"), ("assistant", "Hi")),
            "conversation: system message inside",
            "message 2",
        ),
        (
            talk(("user", "Hello"), ("assistant", "Hi"), weight=0),
            "50% (1) of 2 rows have no trained token [nothing_trained]",
            "",
        ),
    ],
)
def test_conversations_that_cannot_be_learnt_from(tmp_path: Path, row: dict[str, Any], what: str, where: str) -> None:
    good = talk(("system", "Be kind"), ("user", "Hello"), ("assistant", "Hi there"))
    path = lines(tmp_path / "a.jsonl", [good, row])
    found = check(path, messages_field="messages", tokenizer=TOKENIZER)
    assert kinds(found) == {what: 1} and found.documents == 2
    assert found.problems[0].examples[0].startswith(f"{path}:2")
    assert where in found.problems[0].examples[0]


def test_a_row_without_messages_is_unreadable_and_one_without_any_is_empty(tmp_path: Path) -> None:
    good = talk(("user", "Hello"), ("assistant", "Hi there"))
    path = lines(tmp_path / "a.jsonl", [good, {"messages": 5}, {"messages": []}, {"chat": []}])
    found = kinds(check(path, messages_field="messages"))
    assert found.pop("empty document") == 1
    assert sum(count for what, count in found.items() if what.startswith("unreadable row")) == 2


def test_an_answer_past_the_context_is_one_that_truncated_rows_do_not_weigh(tmp_path: Path) -> None:
    """The threshold is that of the rows themselves: with one token more of context the answer begins to count."""
    path = lines(tmp_path / "a.jsonl", [talk(("user", "How do I temper steel? " * 4), ("assistant", "Heat it."))])
    source = SourceSpec(path=[str(path)], messages_field="messages")
    [part] = divide_source("", list_files(source), source)
    [document] = read_part(part, source)
    with StoreWriter(str(tmp_path / "store"), TOKENIZER.vocab_size, TOKENIZER.fingerprint) as writer:
        for _, ids, mask in encode_documents([document], TOKENIZER, 1, "chatml"):
            writer.add(ids, "f", 1, 0, 1, mask=mask)
    store = TokenStore(str(tmp_path / "store"))
    ids, mask = render(document.messages or [], TOKENIZER)
    first, length = int(np.flatnonzero(mask)[0]), len(ids) + 1  # with the end of the document
    assert first > 20
    for context in (first - 1, first, first + 1, first + 2):
        weights = PadRows(store, context, "truncate").assemble(np.array([0])).weights
        assert weights is not None
        said = kinds(check(path, messages_field="messages", tokenizer=TOKENIZER, context=context))
        late = [what for what in said if what.endswith("[answer_past_context]")]
        assert late == [] if weights.any() else "in all of 1 rows the answer lies past the context" in late[0]
        assert set(said) - set(late) == {
            f"100% of 1 rows are cut at {context} tokens; the longest has {length} [rows_beyond_context]"
        }
        assert bool(weights.any()) == (context > first)


def test_the_most_frequent_trouble_comes_first(tmp_path: Path) -> None:
    found = check(texts(tmp_path, "lost �", "bell \x07 a", "bell \x07 b", "bell \x07 c"))
    assert [problem.count for problem in found.problems] == [3, 1]


def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["bessemer", "data", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main.run()
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out, printed.err


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = texts(tmp_path, "fine", "good"), texts(tmp_path, "same", "same", name="b.jsonl")
    code, out, err = say(monkeypatch, capsys, good)
    assert (code, err) == (0, "") and "2 documents, 8 characters in 1 files" in out and "no problems" in out
    code, out, err = say(monkeypatch, capsys, bad)
    assert (code, err) == (1, "")
    assert "1  copy of an earlier document" in out and f"{bad}:2: is {bad}:1" in out and "fix: " in out
    code, out, err = say(monkeypatch, capsys, bad, "--json")
    told = json.loads(out)
    assert code == 1 and told["documents"] == 2 and told["problems"][0]["count"] == 1
    code, out, err = say(monkeypatch, capsys, tmp_path / "none.jsonl")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "none.jsonl" in err
    code, out, err = say(monkeypatch, capsys, good, "--format", "docx")
    assert (code, out) == (2, "") and err.startswith("format: ") and err.count("\n") == 1
    code, out, err = say(monkeypatch, capsys, good, "--tokenizer", tmp_path / "none.json")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "none.json" in err


def test_conversations_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    path = lines(tmp_path / "a.jsonl", [talk(("user", "How do I? " * 40), ("assistant", "Heat it."))])
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--context")
    assert say(monkeypatch, capsys, path, "--messages", "messages", *options, "4096")[0] == 0
    code, out, _ = say(monkeypatch, capsys, path, *options, "64")  # the format is recognised
    assert code == 1 and "the answer lies past the context" in out and "raise data.context (now 64)" in out
    code, out, _ = say(monkeypatch, capsys, path, *options, "64", "--show-masks")
    assert out.splitlines()[0].startswith(f"{short_path(str(path))}:1, ") and "\n[[Heat it.<|im_end|>]]\n" in out
    code, out, err = say(monkeypatch, capsys, path, "--show-masks")
    assert (code, out) == (
        2,
        "",
    ) and err == "--show-masks: which tokens are trained depends on the tokenizer: add --tokenizer FILE\n"


@pytest.mark.parametrize("name", ["template_tokens_missing", "system_prompt_lost", "bos_eos_mismatch"])
def test_the_template_of_the_tokenizers_folder_is_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Tokenizer.train(["user assistant Hello Hi there"], 300, special=["</s>"]).save(tmp_path / "tokenizer.json")
    written = {"template_tokens_missing": "<|turn_end|>"}.get(name, "")
    roles = "" if name == "system_prompt_lost" else "{{ m.content if m.role == 'system' }}"
    template = (
        "{% for m in messages %}"
        + written
        + roles
        + "{{ m.content if m.role == 'user' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    eos = "</s>" if name == "bos_eos_mismatch" else "<|endoftext|>"
    config = {"chat_template": template, "eos_token": eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = lines(tmp_path / "a.jsonl", [talk(("system", "Be kind"), ("user", "Hello"), ("assistant", "Hi there you"))])
    code, out, _ = say(monkeypatch, capsys, path, "--tokenizer", tmp_path, "--json")
    [problem] = json.loads(out)["problems"]
    assert code == 1 and problem["what"].endswith(f"[{name}]") and problem["fix"]


def test_a_template_whose_mask_is_unknown_is_a_problem_with_its_place(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", [talk(("user", "Hello"), ("assistant", "Hi"), ("user", "So"), ("assistant", "?"))]
    )
    last = "{% if loop.last or m.role == 'user' %}{{ m.content }}{{ eos_token }}{% endif %}"
    template = "{% for m in messages %}" + last + "{% endfor %}"
    checked = check_files(SourceSpec(path=[str(path)], messages_field="messages"), TOKENIZER, None, template)
    [problem] = checked.problems
    assert "is rendered differently" in problem.what and problem.examples == [f"{path}:1"]
    assert "put {% generation %}" in problem.fix and problem.fix.endswith("[template_without_marks]")


def test_labels_are_checked_against_those_of_the_spec(tmp_path: Path) -> None:
    rows = [("it was good", "pos"), ("bad", "neg"), ("odd", "neutral"), ("worse", "neg"), ("seven", "7")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    columns = {"text": "text", "label": "label"}
    report = check(path, columns=columns, classify=ClassifySpec(labels=["neg", "pos", "mixed"]))
    problems = {problem.what: (problem.count, problem.examples[0]) for problem in report.problems}
    assert problems["label 'neutral' is none of neg, pos, mixed"] == (1, f"{path}:3")
    assert problems["label '7' is none of neg, pos, mixed"] == (1, f"{path}:5")
    assert "label 'mixed' occurs in no row" in problems
    fine = check(path, columns=columns, classify=ClassifySpec(labels=["neg", "pos", "neutral", "7"]))
    assert fine.problems == []
    tags = tmp_path / "tags.jsonl"
    tags.write_text(
        json.dumps({"w": ["a", "b"], "l": ["X", None]}) + "\n" + json.dumps({"w": ["a", "c"], "l": ["X"]}) + "\n"
    )
    words = {"words": "w", "label": "l"}
    report = check(tags, columns=words, classify=ClassifySpec(kind="token", labels=["X", "Y"]))
    assert {problem.what for problem in report.problems} == {
        "2 words and 1 labels", "label 'Y' occurs in no row", "every label is 'X'",
    }  # fmt: skip
