"""Mistakes in fine-tuning rows: each is named before the first step of a run from a spec on disk; healthy sets raise
none."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tests.session.conftest import spec_data

from bessemer.data import chat_rows, language
from bessemer.data.chat_checks import CHECKS
from bessemer.data.chat_rows import RowCounts, RowSample, StoreReader, count_store, sample_numbers
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.run.directory import Run
from bessemer.session.data import open_data, publish_data
from bessemer.session.session import Session, run_folder
from bessemer.session.session import train as train_spec
from bessemer.session.sft import check_sources
from bessemer.session.start import complete_spec
from bessemer.spec.data import StoreSpec
from bessemer.spec.lints import SFT_CHECKS, lint_spec
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec

Rows = list[dict[str, Any]]
THINGS = ("furnace", "ladle", "ingot", "anvil", "hammer", "bellows", "mould", "tongs", "slag", "flux")
TURN = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n"
)
EACH = "{% for m in messages %}" + TURN + "{% endfor %}"


def turns(question: str, answer: str, system: str = "", **more: Any) -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    return {
        "messages": [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    }


def question(i: int) -> str:
    return f"How do I use the {THINGS[i % 10]} number {i} in the old steel works by the river?"


def answer(i: int) -> str:
    return f"You clean the {THINGS[i % 10]} first, and then you heat it slowly for {i} minutes before you use it."


def healthy(count: int = 40, **more: Any) -> Rows:
    return [turns(question(i), answer(i), **more) for i in range(count)]


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows, a tokenizer with its config, a template and a spec; returns the spec's path."""

    def write(rows: Rows, template: str | None = None, config: dict[str, str] | None = None, **parts: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        special = parts.pop("special", ["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
        texts = [json.dumps(row, ensure_ascii=False) for row in rows]
        Tokenizer.train([*texts, "system user assistant"], 400, special=special, kind="char").save(
            tmp_path / "tokenizer.json"
        )
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}))
        tokenizer = {"path": str(tmp_path / "tokenizer.json"), **parts.pop("tokenizer", {})}
        if template is not None:
            (tmp_path / "chat.jinja").write_text(template)
            tokenizer["chat"] = str(tmp_path / "chat.jinja")
        data = {"sources": {"chat": {"path": [str(path)]}}, "context": 512, "validation": 0, **parts.pop("data", {})}
        spec = spec_data("run", path, tmp_path / "runs", objective="sft", data=data, budget={"steps": 1, "batch": 512})
        spec |= {"tokenizer": tokenizer} | parts
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
        return tmp_path / "spec.yaml"

    return write


def warnings(spec: RunSpec) -> list[str]:
    notes = [event["reason"] for event in Run(run_folder(spec)).events("data_note")]
    return [note for note in notes if note.startswith("warning: ")]


# As in published models: the line break after the turn is inside the block; BOS and EOS around each exchange.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MESSAGES = healthy()
NO_END = EACH.replace("{{ eos_token }}", "").replace("{% endfor %}", "{{ eos_token }}{% endfor %}")
WORTHLESS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing_trained": (
        {"rows": healthy(weight=0)},
        r"rows.jsonl:1: all of 40 rows have no trained token: give each a turn of the assistant",
    ),
    "turn_end_untrained": (
        {"rows": MESSAGES, "template": NO_END},
        r"rows.jsonl:1: in all of 40 rows no end of the turn is trained: the model would never stop",
    ),
    "double_bos": (
        {"rows": MESSAGES, "template": "{{ bos_token }}{{ bos_token }}" + EACH},
        r"rows.jsonl:1: all of 40 rows begin with <s> twice: remove one",
    ),
    "answer_past_context": (
        {"rows": [turns(question(i) * 10, answer(i)) for i in range(40)]},
        r"in all of 40 rows the answer lies past the context of 512 tokens",
    ),
    "template_without_marks": (
        {"rows": [{"messages": MESSAGES[0]["messages"] * 2}], "template": "{% for m in messages %}"
         "{% if loop.last or m.role == 'user' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"},
        r"rows.jsonl:1: chat template: message 2 is rendered differently .*put {% generation %}",
    ),
    "template_tokens_missing": (
        {"rows": MESSAGES, "special": [], "template": QWEN},
        r"the chat template writes <\|im_start\|>, <\|im_end\|>, which the tokenizer splits .*special: \[\"<\|im_start",
    ),
    "bos_eos_mismatch": (
        {"rows": MESSAGES, "template": EACH, "config": {"eos_token": "</s>"}},
        r"answers end with <\|endoftext\|>, but tokenizer_config.json names </s> .*write tokenizer: {eos: \"</s>\"}",
    ),
    "special_tokens_split": (
        {"rows": [{"text": f"<|im_start|>user\n{question(i)}<|im_end|>\n"} for i in range(40)]},
        r"rows.jsonl:1: all of 40 rows spell <\|im_start\|> as text, .*the template was applied before",
    ),
    "system_prompt_lost": (
        {"rows": healthy(system="Answer as a smith."), "template":
         "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}"},
        r"rows.jsonl:1: the chat template leaves out system messages, which 40 of the first rows have",
    ),
    "short_answers": (
        {"rows": [turns(question(i), "" if i % 4 else answer(i)) for i in range(40)]},
        r"rows.jsonl:2: 75% \(30\) of 40 rows have empty answers: .*delete them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORTHLESS)
def test_a_worthless_run_is_refused_by_name(name: str, write_spec: Callable[..., Path]) -> None:
    settings, message = WORTHLESS[name]
    path = write_spec(**settings)
    with pytest.raises(UserError, match=message) as refused:
        Session(load_spec(path)).train()
    assert f"[{name}]" in str(refused.value) and "\n" not in str(refused.value)
    assert not (path.parent / "runs" / "run").exists()


def chinese(i: int) -> str:
    return f"首先清洁第{i}号炉子，然后慢慢加热它，直到铁水开始流动为止。"


DEGREES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing_trained": (
        {"rows": [*healthy(39), *healthy(1, weight=0)]},
        r"rows.jsonl:40: 2% \(1\) of 40 rows have no trained token",
    ),
    "answer_past_context": (
        {"rows": [*healthy(), turns(question(1) * 10, answer(1))]},
        r"rows.jsonl:41: in 2% \(1\) of 41 rows the answer lies past the context",
    ),
    "rows_beyond_context": (
        {"rows": [*healthy(30), *(turns(question(i), answer(i) * 10) for i in range(10))]},
        r"rows.jsonl:31: 25% of 40 rows are cut at 512 tokens; the longest has [\d,]+: raise data.context",
    ),
    "short_answers": (
        {"rows": [turns(question(i), "yes" if i % 3 else answer(i)) for i in range(40)]},
        r"rows.jsonl:2: 65% \(26\) of 40 rows have answers of one word",
    ),
    "language_mixup": (
        {"rows": [turns(question(i), chinese(i) if i % 2 else answer(i)) for i in range(40)]},
        r"rows.jsonl:2: 50% \(20\) of 40 rows are answered in another language than they are asked in \(en, then zh",
    ),
    "template_tokens_missing": (
        {"rows": MESSAGES, "special": [], "template": ZEPHYR},
        r"the chat template writes <\|user\|>, <\|assistant\|>, <\|system\|>, <\|tool\|>, which the tokenizer splits",
    ),
    "leaked_validation": (
        {"rows": [row for i in range(100) for row in (turns(question(i), answer(i)),
                                                     turns(question(i).upper() + " ", answer(i)))],
         "data": {"validation": 0.2}},
        r"of \d+ validation rows and \d+ training rows that were compared, \d+ are the same but for case",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEGREES)
def test_a_matter_of_degree_warns_by_name(name: str, write_spec: Callable[..., Path]) -> None:
    settings, message = DEGREES[name]
    spec = load_spec(write_spec(**settings))
    assert Session(spec).train().kind == "finished"
    [line] = [line for line in warnings(spec) if f"[{name}]" in line]
    assert line.startswith("warning: data.sources.chat: ")
    assert re.search(message, line), line


def test_an_end_that_the_callers_mask_leaves_out(write_spec: Callable[..., Path]) -> None:
    path = write_spec(MESSAGES, data={"sources": {"chat": {"path": "python"}}})
    tokenizer = Tokenizer.load(path.parent / "tokenizer.json")
    items = []
    for i in range(40):
        ids = [*tokenizer.encode(answer(i)), *[tokenizer.eos_id] * 3]  # padded with EOS, and masked by token
        items.append({"tokens": ids, "mask": [token != tokenizer.eos_id for token in ids]})
    with pytest.raises(
        UserError, match=r"dataset list\[0\]: in all of 40 rows the end .*mask padding by its position"
    ) as error:
        train_spec(load_spec(path), datasets={"chat": items})
    assert "[pad_is_eos]" in str(error.value)
    for item in items:
        item["mask"][-3] = True
    assert train_spec(load_spec(path), datasets={"chat": items}).kind == "finished"


def test_packed_and_unfinished_rows_of_the_caller(write_spec: Callable[..., Path]) -> None:
    spec = complete_spec(load_spec(write_spec(MESSAGES, data={"sources": {"chat": {"path": "python"}}})))
    tokenizer = Tokenizer.load(str(spec.tokenizer.path))
    packed = [[*tokenizer.encode(answer(i)), tokenizer.eos_id, *tokenizer.encode(answer(i + 1))] for i in range(40)]
    held_out = [[*tokenizer.encode(answer(3).upper()), tokenizer.eos_id, *tokenizer.encode(answer(4))]]
    data = open_data(spec, Plan(), datasets={"chat": packed, "chat.validation": held_out})
    [mistake] = check_sources(spec, data, 512)["chat"]
    assert (mistake.name, mistake.places) == ("leaked_validation", ["dataset list[0]"])
    data = open_data(spec, Plan(), datasets={"chat": [tokenizer.encode(answer(i)) for i in range(40)]})
    [mistake] = check_sources(spec, data, 512)["chat"]
    assert (mistake.name, mistake.refuses) == ("turn_end_untrained", True) and "in the mask" in mistake.fix


def test_silencing_accepts_a_mistake_and_a_resume_is_not_checked(write_spec: Callable[..., Path]) -> None:
    settings = WORTHLESS["double_bos"][0]
    path = write_spec(**settings)
    with pytest.raises(UserError, match=r"to train anyway, write lints: {silence: \[double_bos\]}"):
        Session(load_spec(path)).train()
    spec = load_spec(path, ["lints.silence=[double_bos]"])
    assert lint_spec(spec) == [lint for lint in lint_spec(spec) if lint.rule != "unknown_rule"]
    assert Session(spec).train().kind == "finished" and warnings(spec) == []
    Session(load_spec(path)).train()  # begun already


def test_a_published_store_is_checked(write_spec: Callable[..., Path]) -> None:
    path = write_spec(*WORTHLESS["double_bos"][0].values())
    (path.parent / "store").mkdir()
    url = (path.parent / "store").as_uri()
    spec = complete_spec(load_spec(path))
    publish_data(spec, StoreSpec(url=url), 512, lambda line: None)
    (path.parent / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"rows.jsonl:1: all of 40 rows begin with <s> twice: .*\[double_bos\]"):
        Session(load_spec(path, [f"data.store={url}", "data.sources={chat: {weight: 1}}"])).train()


def test_every_refused_mistake_is_named_in_one_line(write_spec: Callable[..., Path]) -> None:
    template = "{{ bos_token }}{{ bos_token }}" + NO_END
    with pytest.raises(UserError, match=r"\[turn_end_untrained\]; .*; also refused: double_bos$"):
        Session(load_spec(write_spec(MESSAGES, template))).train()


GERMAN = "Man reinigt zuerst den Ofen gründlich und erhitzt ihn dann langsam über viele Minuten, bis er glüht."
CODE = "```python\ndef heat(minutes):\n    return [furnace.step() for _ in range(minutes)]\n```"
CALL = [{"type": "function", "function": {"name": "heat", "arguments": {"minutes": 3}}}]
HEALTHY: dict[str, dict[str, Any]] = {
    "messages": {"rows": healthy(system="Answer as a smith.")},
    "tools": {"rows": [{"messages": [
        {"role": "user", "content": question(i)}, {"role": "assistant", "content": "", "tool_calls": CALL},
        {"role": "tool", "content": f'{{"temperature": {i}}}'}, {"role": "assistant", "content": answer(i)}]}
        for i in range(40)]},
    "reasoning": {"rows": healthy(reasoning_content="The user asks for the old works, so I recall the steps.")},
    "sharegpt": {"rows": [{"conversations": [{"from": "human", "value": question(i)},
                                             {"from": "gpt", "value": answer(i)}]} for i in range(40)]},
    "alpaca": {"rows": [{"instruction": question(i), "input": "", "output": answer(i)} for i in range(40)]},
    "prompt_completion": {"rows": [{"prompt": question(i), "completion": answer(i)} for i in range(40)],
                          "tokenizer": {"chat": "none"}},
    "text": {"rows": [{"text": f"{question(i)} {answer(i)}"} for i in range(40)]},
    "multi_turn": {"rows": [{"messages": [*turns(question(i), answer(i))["messages"],
                                          *turns("And then?", answer(i + 1))["messages"]]} for i in range(40)],
                   "tokenizer": {"learn": "last"}},
    "german": {"rows": [turns(f"Wie benutzt man den Ofen Nummer {i} in dem alten Stahlwerk am Fluss?", f"{i}: {GERMAN}",
                              system="You are a helpful assistant of a steel works. Answer in German.")
                        for i in range(40)]},
    "chinese": {"rows": [turns(f"怎样使用第{i}号炉子？", chinese(i), system="You are a helpful assistant.")
                         for i in range(40)]},
    "code": {"rows": [turns(f"Write a function that heats the furnace for {i} minutes.", f"{answer(i)}\n{CODE}")
                      for i in range(40)]},
    "qwen": {"rows": healthy(system="Answer as a smith."), "template": QWEN,
             "config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}},
    "llama2": {"rows": healthy(), "template": LLAMA2, "tokenizer": {"eos": "</s>"},
               "config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}},
    "zephyr": {"rows": healthy(system="Answer as a smith."), "template": ZEPHYR, "tokenizer": {"eos": "</s>"},
               "special": ["<s>", "</s>"],
               "config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": ZEPHYR}},
    "own_template": {"rows": healthy(system="Answer as a smith."), "template": "{{ bos_token }}" + EACH,
                     "config": {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}},
}  # fmt: skip


@pytest.mark.parametrize("method", ["model", "script"])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_sets_have_no_mistake(
    name: str, method: str, write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "script":
        monkeypatch.setattr(language.LanguageDetector, "__init__", lambda self: setattr(self, "_model", None))
    spec = complete_spec(load_spec(write_spec(**HEALTHY[name])))
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"validation": 0.1})})
    data = open_data(spec, Plan())
    assert data.validation["chat"]
    assert check_sources(spec, data, 512) == {}


def test_a_healthy_run_has_no_warning(write_spec: Callable[..., Path]) -> None:
    spec = load_spec(write_spec(MESSAGES))
    assert Session(spec).train().kind == "finished" and warnings(spec) == []


def test_other_languages_than_the_rest(write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language.LanguageDetector, "__init__", lambda self: setattr(self, "_model", None))
    rows = [turns(chinese(i), chinese(i)) if i % 8 == 0 else turns(question(i), answer(i)) for i in range(80)]
    spec = complete_spec(load_spec(write_spec(rows)))
    [mistake] = check_sources(spec, open_data(spec, Plan()), 512)["chat"]
    assert (mistake.name, mistake.count, mistake.refuses) == ("language_mixup", 10, False)
    assert mistake.what.startswith("12% of 80 answers are in other languages than the rest (Latin script 88%, zh 12%")


def test_languages_by_script() -> None:
    detector = language.LanguageDetector()
    detector._model = None
    cases = {
        "An English sentence that is long enough.": "Latin script",
        "Это предложение на русском языке.": "Cyrillic script",
        "炉子很热": "zh", "鉄を溶かす炉はとても熱いです": "ja", "용광로는 매우 뜨겁습니다": "ko", "Short": None,
        "x = [a[i] + 1 for i in (1, 2, 3)]; y = {}": None,
    }  # fmt: skip
    assert {text: detector.detect(text) for text in cases} == cases


def test_samples_are_bounded_and_say_so(write_spec: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_numbers(2000) == list(range(2000))
    numbers = sample_numbers(1_000_000)
    assert numbers[:1000] == list(range(1000)) and len(numbers) <= 2000 and numbers[-1] > 900_000
    assert numbers == sample_numbers(1_000_000)
    sample = RowSample()
    rows = [chat_rows.ChatRow(f"f:{i}", np.array([i]), np.ones(1, np.float32)) for i in range(5000)]
    for row in rows:
        sample.add(row)
    assert sample.count == 5000 and len(sample.rows()) == 2000 and sample.rows()[:1000] == rows[:1000]

    monkeypatch.setattr("bessemer.session.sft.sample_numbers", lambda count: sample_numbers(count, 5, 5))
    rows = [*healthy(), turns(question(1), answer(1) * 20)]
    spec = complete_spec(load_spec(write_spec(rows, NO_END)))
    mistakes = {one.name: one for one in check_sources(spec, open_data(spec, Plan()), 512)["chat"]}
    read = r"in all of \d+ rows that were read (the first ones, others by hash) of 41"
    pattern = read.replace("(", r"\(").replace(")", r"\)")
    assert re.search(pattern, mistakes["turn_end_untrained"].what)
    assert mistakes["rows_beyond_context"].what.startswith("2% of 41 rows are cut")  # counted over all


def test_counts_of_a_store_are_those_of_its_rows(write_spec: Callable[..., Path]) -> None:
    draw = np.random.default_rng(0)
    rows = [turns(question(i) * int(draw.integers(1, 8)), answer(i), weight=int(draw.integers(2))) for i in range(60)]
    spec = complete_spec(load_spec(write_spec(rows)))
    store = open_data(spec, Plan()).train["chat"]
    reader, expected = StoreReader(store), RowCounts()
    for number in range(store.documents):
        expected.add(reader.row(number), 300)
    counts = count_store(store, 300)
    assert counts == expected and all(counts.counts[name] > 3 for name in ("untrained", "late", "long"))


def test_the_names_that_specs_may_silence() -> None:
    assert set(SFT_CHECKS) == set(CHECKS)
    page = (Path(__file__).parents[2] / "docs" / "lints.md").read_text()
    assert [name for name in (*CHECKS, "template_without_marks") if f"| `{name}` |" not in page] == []
