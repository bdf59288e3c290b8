"""The objectives of a run: from `objective:` in the spec to its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bessemer.align.bradley_terry import BradleyTerry, ScoredTokens
from bessemer.align.dpo import Dpo
from bessemer.align.gkd import Gkd
from bessemer.align.kto import Kto
from bessemer.align.online_dpo import OnlineDpo
from bessemer.align.policy import PolicyGradient
from bessemer.data.curate.scores.user_function import load_function
from bessemer.data.stream.rows import StoreRows
from bessemer.data.stream.teacher import TeacherStore
from bessemer.data.tokenizer.tokenizer import Tokenizer, hf_prompt_format
from bessemer.errors import UserError
from bessemer.session.data import Stream
from bessemer.spec.rl import GKD, ONLINE_DPO, RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.classify import Classify, label_variance
from bessemer.train.distill import Distill
from bessemer.train.objective import Objective, make_pretrain
from bessemer.train.sft import Sft

MakeObjective = Callable[[RunSpec, Stream, Tokenizer, ModelShape, int], Objective]

# A test compares the names with those that `spec/schema.py` accepts.
OBJECTIVES: dict[str, MakeObjective] = {
    "pretrain": lambda spec, stream, tokenizer, shape, context: make_pretrain(
        spec, stream.order.names, tokenizer, shape, context
    ),
    "sft": lambda spec, stream, tokenizer, shape, context: make_sft(spec, tokenizer, stream.order.names),
    "classify": lambda spec, stream, tokenizer, shape, context: make_classify(spec, stream, shape),
    "distill": lambda spec, stream, tokenizer, shape, context: Distill(
        spec.distill,
        spec.data.cross_documents,
        dropout_seed(spec),
        TeacherStore(spec.distill.stored) if spec.distill.stored else None,
    ),
    "dpo": lambda spec, stream, tokenizer, shape, context: Dpo(
        spec.dpo,
        tokenizer.eos_id,
        first_tokens(spec, tokenizer, spec.tokenizer.chat != "none"),
        dropout_seed(spec),
        spec.dpo.reference == "stored",
    ),
    "kto": lambda spec, stream, tokenizer, shape, context: Kto(
        spec.kto, tokenizer.eos_id, first_tokens(spec, tokenizer, spec.tokenizer.chat != "none"), dropout_seed(spec)
    ),
    "reward": lambda spec, stream, tokenizer, shape, context: make_reward(spec, tokenizer, shape),
}


OBJECTIVES |= dict.fromkeys(
    RL_OBJECTIVES,
    lambda spec, stream, tokenizer, shape, context: PolicyGradient(
        spec.objective, spec.rl, spec.optimizer.clip, dropout_seed(spec)
    ),
)
OBJECTIVES[GKD] = lambda spec, stream, tokenizer, shape, context: Gkd(
    spec.distill, spec.optimizer.clip, dropout_seed(spec)
)

OBJECTIVES[ONLINE_DPO] = lambda spec, stream, tokenizer, shape, context: OnlineDpo(
    spec.rl, spec.dpo, spec.optimizer.clip, dropout_seed(spec)
)


def first_tokens(spec: RunSpec, tokenizer: Tokenizer, templated: bool = False) -> tuple[int, ...] | None:
    """What the folder's model reads before a text, or before what a chat template writes; None for models of Bessemer,
    which read the end of the last document."""
    if not spec.model.hf:
        return None
    prompt = hf_prompt_format(Path(spec.model.hf), tokenizer)
    return prompt.chat_prefix if templated else prompt.prefix


def make_sft(spec: RunSpec, tokenizer: Tokenizer, names: Sequence[str]) -> Sft:
    sources = spec.data.sources
    chats = {name: i for i, name in enumerate(names) if sources[name].is_chat and spec.tokenizer.chat != "none"}
    return Sft(
        spec.data.cross_documents, spec.loss, dropout_seed(spec), tokenizer.eos_id, first_tokens(spec, tokenizer),
        spec.sft.neftune if spec.sft else 0.0, spec.seed,
        any(source.message_weights for source in sources.values()), chats,
    )  # fmt: skip


def make_classify(spec: RunSpec, stream: Stream, shape: ModelShape) -> Classify:
    assert spec.classify is not None
    stores = [rows.store for rows in getattr(stream, "sources", {}).values() if isinstance(rows, StoreRows)]
    spread = label_variance(stores) if stores and spec.classify.problem == "regression" else 1.0
    return Classify(spec.classify, shape.causal, spec.optimizer.clip, dropout_seed(spec), spread)


def make_reward(spec: RunSpec, tokenizer: Tokenizer, shape: ModelShape) -> BradleyTerry:
    if not shape.causal:
        raise UserError(
            f"model.hf: {spec.model.hf} attends to both sides: objective: reward scores the last token of a causal "
            "decoder; for a score of each text write objective: classify with problem: regression"
        )
    scored = ScoredTokens.of_folder(Path(spec.model.hf) if spec.model.hf else None, tokenizer)
    return BradleyTerry(spec.reward, scored, spec.optimizer.clip, spec.seed, dropout_seed(spec))


def dropout_seed(spec: RunSpec) -> int | None:
    """None without dropout."""
    return spec.seed if any((spec.dropout.embedding, spec.dropout.attention, spec.dropout.residual)) else None


def make_objective(spec: RunSpec, stream: Stream, tokenizer: Tokenizer, shape: ModelShape, context: int) -> Objective:
    """The spec's objective, for a model of that shape and rows of the stream. A user's class is called without
    arguments, or its `from_run` with these."""
    objective = _make(spec, stream, tokenizer, shape, context)
    if spec.adapter and spec.adapter.dropout and objective.dropout_seed is None:
        objective.dropout_seed = spec.seed
    return objective


def _make(spec: RunSpec, stream: Stream, tokenizer: Tokenizer, shape: ModelShape, context: int) -> Objective:
    if spec.objective in OBJECTIVES:
        return OBJECTIVES[spec.objective](spec, stream, tokenizer, shape, context)
    own = load_function(spec.objective, "objective")
    if not (isinstance(own, type) and issubclass(own, Objective)):
        raise UserError(f"objective: {spec.objective} is no subclass of bessemer.train.objective.Objective: correct it")
    return own.from_run(spec, stream, tokenizer, shape, context)
