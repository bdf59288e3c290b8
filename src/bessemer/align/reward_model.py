"""A trained reward model: scores of answers, for reinforcement learning, best-of-N and the `align` commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.align.bradley_terry import ScoredTokens
from bessemer.data.tokenizer.chat import Message, render_batch
from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.folder import COPIES
from bessemer.spec.load import load_spec
from bessemer.train.trained import LoadedModel, find_model, load_model

Text = str | Sequence[Message]
BATCH_TOKENS = 16_384  # read in one forward pass, with padding


@dataclass(frozen=True)
class RewardModel:
    """A run of `objective: reward` (or of a regression by `classify`), its export, or a folder of transformers'
    `XForSequenceClassification` with one label. Scores do not depend on how answers are batched, up to rounding."""

    loaded: LoadedModel
    scored: ScoredTokens
    place: Path

    @classmethod
    def load(cls, path: str | Path, which: str = "last", device: str = "auto") -> RewardModel:
        """Loads a run (its checkpoint `which`: last, best or a name), one checkpoint's folder, or a model's folder."""
        files = find_model(path, which)
        shape = files.shape
        if not shape.labels or not shape.causal:
            fix = "train one with objective: reward, or name a folder of XForSequenceClassification with one label"
            raise UserError(f"{path}: is no reward model: {fix}")
        place = files.place
        if shape.labels > 1 and not _scores_answers(place):
            raise UserError(f"{path}: is a classifier with {shape.labels} labels, not a reward model: name another")
        loaded = load_model(path, which, device)
        if loaded.model.head_weight.device.type == "cuda":
            loaded.model.to(torch.bfloat16)
        return cls(loaded, _scored_tokens(place, loaded), place)

    @property
    def heads(self) -> int:
        return self.loaded.model.shape.labels

    def score(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """The reward of each completion: the mean of the heads. A text is one turn of the user or the assistant."""
        return [mean for mean, _ in self.score_with_std(prompts, completions)]

    def score_with_std(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[tuple[float, float]]:
        """The mean and the standard deviation over the heads; 0 with one head."""
        conversations = [
            [*_turns(prompt, "user"), *_turns(completion, "assistant")]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return self.score_conversations(conversations)

    def score_conversations(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[float, float]]:
        """The same of conversations whose last turn is the answer."""
        if not conversations:
            return []
        scores_NK = self.head_scores(conversations)
        std_N = scores_NK.std(1) if self.heads > 1 else torch.zeros(len(scores_NK))
        return list(zip(scores_NK.mean(1).tolist(), std_N.tolist(), strict=True))

    @torch.no_grad()
    def head_scores(self, conversations: Sequence[Sequence[Message]]) -> Tensor:
        """(N, K) the score of every head, on the CPU in float32."""
        ids = self.encode(conversations)
        scores_NK = torch.empty(len(ids), self.heads)
        for batch in _batches(ids):
            scores_NK[batch] = self._forward([ids[i] for i in batch])
        return scores_NK

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """The tokens that the model reads of each conversation: those that it was trained on."""
        loaded = self.loaded
        rendered = render_batch(conversations, loaded.tokenizer, loaded.template or "none")
        texts = [self.scored.of_text(ids.tolist(), loaded.tokenizer.eos_id) for ids, _ in rendered]
        most = loaded.model.shape.max_positions if loaded.model.shape.positions == "learned" else None
        for number, text in enumerate(texts, 1):
            if not text:
                raise UserError(f"answer {number}: it has no token to score")
            if most and len(text) > most:
                raise UserError(f"answer {number}: {len(text):,} tokens exceed the {most:,} that {self.place} reads")
        return texts

    def _forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        model, device = self.loaded.model, self.loaded.model.head_weight.device
        ends_B = torch.tensor([len(text) - 1 for text in ids], device=device)
        tokens_BT = torch.zeros(len(ids), int(ends_B.max()) + 1, dtype=torch.long)
        for row, text in enumerate(ids):  # padding comes after a text, where causal attention never looks
            tokens_BT[row, : len(text)] = torch.tensor(text)
        read_BT = torch.arange(tokens_BT.shape[1], device=device) <= ends_B[:, None]
        mask = AttentionMask(router_mask_BT=None if read_BT.all() else read_BT)
        hidden_BTW = model(tokens_BT.to(device), mask)
        hidden_BW = hidden_BTW[torch.arange(len(ids), device=device), ends_B].float()
        bias_K = None if model.head_bias is None else model.head_bias.float()
        return F.linear(hidden_BW, model.head_weight.float(), bias_K).cpu()


def _turns(text: Text, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _batches(ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Texts of similar lengths together."""
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if batch and (len(batch) + 1) * len(ids[i]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _scores_answers(place: Path) -> bool:
    """Whether the several labels of a model are the heads of a reward model."""
    if (place / "spec.yaml").is_file():
        return load_spec(place / "spec.yaml").objective == "reward"
    names = json.loads((place / "config.json").read_text()).get("id2label", {}).values()
    return all(str(name).startswith("reward") for name in names)


def _scored_tokens(place: Path, loaded: LoadedModel) -> ScoredTokens:
    """Those of the run's training; of a folder, what transformers reads."""
    if not (place / "spec.yaml").is_file():
        return ScoredTokens.of_folder(place, loaded.tokenizer)
    spec = load_spec(place / "spec.yaml")
    if spec.objective != "reward":
        return ScoredTokens()
    folder = place / COPIES if os.path.exists(place / COPIES / "config.json") else spec.model.hf
    return ScoredTokens.of_folder(Path(folder) if folder and spec.model.hf else None, loaded.tokenizer)
