"""Rounds of rollouts: the answers of a policy to some prompts, with everything that its steps train on, on disk.

A round is one file of arrays (`rollouts/round-00000012.safetensors`) and one to read (`.jsonl`: prompt, answer,
rewards, origin). Rank 0 alone writes and reads them, each as one atomic file, so that a slow or failing file system
delays a run but never leaves half a round. A token takes 8 bytes for its id, and 4 for each of its numbers (log-
probabilities of generator, trainer and reference, the critic's value): 512 answers of 500 tokens take 4 MB with GRPO.

Legend: P prompts, S samples of each, N = P x S answers, A answer tokens of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from bessemer.align.advantages import equal_groups
from bessemer.data.stream.rows import Ints
from bessemer.errors import UserError
from bessemer.storage import atomic_path, write_atomic

Floats = npt.NDArray[np.float32]
FOLDER = "rollouts"
_FORMAT = 1
# Arrays with one number for each answer token, where a run has them.
TOKEN_ARRAYS = ("generator_logps", "old_logps", "ref_logps", "advantages", "values", "returns")


@dataclass
class Rollout:
    """One answer. `tokens` end with the stop id if the model wrote one."""

    position: int
    source: int
    sequence: int
    prompt: Ints
    tokens: Ints
    logps: Floats  # the generator's, at the sampling temperature
    finished: bool
    seed: int
    text: str
    reward: float = math.nan  # the weighted sum; NaN where no part applies
    rewards: dict[str, float] = field(default_factory=dict)  # by part; NaN where one does not apply
    observed: list[list[int]] = field(default_factory=list)  # [begin, end) of tokens that an environment wrote
    turn_rewards: list[float] = field(default_factory=list)  # of an environment, for each of the model's turns

    @property
    def learned(self) -> npt.NDArray[np.bool_]:
        """Which of the tokens the model wrote."""
        written = np.ones(self.tokens.size, np.bool_)
        for begin, end in self.observed:
            written[begin:end] = False
        return written

    @property
    def turn_ends(self) -> list[int]:
        """The last token of each of the model's turns."""
        return [begin - 1 for begin, _ in self.observed] + [self.tokens.size - 1]

    @property
    def length(self) -> int:
        return int(self.prompt.size + self.tokens.size)


@dataclass
class Round:
    """The samples of a round, the answers to one prompt one after another, and what was computed from them.

    Token arrays are flat, in the order of the samples. Groups that dynamic sampling drew have positions far behind
    those of the stream."""

    first: int
    samples: list[Rollout]
    group: int  # S
    used: npt.NDArray[np.bool_]  # (N,) whether the answer is trained on
    arrays: dict[str, Floats] = field(default_factory=dict)  # by the names of TOKEN_ARRAYS
    numbers: dict[str, float] = field(default_factory=dict)  # times, beta, and what else belongs to the round
    drawn: int = 0  # prompts that were sampled, with those that dynamic sampling dropped

    def __post_init__(self) -> None:
        lengths = np.array([sample.tokens.size for sample in self.samples], np.int64)
        self.lengths, self.starts = lengths, np.concatenate([[0], lengths.cumsum()])
        self.learned = np.concatenate([sample.learned for sample in self.samples])  # flat, as token arrays are

    def tokens_of(self, number: int, name: str) -> Floats:
        """An array's part of one sample."""
        return self.arrays[name][self.starts[number] : self.starts[number + 1]]

    def learned_of(self, number: int) -> npt.NDArray[np.bool_]:
        """Which tokens of a sample the model wrote."""
        return self.learned[self.starts[number] : self.starts[number + 1]]

    def rewards(self) -> Tensor:
        """The rewards of each group, (P, S)."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float64).view(-1, self.group)


def positions_key(positions: Ints) -> str:
    """Identifies a round besides its first step: the prompts that it was asked for."""
    return xxhash.xxh3_64_hexdigest(positions.astype("<i8").tobytes())


class RoundStore:
    """The rounds of a run on disk."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder, self.keep = folder, keep

    def path(self, first: int) -> Path:
        return self.folder / f"round-{first:08}.safetensors"

    def save(self, made: Round, key: str, rows: Sequence[Mapping[str, Any]], durable: bool = True) -> None:
        """Write a round, replacing an earlier one of the same step; `rows` are its samples for readers. With
        `durable` it is there after a power cut."""
        from safetensors.numpy import save_file

        names = [item.name for item in fields(Rollout) if item.name not in ("prompt", "tokens", "logps", "rewards")]
        samples = [{name: getattr(sample, name) for name in names} for sample in made.samples]
        parts = {name: [sample.rewards[name] for sample in made.samples] for name in made.samples[0].rewards}
        arrays: dict[str, npt.NDArray[Any]] = {
            "prompts": np.concatenate([sample.prompt for sample in made.samples]),
            "prompt_lengths": np.array([sample.prompt.size for sample in made.samples]),
            "tokens": np.concatenate([sample.tokens for sample in made.samples]),
            "lengths": made.lengths, "used": made.used,
            **{f"reward.{name}": np.array(values, np.float64) for name, values in parts.items()},
            **{f"token.{name}": np.ascontiguousarray(array) for name, array in made.arrays.items()},
        }  # fmt: skip
        round_info = {"format": _FORMAT, "first": made.first, "key": key, "group": made.group, "drawn": made.drawn}
        arrays["samples"] = np.frombuffer(json.dumps(samples).encode(), np.uint8)  # headers are limited to 100 MB
        metadata = {"round": json.dumps(round_info), "numbers": json.dumps(made.numbers)}
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(made.first).with_suffix(".jsonl"), lines.encode("utf-8", "replace"), durable=False)
        with atomic_path(self.path(made.first), durable=durable) as temporary:  # the arrays last: they are the commit
            save_file(arrays, temporary, metadata)
        self._remove_old()

    def load(self, first: int, key: str | None = None) -> Round | None:
        """The round that starts with a step; None if it is not there or was sampled from other prompts."""
        from safetensors import SafetensorError, safe_open

        path = self.path(first)
        if not path.exists():
            return None
        try:
            with safe_open(path, "np") as file:
                metadata, names = file.metadata() or {}, list(file.keys())
                arrays = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}): restore it, or delete it and replay other steps"
            ) from None
        round_info = json.loads(metadata["round"])
        if key is not None and round_info["key"] != key:
            return None
        return _unpack(round_info, json.loads(arrays["samples"].tobytes()), json.loads(metadata["numbers"]), arrays)

    def _remove_old(self) -> None:
        rounds = sorted(self.folder.glob("round-*.safetensors"))
        for path in rounds[: -self.keep] if self.keep else ():
            path.unlink(missing_ok=True)
            path.with_suffix(".jsonl").unlink(missing_ok=True)


def _unpack(round_info: dict[str, Any], samples: list[dict[str, Any]], numbers: dict[str, float], arrays: Any) -> Round:
    prompts = np.split(arrays["prompts"], np.cumsum(arrays["prompt_lengths"])[:-1])
    cuts = np.cumsum(arrays["lengths"])[:-1]
    tokens, logps = np.split(arrays["tokens"], cuts), np.split(arrays["token.generator_logps"], cuts)
    parts = {name.removeprefix("reward."): array for name, array in arrays.items() if name.startswith("reward.")}
    made = []
    for number, values in enumerate(samples):
        rewards = {name: float(array[number]) for name, array in parts.items()}
        sample = Rollout(**values, prompt=prompts[number], tokens=tokens[number], logps=logps[number], rewards=rewards)
        made.append(sample)
    by_token = {name.removeprefix("token."): array for name, array in arrays.items() if name.startswith("token.")}
    return Round(round_info["first"], made, round_info["group"], arrays["used"], by_token, numbers, round_info["drawn"])


def repeated_ngrams(tokens: Ints, size: int = 4) -> float:
    """The share of an answer's n-grams that occurred before in it."""
    count = tokens.size - size + 1
    if count < 1:
        return 0.0
    return 1.0 - len(np.unique(np.lib.stride_tricks.sliding_window_view(tokens, size), axis=0)) / count


def sample_numbers(samples: Sequence[Rollout], group: int) -> dict[str, float]:
    """What the record of a step says about its answers, besides what the loss knows."""
    rewards = np.array([sample.reward for sample in samples])
    numbers = {"reward": _mean(rewards)}
    for name in samples[0].rewards:
        numbers[f"reward_{name}"] = _mean(np.array([sample.rewards[name] for sample in samples]))
    if group > 1:
        groups = rewards.reshape(-1, group)
        numbers["equal_groups"] = float(equal_groups(torch.from_numpy(groups)).double().mean())
        deviations = [np.nanstd(row, ddof=1) for row in groups if np.isfinite(row).sum() > 1]
        numbers["reward_std"] = float(np.mean(deviations)) if deviations else 0.0
    numbers["answer_tokens"] = float(np.mean([sample.learned.sum() for sample in samples]))
    if any(sample.turn_rewards for sample in samples):
        numbers["turns"] = float(np.mean([len(sample.turn_rewards) for sample in samples]))
    numbers["truncated"] = float(np.mean([not sample.finished for sample in samples]))
    numbers["repetition"] = float(np.mean([repeated_ngrams(sample.tokens) for sample in samples]))
    return numbers


def _mean(values: npt.NDArray[Any]) -> float:
    """The mean without NaN; NaN if there is nothing else."""
    known = values[~np.isnan(values)]
    return float(known.mean(dtype=np.float64)) if known.size else float("nan")
