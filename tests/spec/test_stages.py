"""A chain of stages in one spec: what each inherits, and mistakes with their lines."""

import textwrap
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.spec.load import load_spec
from bessemer.spec.stages import Chain, load_chain

CHAIN = """\
    name: chat
    precision: fp32
    runs: out
    tokenizer: {vocab: 300, chat: plain}
    data: {context: 64}
    stages:
      - name: pre
        model: {width: 32, layers: 1, heads: 2}
        data: {sources: {words: text.jsonl}}
      - name: sft
        objective: sft
        data: {sources: {chat: chat.jsonl}, context: 128}
      - name: other
        from: pre
        objective: sft
        data: {sources: {chat: chat.jsonl}}
      - name: dpo
        from: sft
        objective: dpo
        models: {reference: "stage:other"}
        data: {sources: {pairs: pairs.jsonl}}
"""


def chain(tmp_path: Path, text: str = CHAIN, *settings: str) -> Chain:
    path = tmp_path / "chat.yaml"
    path.write_text(textwrap.dedent(text))
    return load_chain(path, settings)


def test_each_stage_starts_from_the_one_before_or_the_one_it_names(tmp_path: Path) -> None:
    pre, sft, other, dpo = chain(tmp_path).stages
    assert [stage.spec.name for stage in (pre, sft, other, dpo)] == ["chat-pre", "chat-sft", "chat-other", "chat-dpo"]
    assert pre.spec.model.width == 32 and pre.spec.tokenizer.vocab == 300 and pre.needs == ()
    assert sft.spec.model.hf == other.spec.model.hf == "out/chat/stages/pre"
    assert sft.spec.tokenizer.vocab == "auto" and sft.spec.tokenizer.chat == "plain"  # the folder has its tokenizer
    assert (sft.spec.data.context, other.spec.data.context) == (128, 64)
    assert all(stage.spec.precision == "fp32" for stage in (pre, sft, other, dpo))
    assert dpo.spec.model.hf == "out/chat/stages/sft" and dpo.needs == ("sft", "other")
    assert dpo.spec.models["reference"].path == "out/chat/stages/other"


def test_settings_reach_every_stage(tmp_path: Path) -> None:
    assert {stage.spec.seed for stage in chain(tmp_path, CHAIN, "seed=7").stages} == {7}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context: 128", "contxt: 128", r"stage sft: .*chat\.yaml:12: data\.contxt: unknown key"),
        ("name: other", "name: sft", r"chat\.yaml:13: stages: entry 3 'sft' is taken"),
        ("from: pre", "from: later", r"chat\.yaml:13: from: 'later' is no earlier stage: write pre or sft or model"),
        ("stage:other", "stage:nobody", r"stage:nobody: no earlier stage has that name"),
        ("- name: pre", "- name: Pre-Train", r"chat\.yaml:7: stages: entry 1 has no name of small letters"),
    ],
)
def test_mistakes_have_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chain(tmp_path, CHAIN.replace(old, new))


def test_stages_must_be_a_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat\.yaml:1: stages: is a list of runs; write stages: \[\{name: sft"):
        chain(tmp_path, "stages: 3")


def test_other_commands_name_the_file_of_a_stage(tmp_path: Path) -> None:
    chain(tmp_path)
    with pytest.raises(UserError, match="pass the spec of one stage, which train writes to RUNS/NAME/stages/"):
        load_spec(tmp_path / "chat.yaml")
