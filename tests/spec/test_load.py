"""From a file to a spec: every mistake at once, one line each, with file, line, key and what to write instead."""

import os
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.spec.load import SpecError, dump_spec, load_document, load_spec
from bessemer.spec.schema import RunSpec

GOOD = """\
model: 10M
data:
  sources:
    web: data/
budget:
  tokens: 20M
  batch: 256K
schedule:
  warmup: 2%
optimizer:
  lr: 1e-4
checkpoint:
  every: 10 min
"""


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "my-run.yaml"
    path.write_text(GOOD)
    return path


def problems(path: Path, text: str | None = None, overrides: tuple[str, ...] = ()) -> list[str]:
    """The lines that a user sees, without the folder of the file."""
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_spec(path, overrides)
    assert str(refused.value).splitlines() == refused.value.problems
    return [line.replace(str(path), "my-run.yaml") for line in refused.value.problems]


def test_quantities_are_read_as_written(spec_file: Path) -> None:
    spec = load_spec(spec_file)
    assert spec.name == "my-run"
    assert spec.model.preset == "10M"
    assert spec.data.sources["web"].path == ["data/"]
    assert (spec.budget.tokens, spec.budget.batch) == (20_000_000, 256_000)
    assert (spec.schedule.warmup, spec.optimizer.lr, spec.checkpoint.every) == (0.02, 1e-4, "600.0 s")


def test_overrides_win_and_the_last_one_wins(spec_file: Path) -> None:
    spec = load_spec(spec_file, ["budget.tokens=1B", "model.layers=3", "seed=1", "seed=2", "name=other"])
    assert (spec.budget.tokens, spec.model.preset, spec.model.layers, spec.seed) == (10**9, "10M", 3, 2)
    assert spec.name == "other"


def test_five_mistakes_are_five_lines(spec_file: Path) -> None:
    text = GOOD.replace("model: 10M", "modell: 10M").replace("data/", "data/\n  context: 1")
    text = text.replace("256K", "lots").replace("lr: 1e-4", "lr: 1e-4\n  betas: [0.9]") + "lr: 3\n"
    assert problems(spec_file, text) == [
        "my-run.yaml:1: modell: unknown key; did you mean model?",
        "my-run.yaml:5: data.context: 1 is too short: write at least 2 tokens, such as 2048",
        "my-run.yaml:8: budget.batch: expected a number of tokens such as 4096, 256K or 20M, got 'lots'",
        "my-run.yaml:13: optimizer.betas: list should have at least 2 items after validation, not 1; "
        "write betas: [0.9, 0.95] (decay rates of the two moments)",
        "my-run.yaml:16: lr: unknown key here; it belongs under optimizer:",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("seed: -1", "seed: -1 should be greater than or equal to 0; write seed: 0 (seed of all random draws)"),
        ("seed: a", "seed: expected a whole number, got 'a'; write seed: 0 (seed of all random draws)"),
        ('seed: "5"', "seed: expected a whole number, got '5': remove the quotes"),
        ("seed: 1.5", "seed: expected a whole number, got 1.5; write seed: 0 (seed of all random draws)"),
        ("name: 2024", 'name: expected text, got 2024: put it in quotes, name: "2024"'),
        ("name: true", 'name: expected text, got true: put it in quotes, name: "true"'),
        ("name: ../x", "name: expected letters, digits, '.', '_' and '-', 100 at most, beginning with a letter or "),
        (
            "precision: fp23",
            "precision: expected auto, fp32, tf32, bf16, fp16, fp8 or fp8_rowwise, got 'fp23'; did you mean fp32?",
        ),
        ("precision: 16", "precision: expected auto, fp32, tf32, bf16, fp16, fp8 or fp8_rowwise, got 16"),
        ("guard: no", "guard: expected a mapping of keys, got 'no'"),
        ("guard: {enabled: no}", "guard.enabled: expected true or false, got 'no'; write enabled: true (check steps)"),
        ("guard: {window: 8}", "guard.window: 8 should be greater than or equal to 16; write window: 128 ("),
        ("guard: {sigma: 8}", "guard.sigma: unknown key; did you mean"),
        ("guard: {zzz: 8}", "guard.zzz: unknown key; known keys: enabled, window, warmup"),
        ("tokens: 5", "tokens: unknown key here; it belongs under budget: (or evaluate)"),
        ("guard: {lr: 5}", "guard.lr: unknown key in guard; it belongs under optimizer:"),
        ("parallel: {threads: none}", "parallel.threads: expected a number of threads such as 8, got 'none'"),
        ("tokenizer: {sample: -5}", "tokenizer.sample: expected a size such as 64MB or 1GiB, got -5"),
        ("evaluate: {tokens: 0}", "evaluate.tokens: expected a number of tokens such as 4096, 256K or 20M, got 0: it"),
        ("evaluate: {every: 10 tokens}", "evaluate.every: expected an interval such as 500 steps or 10 min, got '10 "),
        ("observe: {line_every: 5}", "observe.line_every: expected a time with its unit, such as 90s, 10 min or 2h"),
        ("seed: [1,\n 2]", "seed: expected a whole number, got [1, 2]"),
        ("seed:", "seed: expected a whole number, got nothing"),
        ("seed: .inf", "seed: "),
        ("1: 2", "1: unknown key; known keys: name, runs, seed"),
        ('"a\\nb": 2', "a b: unknown key"),
    ],
)
def test_one_wrong_line_is_one_message(spec_file: Path, line: str, told: str) -> None:
    (found,) = problems(spec_file, f"{line}\n{GOOD}")
    assert found.startswith(f"my-run.yaml:1: {told}")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("model: 10M", "model: 11M", "my-run.yaml:1: model.preset: no preset '11M'; write one of 1M, 3M, 10M"),
        ("model: 10M", "model: 5", "my-run.yaml:1: model: expected a mapping of keys, got 5; write model: 10M"),
        ("model: 10M", "model:", "my-run.yaml:1: model: expected a mapping of keys, got nothing; write model: 10M"),
        ("model: 10M", "model: {widht: 64, layers: 2, heads: 2}", "my-run.yaml:1: model.widht: unknown key; did you"),
        ("model: 10M", "model: {preset: 11M, heads: 7}", "my-run.yaml:1: model.preset: no preset '11M'"),
        ("web: data/", "web: 5", "my-run.yaml:4: data.sources.web: expected a mapping of keys, got 5; write web: PATH"),
        ("web: data/", "web: [1]", "my-run.yaml:4: data.sources.web.path.0: expected text, got 1: put it in quotes"),
        ("web: data/", "web: {weight: 1}", "my-run.yaml:4: data.sources.web.path: no file: write a file"),
        ("    web: data/", "    {}", "my-run.yaml:3: data.sources: list at least one source"),
        ("tokens: 20M", "tokens: 1e400", "my-run.yaml:6: budget.tokens: expected a number of tokens"),
        ("lr: 1e-4", "lr: .nan", "my-run.yaml:11: optimizer.lr: expected a number such as 3e-4, got nan: it must be"),
        ("lr: 1e-4", "eps: .inf", "my-run.yaml:11: optimizer.eps: expected a finite number, got inf; write eps:"),
        ("lr: 1e-4", "lr: 1e-4\n  lr: 2", "my-run.yaml:12: optimizer.lr: written twice, first in line 11: remove one"),
        ("every: 10 min", "every: 10", ""),
    ],
)
def test_one_wrong_value_is_one_message(spec_file: Path, before: str, after: str, told: str) -> None:
    text = GOOD.replace(before, after)
    assert text != GOOD
    if not told:
        spec_file.write_text(text)
        assert load_spec(spec_file).checkpoint.every == 10
        return
    (found,) = problems(spec_file, text)
    assert found.startswith(told)


def test_missing_sections_say_what_to_write(spec_file: Path) -> None:
    assert problems(spec_file, "") == [
        "my-run.yaml: data: missing; write data: {sources: {code: src/}} (sources, curation and mixture)",
        "my-run.yaml: model: missing; write model: 10M (the network)",
    ]
    assert problems(spec_file, "model: 10M\ndata: {}\n") == [
        "my-run.yaml:2: data.sources: missing; write sources: {code: src/} (named sources)"
    ]


def test_a_wrong_section_does_not_hide_wrong_combinations_elsewhere(spec_file: Path) -> None:
    text = GOOD.replace("model: 10M", "model: 5").replace("    web: data/", "    5") + "tokenizer: {vocab: 100}\n"
    found = problems(spec_file, text)
    assert [line.split(": ")[1] for line in found] == ["model", "data.sources", "tokenizer.vocab"]


def test_wrong_entries_of_a_list_are_each_told(spec_file: Path) -> None:
    changes = "  batch_changes: [5, {from_step: 0, batch: 1K}, {from_step: 9}, {from_step: 9, batch: 2K, x: 1}]\n"
    found = problems(spec_file, GOOD.replace("  batch: 256K\n", changes))
    assert [line.split(": ")[1] for line in found] == [
        "budget.batch_changes.0",
        "budget.batch_changes.1.from_step",
        "budget.batch_changes.2.batch",
        "budget.batch_changes.3.x",
    ]


def test_mistakes_on_the_command_line_are_told_with_the_setting(spec_file: Path) -> None:
    found = problems(spec_file, overrides=("seed=x", "noequals", "optimizer={lr: high}", "data.sources.web.w=1"))
    assert found == [
        "--set seed=x: seed: expected a whole number, got 'x'; write seed: 0 (seed of all random draws)",
        "--set optimizer={lr: high}: optimizer.lr: expected a number such as 3e-4, got 'high'",
        "--set data.sources.web.w=1: data.sources.web.w: unknown key; known keys: "
        "path, format, text_field, id_field, url_field, messages_field, columns, ranked, chat_format, message_weights, "
        "include, exclude, storage, clean, weight, domain, max_epochs",
        "--set noequals: write it as key=value, such as --set optimizer.lr=3e-4",
    ]


def test_a_setting_that_only_cannot_be_applied(spec_file: Path) -> None:
    assert problems(spec_file, overrides=("noequals",)) == [
        "--set noequals: write it as key=value, such as --set optimizer.lr=3e-4"
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\x7fELF\xff\xfe\x00")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.yaml").write_text(GOOD)
    (tmp_path / "file").write_text("")
    for path, told in [
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "is a folder; pass the YAML file of a spec"),
        (tmp_path / "run", f"is a folder; pass {tmp_path / 'run' / 'spec.yaml'}"),
        (tmp_path / "binary.yaml", "not UTF-8 text"),
        (tmp_path / "file" / "x.yaml", "cannot be read: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        (Path("nul\0.yaml"), "cannot be read: embedded null"),
    ]:
        with pytest.raises(UserError, match=told.replace("\\", r"\\")) as refused:
            load_spec(path)
        assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(spec_file: Path) -> None:
    spec_file.chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        load_spec(spec_file)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my run (2).yaml", "my-run-2-"),
        (".hidden.yaml", "hidden"),
        ("---.yaml", "run"),
        ("größe.yml", "größe"),
        ("a.b.yaml", "a.b"),
        ("x" * 200 + ".yaml", "x" * 100),
    ],
)
def test_a_run_without_a_name_takes_the_files_and_can_be_loaded_again(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text(GOOD)
    spec = load_spec(tmp_path / file)
    assert spec.name == name
    (tmp_path / "spec.yaml").write_text(dump_spec(spec))
    assert load_spec(tmp_path / "spec.yaml") == spec


def test_the_document_is_returned_with_the_spec(spec_file: Path) -> None:
    loaded = load_document(spec_file)
    assert isinstance(loaded.spec, RunSpec)
    assert loaded.document.place(("budget", "batch")) == f"{spec_file}:7"


def test_a_spec_that_an_earlier_version_wrote_into_a_run_still_loads(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: 10M\ndata: {sources: {code: src}}\nguard: {repeat_share: 0.25, window: 64}\n")
    assert load_spec(path).guard.window == 64


NESTED = """\
model: 1M
data: {sources: {a: {path: x.jsonl, columns: {prompt: q}}}}
objective:
  grpo:
    rewards: {a: exact}
    promts: 5
    samples: 1.5
    num_generations: 8
"""


def test_settings_below_the_objective_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    lines = [line.split(": ", 1) for line in problems(path, NESTED)]
    assert [place.rsplit(":", 1)[1] for place, _ in lines] == ["6", "7", "8"]
    assert "rl.promts: unknown key; did you mean prompts?" in lines[0][1]
    assert "rl.samples: expected a whole number" in lines[1][1] and "in Bessemer it is rl.samples" in lines[2][1]
    (line,) = problems(path, NESTED.replace("promts: 5", "prompts: 5\n    minibatches: 2").replace("1.5", "2")
                       .replace("    num_generations: 8\n", ""))  # fmt: skip
    assert line.startswith("my-run.yaml:6: rl.prompts: 5 prompts are not a multiple")


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("{grpo: {}}\nrl: {samples: 4}", "grpo has settings here and below rl: write all of them below rl"),
        ("{grpo: {}, dpo: {}}", "it has the keys grpo, dpo: name one objective, such as objective: {grpo: ...}"),
        ("{gpro: {}}", "no objective 'gpro' (did you mean grpo?)"),
        ("{pretrain: {}}", "pretrain has no settings of its own: write objective: pretrain"),
    ],
)
def test_wrong_forms_of_the_objective(tmp_path: Path, objective: str, message: str) -> None:
    told = problems(tmp_path / "spec.yaml", f"model: 1M\ndata: {{sources: {{a: x.txt}}}}\nobjective: {objective}\n")
    assert any(message in line for line in told)
