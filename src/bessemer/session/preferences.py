"""What objectives of pairs (`dpo`, `reward`) add to a start: the checks of the pairs and, for dpo, the reference model,
which is the model that the run starts from."""

from __future__ import annotations

from bessemer.align.dpo import REFERENCE
from bessemer.data.chat_checks import Mistake
from bessemer.data.chat_rows import StoreReader, sample_numbers
from bessemer.data.pair_checks import check_pairs, make_pair
from bessemer.data.read.answers import MARGIN
from bessemer.data.read.chat_formats import recognise_pairs
from bessemer.data.store.token_store import TokenStore
from bessemer.data.stream.groups import GROUP
from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.mixtures import sources_used
from bessemer.session.data import Data
from bessemer.spec.model import BASE, OtherModelSpec
from bessemer.spec.schema import PAIR_OBJECTIVES, RunSpec


def with_preference_defaults(spec: RunSpec) -> RunSpec:
    """The spec with the columns of its pairs and the reference, where it is silent. Reads first rows of each source."""
    if spec.objective not in PAIR_OBJECTIVES:
        return spec
    sources, more = {}, (MARGIN,) if spec.objective == "reward" else ()
    for name, source in spec.data.sources.items():
        sources[name] = source if not source.path or source.path == ["python"] else recognise_pairs(source, more)
        if source.path != ["python"] and "chosen" not in (sources[name].columns or {}):
            fix = "columns: {prompt: question, chosen: good, rejected: bad}"
            raise UserError(
                f"data.sources.{name}: {spec.objective} compares two answers: name their columns, such as {fix}"
            )
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})
    return with_reference(spec) if spec.objective == "dpo" else spec


def with_reference(spec: RunSpec) -> RunSpec:
    """The spec with `models.reference`, unless it names one or the loss needs none."""
    if not spec.dpo.needs_reference or REFERENCE in spec.models:
        return spec
    path = BASE if spec.adapter else spec.model.hf or spec.start_from
    if path is None:
        raise UserError(
            "objective: dpo compares with the model that training starts from: write model: {hf: FOLDER} or start_from"
        )
    return spec.model_copy(update={"models": {**spec.models, REFERENCE: OtherModelSpec(path=path)}})


def log_preferences(spec: RunSpec, plan: Plan) -> None:
    """Adds the loss and the reference to the plan."""
    if spec.objective == "reward":
        heads = spec.reward.heads
        plan.add(
            "reward.heads", heads, f"{'a score' if heads == 1 else 'scores'} at the last token of an answer", "asked"
        )
    if spec.objective != "dpo":
        return
    plan.add("dpo.loss", spec.dpo.loss, f"beta {spec.dpo.beta_value:g}", "asked")
    if reference := spec.models.get(REFERENCE):
        reason = "the run's model with its adapter off" if reference.path == BASE else "frozen"
        plan.add(f"models.{REFERENCE}", reference.path, reason, "rule", "established")


def check_pair_sources(spec: RunSpec, data: Data, context: int) -> dict[str, list[Mistake]]:
    """The mistakes in the pairs of each source. Pairs beyond the context are refused when rows are made. A store holds
    the chosen answer of a pair and then the rejected one."""
    mistakes = {}
    for name in sources_used(spec):
        store = data.train[name]
        if not isinstance(store, TokenStore) or GROUP not in store.fields:
            continue
        reader = StoreReader(store)
        numbers = sample_numbers(reader.count // 2)
        pairs = [make_pair(reader.row(2 * number), reader.row(2 * number + 1)) for number in numbers]
        if some := check_pairs(pairs, store.documents // 2, spec.lints.silence):
            mistakes[name] = some
    return mistakes
