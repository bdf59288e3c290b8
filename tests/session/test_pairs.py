"""Prompts with answers: columns of a row become conversations, pairs stay together, and an objective compares them."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from bessemer.data.prepare import prepare
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.data import DataSpec, TokenizerSpec
from bessemer.spec.load import load_spec

COLOURS = ["red", "green", "blue", "black"]
OBJECTIVE = '''
import numpy as np, torch, torch.nn.functional as F
from bessemer.train.objective import ElementLosses, Objective
from bessemer.train.objectives import ObjectiveBatch

class Prefer(Objective):
    """The chosen answer's mean log-probability should be above the rejected one's."""

    metrics = ("preferred",)

    def inputs(self, batch):
        weights = np.zeros_like(batch.weights)
        weights[:, 0] = batch.positions >= 0  # one loss for each row
        return ObjectiveBatch(batch.tokens, batch.targets, weights, batch.documents, np.zeros_like(batch.tokens),
                              in_place=True, read=batch.weights > 0, fields={"learned": batch.weights})

    def element_losses(self, model, inputs, hidden_BTW):
        logits_BTV = self.logits(model, hidden_BTW)
        nll_BT = F.cross_entropy(logits_BTV.flatten(0, 1), inputs.targets_BT.flatten(), reduction="none")
        nll_BT, learned_BT = nll_BT.view_as(inputs.targets_BT), inputs.fields["learned"]
        second_BT = inputs.attention_mask.documents_BT == 1
        mean_B2 = torch.stack([(nll_BT * learned_BT * side).sum(1) / (learned_BT * side).sum(1).clamp(min=1)
                               for side in (~second_BT, second_BT)], 1)
        margin_B = (mean_B2[:, 1] - mean_B2[:, 0]) * 2
        assert inputs.fields["chosen"][:, 0, 0].min() == 1 and inputs.fields["chosen"][:, 1, 0].max() == 0
        losses_BT = torch.zeros_like(nll_BT).index_copy(1, torch.tensor([0]), -F.logsigmoid(margin_B)[:, None])
        counted_B = inputs.weights_BT[:, 0]
        return ElementLosses(losses_BT, {"preferred": (((margin_B > 0) * counted_B).sum(), counted_B.sum())})
'''


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    draw = random.Random(0)
    rows = []
    for number in range(160):
        first, second = draw.sample(COLOURS, 2)
        rows.append({"question": f"is {first} {number}", "good": f"yes {first}", "bad": f"no {second}"})
    return write_rows(tmp_path / "pairs.jsonl", rows)


def store_of(tmp_path: Path, source: dict, chat: str = "none"):
    data = DataSpec.model_validate({"sources": {"a": source}, "validation": 0})
    tokenizer = TokenizerSpec.model_validate({"chat": chat, "kind": "char"})
    prepared = prepare(data, tokenizer, tmp_path / "cache", 300, 0)
    return prepared.train["a"], prepared.tokenizer


def texts_of(store, tokenizer) -> list[tuple[str, str]]:
    """Each document, and its learned part."""
    result = []
    for document in range(store.documents):
        start, stop = (int(edge[0]) for edge in store.extents(np.array([document])))
        ids = store.gather(np.array([start]), stop - start)[0]
        mask = np.zeros(stop - start, np.float32)
        store.copy_weights(np.array([start]), np.array([stop - start]), mask, np.array([0]))
        result.append((tokenizer.decode(ids.tolist()), tokenizer.decode(ids[mask > 0].tolist())))
    return result


PAIR = {"question": "q?", "good": "yes", "bad": "no"}
TURNS = [{"role": "user", "content": "q?"}]
COLUMNS = {"prompt": "question", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (PAIR, COLUMNS),
        ({"question": TURNS, "good": [{"role": "assistant", "content": "yes"}], "bad": "no"}, COLUMNS),
        # the answers repeat the prompt, as in UltraFeedback
        ({"question": TURNS, "good": [*TURNS, {"role": "assistant", "content": "yes"}], "bad": "no"}, COLUMNS),
        # no prompt: what both begin with
        (
            {side: [*TURNS, {"role": "assistant", "content": text}] for side, text in (("good", "yes"), ("bad", "no"))},
            {"chosen": "good", "rejected": "bad"},
        ),
    ],
)
def test_all_forms_of_a_pair_are_the_same_documents(tmp_path: Path, row: dict, columns: dict) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row])
    store, tokenizer = store_of(tmp_path, {"path": str(path), "columns": columns})
    eos = tokenizer.eos
    assert texts_of(store, tokenizer) == [(f"q?yes{eos}", f"yes{eos}"), (f"q?no{eos}", f"no{eos}")]
    assert store.document_field("chosen", np.arange(2))[:, 0].tolist() == [1, 0]
    assert len(set(store.document_field("group", np.arange(2))[:, 0].tolist())) == 1


def test_a_completion_is_one_conversation_and_only_it_is_learned(tmp_path: Path) -> None:
    history = [*TURNS, {"role": "assistant", "content": "why?"}, {"role": "user", "content": "so"}]
    rows = [{"p": "2+2=", "c": "4"}, {"p": history, "c": "yes"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    store, tokenizer = store_of(tmp_path, {"path": str(path), "columns": {"prompt": "p", "completion": "c"}}, "plain")
    eos = tokenizer.eos
    assert texts_of(store, tokenizer) == [
        (f"User: 2+2=\n\nAssistant: 4{eos}", f" 4{eos}"),
        (f"User: q?\n\nAssistant: why?{eos}\n\nUser: so\n\nAssistant: yes{eos}", f" yes{eos}"),
    ]
    assert not store.fields


def test_unusable_rows_and_columns_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [PAIR, {"question": "q", "good": " ", "bad": "no"}, {"question": "q"}])
    with pytest.raises(UserError, match=r"rows.jsonl:2: 'good' holds no answer; write one, or delete the row \(2 of 3"):
        store_of(tmp_path, {"path": str(path), "columns": COLUMNS})
    (quarantine,) = (tmp_path / "cache").rglob("*.quarantine.jsonl")
    reasons = [json.loads(line)["reason"] for line in quarantine.read_text().splitlines()]
    assert reasons[1] == "no field 'good'; it has 'question': correct columns of the source"
    for columns, message in [
        ({"completion": "c"}, "completion needs prompt"),
        ({"prompt": "p", "chosen": "c"}, "a prompt needs completion, both chosen and rejected, or answers"),
        ({"prompt": "p", "completion": "c", "text": "t"}, "name one of them"),
    ]:
        with pytest.raises(ValueError, match=message):
            DataSpec.model_validate({"sources": {"a": {"path": "x", "columns": columns}}})
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"model: 1M\nbudget: {{steps: 1}}\ndata: {{sources: {{a: {{path: x, columns: {COLUMNS}}}}}}}\n")
    with pytest.raises(UserError, match="would learn the rejected answers too"):
        load_spec(spec)


def test_an_objective_of_pairs_learns_and_is_the_same_at_any_accumulation(tmp_path: Path, pairs: Path, make_spec):
    (tmp_path / "prefer.py").write_text(OBJECTIVE)
    source = {"path": str(pairs), "columns": COLUMNS}
    curves = []
    for micro in (8, 2):
        spec = make_spec(
            f"m{micro}", objective=f"{tmp_path / 'prefer.py'}:Prefer", tokenizer={"kind": "char", "chat": "none"},
            data={"sources": {"pairs": source}, "context": 64, "validation": 0.2},
            budget={"steps": 45, "batch": 512, "micro_batch": micro}, optimizer={"lr": 3e-3},
        )  # fmt: skip
        outcome = Session(spec).train()
        assert outcome.kind == "finished" and outcome.validation["preferred"] > 0.9
        records = list(Run(run_folder(spec)).metrics())
        curves.append([[record["loss"], record["preferred"], record["grad_norm"]] for record in records])
    assert curves[0][0][0] == pytest.approx(0.693, abs=0.02) and curves[0][-1][0] < 0.3
    assert np.allclose(curves[0], curves[1], rtol=2e-4, atol=2e-5)


def test_conversations_without_an_answer_are_refused(tmp_path: Path, make_spec) -> None:
    rows = [{"messages": [{"role": "user", "content": f"hello {n}"}]} for n in range(40)]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    source = {"path": str(path), "messages_field": "messages"}
    spec = make_spec(data={"sources": {"a": source}, "context": 32, "validation": 0}, tokenizer={"vocab": 320})
    with pytest.raises(UserError, match="source 'a': nothing is learned"):
        Session(spec).train()


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"messages": []}, "for conversations set messages_field: messages"),
        ({"prompt": "a", "completion": "b"}, r"set columns: {prompt: prompt, completion: completion}"),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            "set columns: {instruction: instruction, input: input, output: output}",
        ),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "set columns: {prompt: question, chosen: chosen, rejected"),
        ({"body": "a"}, "set text_field to the one that holds the text"),
    ],
)
def test_a_missing_text_names_the_setting_for_what_is_there(tmp_path: Path, row: dict, advice: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row] * 3)
    with pytest.raises(UserError, match=re.escape(advice)):
        store_of(tmp_path, {"path": str(path)})
