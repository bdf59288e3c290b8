"""Log-probabilities of given answers, as the model's chat format writes them: exact, without sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bessemer.align.responder import Conversation
from bessemer.data.tokenizer.chat import render
from bessemer.errors import UserError
from bessemer.observe.progress import ProgressReport, silent
from bessemer.train.trained import LoadedModel

BATCH = 16


@dataclass(frozen=True)
class AnswerLogp:
    """The log-probability of each token of an answer; the last one ends its turn."""

    tokens: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.tokens)

    def over(self, other: AnswerLogp) -> float:
        """The mean difference to another answer over the first tokens, as many as both have: sums favour the shorter
        answer, and means the one that ends in predictable words."""
        count = min(len(self.tokens), len(other.tokens))
        return math.fsum(a - b for a, b in zip(self.tokens, other.tokens, strict=False)) / count


@torch.inference_mode()
def answer_logps(
    loaded: LoadedModel, cases: Sequence[tuple[Conversation, str]], report: ProgressReport = silent
) -> list[AnswerLogp]:
    """The log-probability of each answer after its conversation. Answers of similar length share a forward pass."""
    encoded = [_encode(loaded, messages, answer) for messages, answer in cases]
    order = sorted(range(len(cases)), key=lambda number: len(encoded[number][0]))
    scores: dict[int, AnswerLogp] = {}
    device = loaded.model.head_weight.device
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        longest = max(len(encoded[number][0]) for number in numbers)
        ids_BT = torch.zeros(len(numbers), longest, dtype=torch.long, device=device)
        for row, number in enumerate(numbers):  # padding comes last: no token of a causal model reads it
            ids_BT[row, : len(encoded[number][0])] = torch.tensor(encoded[number][0], device=device)
        hidden_BTW = loaded.model(ids_BT)
        for row, number in enumerate(numbers):
            learned = encoded[number][1]
            at_A = torch.tensor(learned, device=device)
            logps_AV = loaded.model.logits(hidden_BTW[row, at_A - 1]).float().log_softmax(-1)
            logp_A = logps_AV.gather(1, ids_BT[row, at_A, None])
            scores[number] = AnswerLogp(tuple(logp_A[:, 0].double().tolist()))
        report("scoring answers", len(scores), len(cases))
    return [scores[number] for number in range(len(cases))]


def answer_length(loaded: LoadedModel, messages: Conversation, answer: str) -> int:
    """The tokens of a conversation with an answer."""
    return len(_encode(loaded, messages, answer, check=False)[0])


def _encode(
    loaded: LoadedModel, messages: Conversation, answer: str, check: bool = True
) -> tuple[list[int], list[int]]:
    """All ids, and the positions of the answer's ids."""
    assert loaded.template is not None, "load it with load_chat_model"
    turns = [*messages, {"role": "assistant", "content": answer}]
    ids, mask = render(turns, loaded.tokenizer, loaded.template, "last")
    prefix = list(loaded.format.prefix)
    missing = [] if ids[: len(prefix)].tolist() == prefix else prefix  # as in LoadedModel.chat_prompt
    places = [len(missing) + int(place) for place in mask.nonzero()[0]]
    if not places:
        raise UserError(f"the answer {answer!r} has no tokens in the model's chat format: write another")
    if check:
        loaded.check_length([*missing, *ids.tolist()], f"the question with the answer {answer[:40]!r}")
    return [*missing, *ids.tolist()], places
