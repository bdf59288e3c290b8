"""Arrays of a Python dataset's items reach an objective of the user's own: CTC over quantised features."""

import numpy as np
import pytest

from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder

LETTERS, MOST = 4, 5
OBJECTIVE = '''
import numpy as np, torch
from bessemer.train.ctc import ctc_loss
from bessemer.train.objective import ElementLosses, Objective
from bessemer.train.objectives import ObjectiveBatch

class Ctc(Objective):
    """Labels that are not aligned to the columns; label 0 is the blank, -1 pads."""

    metrics = ("exact",)

    def inputs(self, batch):
        weights = np.zeros_like(batch.weights)
        weights[:, 0] = batch.positions >= 0
        return ObjectiveBatch(batch.tokens, batch.targets, weights, batch.documents, np.zeros_like(batch.tokens),
                              in_place=True, read=batch.weights > 0, fields={"frames": batch.weights})

    def element_losses(self, model, inputs, hidden_BTW):
        labels_BS, frames_B = inputs.fields["labels"][:, 0], inputs.fields["frames"].sum(1).long()
        sizes_B = (labels_BS > 0).sum(1)
        head_VW = model.head_weight[:5]
        losses_B, _, _ = ctc_loss(hidden_BTW, head_VW, labels_BS.clamp(min=0), frames_B.cpu(), sizes_B.cpu())
        best_BT = (hidden_BTW @ head_VW.T).argmax(-1)
        exact = 0.0
        for row, (best_T, labels_S, frames) in enumerate(zip(best_BT.tolist(), labels_BS.tolist(), frames_B.tolist())):
            letters = [b for i, b in enumerate(best_T[:frames]) if b and (i == 0 or best_T[i - 1] != b)]
            exact += (letters == [label for label in labels_S if label > 0]) * inputs.weights_BT[row, 0].item()
        zeros_BT = torch.zeros_like(inputs.weights_BT)
        losses_BT = torch.cat((losses_B[:, None], zeros_BT[:, 1:]), 1)
        return ElementLosses(losses_BT, {"exact": (torch.tensor(exact), inputs.weights_BT.sum())})
'''


class Speech:
    """Frames of two to four equal tokens for each letter, with noise tokens between letters."""

    def __init__(self, count: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.items = []
        for _ in range(count):
            letters = draw.integers(1, LETTERS + 1, draw.integers(2, MOST + 1))
            frames = [9]
            for letter in letters:
                frames += [10 + int(letter)] * int(draw.integers(2, 5)) + [9]
            labels = np.full(MOST, -1)
            labels[: letters.size] = letters
            self.items.append({"tokens": frames, "fields": {"labels": labels.astype(np.int64)}})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


def test_ctc_learns_from_fields_of_a_python_dataset(tmp_path, make_spec, corpus) -> None:
    (tmp_path / "ctc.py").write_text(OBJECTIVE)
    curves = []
    for micro in (8, 4):
        spec = make_spec(
            f"m{micro}", objective=f"{tmp_path / 'ctc.py'}:Ctc", tokenizer={"path": str(tokenizer_file(tmp_path))},
            data={"sources": {"speech": {"path": ["python"]}}, "context": 40},
            budget={"steps": 60, "batch": 320, "micro_batch": micro}, optimizer={"lr": 0.01},
        )  # fmt: skip
        outcome = Session(spec, datasets={"speech": Speech(400, 0)}).train()
        assert outcome.kind == "finished"
        records = list(Run(run_folder(spec)).metrics())
        curves.append([[record["loss"], record["exact"]] for record in records])
    assert np.mean([exact for _, exact in curves[0][-10:]]) > 0.9 and curves[0][0][1] < 0.3
    assert np.allclose(curves[0][:20], curves[1][:20], rtol=1e-3, atol=1e-4)


def test_fields_of_other_sizes_or_kinds_are_refused_by_item(tmp_path, make_spec) -> None:
    (tmp_path / "ctc.py").write_text(OBJECTIVE)
    for fields, message in [
        ({"labels": [1, 2]}, r"Speech\[\d+\]: field 'labels' has \d values, that of another item \d: pad them"),
        ({"labels": ["a"]}, r"Speech\[3\]: field 'labels' has 1 values of <U1; give numbers"),
        ([1, 2], r"Speech\[3\]: \"fields\" is a list"),
    ]:
        speech = Speech(8, 0)
        speech.items[3]["fields"] = fields
        spec = make_spec(
            "wrong", objective=f"{tmp_path / 'ctc.py'}:Ctc", tokenizer={"path": str(tokenizer_file(tmp_path))},
            data={"sources": {"speech": {"path": ["python"]}}, "context": 40}, budget={"steps": 3, "batch": 320},
        )  # fmt: skip
        with pytest.raises(UserError, match=message):
            Session(spec, datasets={"speech": speech}).train()


def tokenizer_file(folder):
    from tokenizers import Tokenizer, models

    path = folder / "units.json"
    vocab = {f"u{number}": number for number in range(20)} | {"<|endoftext|>": 20}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="u0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path
