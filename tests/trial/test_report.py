"""Any case becomes a report that can be read, whatever its numbers and texts are."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer.observe.page import excerpt, format_number, html_page, make_visible, markdown
from bessemer.trial.case import (
    STEP_IS_NORMAL,
    AccusedDocument,
    Action,
    Experiment,
    IncidentCase,
    LayerEvidence,
    NormalRange,
    Recovery,
    Trial,
    Verdict,
)
from bessemer.trial.report import ADVICE, case_exclusions, one_line, report_sections, write_report

EVIL = "</pre><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"
VOID = {"meta", "br", "img"}


class Checker(HTMLParser):
    """Balanced tags, nothing that runs or loads; collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, _ in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "xlink:href"), (tag, name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    found.close()
    assert not found.open
    assert not found.tags & {"script", "img", "link", "iframe", "object", "a", "base", "form"}, found.tags
    assert "@import" not in page and "url(" not in page.split("</style>")[0]
    return found


def accused(**changes: Any) -> AccusedDocument:
    made = AccusedDocument("web", "/data/web-17.jsonl", 45000, "ab12", 7, 128, 11.5, 0.91, 0.8, True, "zq zq zq")
    return replace(made, **changes)


def trial(**changes: Any) -> Trial:
    made = Trial(
        "data", 0.97, "without the accused the batch is normal", True,
        accused=[accused()],
        experiments=[
            Experiment("without the accused", "normal without them?", 2.36, 1.1, True),
            Experiment("earlier weights", "the same on older weights?", 15.9, math.nan, False, "step 3,000"),
        ],
        layers=[LayerEvidence("layers.3.attention", "largest output", math.inf, 14.2)],
        changes=["web began epoch 2"], spread=1e-6, seconds=41.0, cut_short=["fp32"],
    )  # fmt: skip
    return replace(made, **changes)


def case(**changes: Any) -> IncidentCase:
    series = [
        {"step": s, "loss": 15.2 if s >= 50 else 2.3 + s % 3 / 50, "grad_norm": 1.0 + s % 2, "veto": s >= 50}
        for s in range(40, 54)
    ]
    series[11]["loss"] = "nan"
    made = IncidentCase(
        run="web-7b", step=50, time=1.75e9, symptom="loss outlier",
        observed={"loss": 15.2, "grad_norm": 80.0, "lr": 3e-4, "loss_z": 412.3, "grad_z": 17.5},
        normal=NormalRange(2.35, 0.05, 1.0, 0.25, 8.0, 10.0), trial=trial(),
        actions=[Action("veto", s, "loss outlier") for s in range(50, 54)]
        + [Action("rollback", 53, "4 vetoes in a row", {"to_step": 45, "origin": "memory"}),
           Action("skip", 45, "", {"position": 6400}),
           Action("exclude", 53, "1 documents convicted")],
        recovery=Recovery(61, 16, 2.36, 2.35), series=series,
    )  # fmt: skip
    return replace(made, **changes)


def both(made: IncidentCase) -> tuple[str, str]:
    """(Markdown, text of the checked HTML)."""
    sections = report_sections(made, "runs/web-7b/exclusions.jsonl")
    return markdown("t", sections), checked(html_page("t", sections)).text


def test_files_are_written_and_written_again(tmp_path: Path) -> None:
    early = case(recovery=None)
    paths = write_report(tmp_path, early)
    assert {p.name for p in paths.values()} == {f"anomaly-000050.{kind}" for kind in ("md", "html", "json")}
    assert "not known yet" in paths["md"].read_text()
    again = write_report(tmp_path, case())
    assert again == paths and sorted(p.name for p in (tmp_path / "reports").iterdir()) == sorted(
        p.name for p in paths.values()
    )
    for kind in ("md", "html"):
        assert "rejoined its trend at step 61, after 16 steps" in paths[kind].read_text()
    found = json.loads(paths["json"].read_text())
    assert found["trial"]["accused"][0]["row"] == 45000 and found["trial"]["experiments"][1]["grad_norm"] == "nan"
    assert found["summary"].count(". ") == 1, "two sentences"


@pytest.mark.parametrize("which", [0, 1], ids=["markdown", "html"])
def test_what_an_engineer_needs_is_there(which: int) -> None:
    text = both(case())[which]
    for needed in (
        "step 50", "15.2", "2.35", "412", "2025-06-15 15:06:40 UTC", "1.95 to 2.75", "0.97", "without the accused",
        "not finite (nan)", "layers.3.attention", "/data/web-17.jsonl:45000", "91.0%", "zq zq zq", "began epoch 2",
        "4 vetoes in a row", "after 16 steps", "exclude: [runs/web-7b/exclusions.jsonl]", "fp32", "1.0e-06",
    ):  # fmt: skip
        assert needed in text, needed


def test_hostile_text_stays_text() -> None:
    fence = "`````\n# I am no heading"
    evil = accused(file=EVIL, excerpt=f"{EVIL}\x1b[2J\u202e\n{fence}", source="a|b", document_id="*x*")
    made = case(trial=trial(accused=[evil], reason=EVIL), symptom=EVIL, run="[x](http://evil.example)")
    md, text = both(made)
    assert EVIL in text and "␛[2J[U+202E]" in text
    assert "\x1b" not in md + text and "\u202e" not in md + text
    assert "\\<script\\>" in md and "\n# I am" in md and "``````text" in md, "the fence is longer than any inside"
    assert "a\\|b" in md and "\\*x\\*" in md
    rows = [line for line in md.splitlines() if "a\\|b" in line]
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 9, "as many cells as the head has"
    assert "\n" not in one_line(made) and "\x1b" not in one_line(made)


def test_the_line_for_the_channel() -> None:
    rows = [accused(row=row, loss_share=0.01, excerpt="") for row in (7, 8, 9, 12)]
    rows[0] = replace(rows[0], excerpt="[one 3-token pattern repeated 42 times] zq")
    line = one_line(case(trial=trial(accused=[*rows, accused(file="/data/good.jsonl", convicted=False)])))
    assert line == (
        "web-7b step 50: loss outlier; steps 50-53 vetoed, weights untouched; rolled back to step 45; data "
        "skipped up to position 6,400; 1 documents convicted; the loss rejoined its trend at step 61, after 16 "
        "steps (loss 2.36, trend 2.35); verdict: data (0.97): data/web-17.jsonl rows 7-9, 12 (4.0% "
        "of the loss), one 3-token pattern repeated 42 times; without these rows the batch is normal; "
        "at earlier weights the same batch is no better"
    )
    assert len(one_line(case(symptom="x" * 5000))) <= 700


def test_a_step_without_a_trial_says_why() -> None:
    made = case(trial=None, actions=[Action("no trial", 50, "its time share was spent")], recovery=None)
    for text in (*both(made), one_line(made)):
        assert "its time share was spent" in text
    assert case_exclusions(made, 51) == []
    assert "no reason was recorded" in one_line(replace(made, actions=[]))


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_has_its_own_advice(verdict: Verdict) -> None:
    made = case(trial=trial(verdict=verdict, accused=[]), prevention=["mind the gap"])
    for text in both(made):
        assert ADVICE[verdict][:60] in text and "mind the gap" in text
        assert "exclusions.jsonl" not in text, "nobody is convicted, so nothing is to be excluded"
    assert len(set(ADVICE.values())) == len(get_args(Verdict))


def test_advice_names_keys_that_the_spec_has(tmp_path: Path) -> None:
    from bessemer.spec.load import load_spec

    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: {preset: 10M, qk_norm: true}\ndata: {sources: {a: x}, clean: [whitespace], exclude: [runs/a/e.jsonl]}\n"
        "optimizer: {lr: 1e-4, clip: 0.5}\nschedule: {warmup: 2%}\nprecision: fp32\n"
        "guard: {trial: {budget: 300s}}\n"
    )
    assert load_spec(path).data.exclude == ["runs/a/e.jsonl"]
    named = set(re.findall(r"\b(?:data|optimizer|schedule|model|guard)\.[a-z_]+", " ".join(ADVICE.values())))
    assert named == {"data.clean", "optimizer.lr", "optimizer.clip", "schedule.warmup", "model.qk_norm"}


def test_many_convicts_of_a_file_suggest_the_file() -> None:
    guilty = [accused(row=row) for row in range(3)]
    innocent = [accused(row=row, convicted=False) for row in range(3, 7)]
    for others, suggested in ((innocent[:3], True), (innocent, False)):
        md, _ = both(case(trial=trial(accused=guilty + others)))
        assert ('"row": null' in md) == suggested
    found = case_exclusions(case(trial=trial(accused=guilty + innocent)), from_step=54)
    assert [(entry.row, entry.from_step, entry.step, entry.run) for entry in found] == [
        (row, 54, 50, "web-7b") for row in range(3)
    ]
    assert found[0].reason == "data (0.97): loss outlier"


def test_a_shard_of_convicts_does_not_flood_the_page() -> None:
    md, text = both(case(trial=trial(accused=[accused(row=row) for row in range(500)])))
    assert "And 470 more" in md and "And 470 more" in text
    assert md.count("zq zq zq") == 8 and "rows 0-499" in md


def test_the_curve_shows_band_vetoes_and_rollback() -> None:
    page = html_page("t", report_sections(case()))
    loss = page.split("<svg")[1]
    assert loss.count("<circle") == 3 and loss.count("×") == 1, "three vetoed dots, one that is not finite"
    assert "normal: 1.95 to 2.75" in loss and "rolled back to step 45" in loss and "back on trend" in loss
    # After a rollback the steps begin anew: the line is not drawn back through the picture.
    twice = case(series=[{"step": s, "loss": 1.0 + s} for s in (1, 2, 3, 2, 3, 4)])
    path = re.search(r'<path d="([^"]*)"', html_page("t", report_sections(twice)))
    assert path and [part[0] for part in re.findall(r"[ML][^ML]*", path[1])] == list("MLLMLL")


def test_numbers_and_letters_can_be_seen() -> None:
    assert format_number(math.nan) == "not finite (nan)" and format_number(-math.inf) == "not finite (-inf)"
    assert format_number(None) == "not measured" and format_number(12345.678) == "1.235e+04"
    assert make_visible("a\tb\x00\x7f\ud800\u200b\xa0é中") == "a␉b␀␡[U+D800][U+200B] é中"
    cut = excerpt("x" * 500 + "\n" * 40)
    assert len(cut.splitlines()) == 17 and "… (340 more)" in cut and cut.endswith("…")


texts = st.text(st.characters(), max_size=30)  # lone surrogates among them
floats = st.floats(allow_nan=True, allow_infinity=True)
steps = st.integers(-(10**12), 10**12)
cases = st.builds(
    IncidentCase,
    run=texts, step=st.integers(0, 10**9), time=floats, symptom=texts,
    observed=st.dictionaries(st.sampled_from(["loss", "grad_norm", "lr", "loss_z", "grad_z", "x"]), floats),
    normal=st.builds(NormalRange, floats, floats, floats, floats, floats, floats),
    trial=st.none() | st.builds(
        Trial,
        verdict=st.sampled_from(get_args(Verdict)), confidence=floats, reason=texts, state_healthy=st.booleans(),
        accused=st.lists(st.builds(
            AccusedDocument, texts, texts, steps, texts, steps, steps, floats, st.none() | floats, st.none() | floats,
            st.booleans(), texts,
        ), max_size=4),
        experiments=st.lists(st.builds(Experiment, texts, texts, floats, floats, st.booleans(), texts), max_size=3),
        layers=st.lists(st.builds(LayerEvidence, texts, texts, floats, floats), max_size=2),
        changes=st.lists(texts, max_size=2), spread=st.none() | floats, began_at=st.none() | steps,
        seconds=floats, cut_short=st.lists(texts, max_size=2),
    ),
    actions=st.lists(st.builds(
        Action, st.sampled_from(["veto", "rollback", "skip", "exclude", "lower_lr", "stop", "no trial"]) | texts,
        steps, texts,
        st.dictionaries(
            st.sampled_from(["to_step", "position", "documents"]) | texts, floats | texts | st.none(), max_size=3
        ),
    ), max_size=4),
    recovery=st.none() | st.builds(
        Recovery, st.none() | steps, st.none() | steps, st.none() | floats, st.none() | floats
    ),
    prevention=st.lists(texts, max_size=2),
    series=st.lists(st.fixed_dictionaries({}, optional={
        "step": steps | floats | st.just("nan"), "loss": floats | st.sampled_from(["nan", "inf", None, "x"]),
        "grad_norm": floats, "veto": st.booleans() | texts,
    }), max_size=6),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases)
def test_any_case_becomes_a_report(tmp_path_factory: pytest.TempPathFactory, made: IncidentCase) -> None:
    folder = tmp_path_factory.mktemp("run")
    paths = write_report(folder, made)
    checked(paths["html"].read_text())
    assert paths["md"].read_text().startswith("# ")
    found = json.loads(paths["json"].read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found["step"] == made.step
    assert "\n" not in one_line(made)
    for entry in case_exclusions(made, made.step):
        json.loads(entry.to_line())


def test_a_replayed_step_that_is_normal_is_called_so_and_nothing_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bessemer.cli.runs import replay
    from bessemer.session import replay as retry

    ruling = trial(verdict="undetermined", confidence=1.0, reason=STEP_IS_NORMAL, accused=[])
    seen = {"loss": 2.36, "grad_norm": 1.1, "lr": 3e-4}
    made = case(symptom=retry.BY_HAND, observed=seen, trial=ruling, actions=[], recovery=None)
    monkeypatch.setattr(retry, "try_step", lambda *_: made)
    replay(Path("runs/web-7b"), 50, False, False, None, "cpu", False)
    assert capsys.readouterr().out == (
        "step 50 of web-7b is normal: loss 2.36 where 2.35 is normal, gradient norm 1.1 where 1 is normal\n"
    )
    made = replace(made, symptom="loss outlier")
    replay(Path("runs/web-7b"), 50, False, False, None, "cpu", False)
    assert "What could not be determined" in capsys.readouterr().out
