"""`bessemer plan`: what to run, on what, for how long, at what price, and why; and how right such plans have been."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import CommandGroup

if TYPE_CHECKING:
    from bessemer.plan.interview import InterviewAnswers
    from bessemer.plan.request import PlanRequest
    from bessemer.plan.search.proposal import Proposal


class _SpecOrCommand(CommandGroup):
    """`plan SPEC` is `plan --spec SPEC`: the first word that is neither an option's nor a command's is a spec."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {"-h", "--help"}
        for option in self.params:
            flags |= set(option.opts) if getattr(option, "is_flag", False) else set()
        at = 0
        while at < len(args) and args[at].startswith("-"):
            at += 1 if args[at] in flags or "=" in args[at] else 2
        if at < len(args) and args[at] not in self.commands:
            args = [*args[:at], "--spec", *args[at:]]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_SpecOrCommand, subcommand_metavar="[SPEC.yaml | COMMAND ...]")


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    spec: Path | None = typer.Option(None, "--spec", hidden=True),
    settings: list[str] = typer.Option([], "--set", help="With a spec: override a key. Repeatable."),
    model: str | None = typer.Option(None, "--model", help="A size or preset, such as 7B or llama-7b."),
    gpus: str | None = typer.Option(
        None, "--gpus", help="Such as 8xA100-80GB or '2 nodes of 8 H100'; with a spec left out: this machine."
    ),
    tokens: str | None = typer.Option(None, "--tokens", help="Such as 100B; left out: as many as suit the model."),
    row: int | None = typer.Option(None, "--context", help="Tokens of a row; left out: by size."),
    batch: str | None = typer.Option(None, "--batch", help="Tokens of a step, such as 4M; left out: by size."),
    precision: str | None = typer.Option(None, "--precision", help="bf16, fp16, fp8, tf32 or fp32."),
    tp: int | None = typer.Option(None, "--tp", help="Tensor parallel; left out: what is fastest, as --cp and --pp."),
    cp: int | None = typer.Option(None, "--cp", help="Context parallel."),
    pp: int | None = typer.Option(None, "--pp", help="Pipeline parallel."),
    network: str | None = typer.Option(None, "--network", help="Of a node, such as '8 x NDR' or '400 Gb/s'."),
    rate: str | None = typer.Option(None, "--tokens-per-second", help="A wish to be checked against what is possible."),
    budget: str | None = typer.Option(None, "--budget", help="Such as 50000usd: rank GPUs, providers and regions."),
    deadline: str | None = typer.Option(None, "--deadline", help="Such as 30d, alone or with --budget."),
    write: Path | None = typer.Option(None, "--write", help="Write the spec, every decision with its reason."),
    emit: str | None = typer.Option(
        None, "--emit", help="With --write: launch files too, for slurm, kubernetes, sky, modal or ssh."
    ),
    image: str | None = typer.Option(None, "--image", help="With --emit: a container image with Bessemer in it."),
    volume: str | None = typer.Option(None, "--volume", help="With --emit: a claim, a Modal volume or a bucket."),
    install: str | None = typer.Option(None, "--install", help="With --emit sky or modal: what pip installs."),
    hosts: str | None = typer.Option(None, "--hosts", help="With --emit ssh: HOST[,HOST...]."),
    serve: bool = typer.Option(False, "--serve", help="Plan serving instead: GPUs, settings, price of a token."),
    rps: float | None = typer.Option(None, "--rps", help="With --serve: requests a second."),
    ttft: str | None = typer.Option(None, "--ttft", help="With --serve: wait for the first token, such as 500ms."),
    tpot: str | None = typer.Option(None, "--tpot", help="With --serve: wait between tokens, such as 50ms."),
    prompt: int = typer.Option(1000, "--prompt", help="With --serve: tokens of a prompt."),
    answer: int = typer.Option(250, "--answer", help="With --serve: tokens of an answer."),
    purpose: str | None = typer.Option(
        None, "--for", help="Only the memory of training, lora, qlora, dpo, ppo or inference."
    ),
    rank: int = typer.Option(32, "--rank", help="With --for lora or qlora: of the adapters."),
    simulate: bool = typer.Option(False, "--simulate", help="Play the run: spread of finish and cost, what-ifs."),
    picture: Path | None = typer.Option(None, "--picture", help="Simulate, and draw one step: FILE.svg."),
    seed: int = typer.Option(0, "--seed", help="With --simulate: other numbers, other luck."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Plan a training run before there is anything to run: layout, batch, learning rate, memory, days and money, each
    with its reason and the error that such predictions had. From a few words, from a spec that leaves things open, or
    from a budget and a deadline; without any, questions are asked on a terminal.

    Example: bessemer plan --model 7b --tokens 100B --gpus 8xA100-80GB
    """
    if context.invoked_subcommand:
        return
    from bessemer.plan.interview import InterviewAnswers

    words = InterviewAnswers(model, tokens, gpus, budget, deadline)
    if purpose:
        others = {"--serve": serve, "--simulate": simulate, "--picture": picture, "--write": write,
                  "--budget": budget, "--deadline": deadline, "SPEC.yaml": spec}  # fmt: skip
        if wrong := [name for name, given in others.items() if given]:
            raise _fault(f"--for {purpose} tells memory alone: leave {wrong[0]} out")
        _purpose(purpose, words, row, precision, rank, as_json)
        return
    if serve and (simulate or picture):
        raise _fault("--simulate plays training: leave it out, or --serve")
    if serve:
        _serve(words, row, rps, ttft, tpot, prompt, answer, as_json)
        return
    if emit and not write:
        raise _fault(f"--emit {emit}: launch files need the spec they start: add --write FILE.yaml")
    if spec is None:
        words = _complete(words)
    how_to_ask = ""
    settled = {"--batch": batch, "--context": row, "--precision": precision, "--tp": tp, "--cp": cp, "--pp": pp}
    if spec is not None and not (words.gpus or words.budget or words.deadline):
        asked = _from_spec(spec, settings, words.model, _tokens(words), settled)
        more = {"--simulate": simulate, "--picture": picture, "--write": write, "--network": network,
                "--tokens-per-second": rate}  # fmt: skip
        words = _this_machine(asked, words, more, as_json)
        if words.gpus is None:  # printed already
            return
        from bessemer.plan.local import OTHERS

        how_to_ask = OTHERS
    found, shown = _answer(words, spec, settings, settled, network, rate)
    played = None
    if simulate or picture:
        from bessemer.plan.simulate.report import simulated

        played = simulated(found, seed, picture)
    print(_text(found, shown, as_json, played))
    if how_to_ask and not as_json:
        print(f"  others  {how_to_ask}")
    if write:
        options = {"image": image, "volume": volume, "install": install, "hosts": hosts}
        _write(found, write, emit, options, as_json)


def _fault(text: str) -> Exception:
    from bessemer.errors import UserError

    return UserError(text)


def _complete(words: InterviewAnswers) -> InterviewAnswers:
    """Questions for what is missing, where somebody is there to answer."""
    import sys

    from bessemer.plan.interview import interview

    enough = words.model and (words.gpus or words.budget or words.deadline)
    if enough or words.budget:
        return words
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise _fault(
            "write --model and --gpus, or --budget and --deadline, such as: "
            "bessemer plan --model 7b --tokens 100B --gpus 8xA100-80GB"
        )
    return interview(words, lambda question, default: str(typer.prompt(question, default=default)), print)


def _tokens(words: InterviewAnswers) -> int | None:
    from bessemer.plan.request import option_count

    return option_count("--tokens", words.tokens)


def _this_machine(asked: PlanRequest, words: InterviewAnswers, more: dict[str, Any], as_json: bool) -> InterviewAnswers:
    """The same wishes with this machine's GPUs, where the catalogue has them; elsewhere its plan is printed."""
    import json
    from dataclasses import replace

    from bessemer.plan.local import check_options, local_json, local_lines
    from bessemer.train.speed import catalogued_gpus, plan_measured

    if gpus := catalogued_gpus(asked.spec.parallel):
        return replace(words, gpus=gpus)
    check_options(more)
    found = plan_measured(asked)
    print(json.dumps(local_json(found), indent=1) if as_json else "\n".join(local_lines(found)))
    return words


def _answer(
    words: InterviewAnswers, spec: Path | None, settings: list[str], settled: dict[str, Any], network: str | None,
    rate: str | None,
) -> tuple[Proposal, Any]:  # fmt: skip
    """The plan, and the ranking that it comes first in where there is one."""
    from bessemer.plan.hardware import parse_cluster
    from bessemer.plan.request import option_count
    from bessemer.plan.search.budget import fulfil, parse_limits
    from bessemer.plan.search.proposal import check_rate, propose_for

    tokens = _tokens(words)
    if spec is not None:
        asked = _from_spec(spec, settings, words.model, tokens, settled)
    elif words.model is None:
        from bessemer.plan.search.budget import model_for_budget

        limits = parse_limits(words.budget, words.deadline)
        asked = model_for_budget(
            limits, tokens, lambda size, whole: _from_words(size, whole, settled), words.gpus, network
        )
    else:
        asked = _from_words(words.model, tokens, settled)
    ranking = None
    if words.budget or words.deadline:
        ranking = fulfil(asked, parse_limits(words.budget, words.deadline), words.gpus, network)
        found = ranking.best
    else:
        assert words.gpus is not None
        found = propose_for(asked, parse_cluster(words.gpus, network))
    if wanted := option_count("--tokens-per-second", rate):
        check_rate(found, wanted)
    return found, ranking


def _from_words(model: str, tokens: int | None, settled: dict[str, Any]) -> PlanRequest:
    from bessemer.plan.request import ask, option_count

    degrees = {key: settled[f"--{key}"] for key in ("tp", "cp", "pp")}
    batch = option_count("--batch", settled["--batch"])
    return ask(model, tokens, settled["--context"], batch, settled["--precision"] or "auto", degrees)


def _from_spec(
    spec: Path, settings: list[str], model: str | None, tokens: int | None, settled: dict[str, Any]
) -> PlanRequest:
    """A spec; options of the command line are laid over it as `--set` would."""
    from bessemer.plan.request import ask_spec
    from bessemer.spec.load import load_document

    keys = {"--batch": "budget.batch", "--context": "data.context", "--precision": "precision",
            "--tp": "parallel.tp", "--cp": "parallel.cp", "--pp": "parallel.pp"}  # fmt: skip
    over = [f"{keys[name]}={value}" for name, value in settled.items() if value is not None]
    over += [f"model={model.upper()}"] if model else []
    over += [f"budget.tokens={tokens}"] if tokens else []
    loaded = load_document(spec, [*settings, *over])
    run = loaded.spec
    if "name" not in loaded.document.data:  # what is written from it has its own file's name
        run = run.model_copy(update={"name": "auto"})
    if run.model.hf is None:
        return ask_spec(run)
    from bessemer.export.describe import find_shape  # reads the folder's config.json, for which it loads torch

    return ask_spec(run, find_shape(run.model.hf))


def _text(found: Proposal, ranking: Any, as_json: bool, played: Any = None) -> str:
    import json

    from bessemer.plan.present.show import lines, ranking_json, ranking_lines, to_json
    from bessemer.plan.search.budget import lever_lines

    if as_json:
        told = ranking_json(ranking) if ranking else to_json(found)
        if played:
            from bessemer.plan.simulate import report as simulation_report

            told["simulation"] = simulation_report.to_json(played)
        return json.dumps(told, indent=1)
    shown = ranking_lines(ranking) if ranking else [*lines(found), *lever_lines(found)]
    if played:
        from bessemer.plan.simulate import report as simulation_report

        shown += ["", *simulation_report.lines(played)]
    return "\n".join(shown)


def _write(found: Proposal, path: Path, emit: str | None, options: dict[str, str | None], as_json: bool) -> None:
    """The spec, and beside it what starts it somewhere. Beside JSON the names of the files are no part of it."""
    import shlex
    import sys

    from bessemer.plan.present.to_spec import spec_text, write_spec

    def tell(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout)

    text = spec_text(found, shlex.join(["bessemer", *sys.argv[1:]]))
    request = None
    if emit:  # what is wrong with it is told before anything is written
        from bessemer.launch.submit import planned_request, write_planned

        price = found.costs[0].price if found.costs else None
        request = planned_request(path, text, emit, found.wish.cluster, price, options)
    write_spec(path, text)
    tell(f"written  {path}")
    if request:
        write_planned(request, tell)


def _purpose(
    purpose: str, words: InterviewAnswers, row: int | None, precision: str | None, rank: int, as_json: bool
) -> None:  # fmt: skip
    import json

    from bessemer.plan.cost_model.purposes import check_use, fit_purpose, purpose_json, purpose_lines
    from bessemer.plan.request import ask

    use = check_use(purpose)
    if words.model is None or words.gpus is None:
        raise _fault(f"--for {use}: write --model and --gpus, such as: --for {use} --model 7b --gpus A100-80GB")
    found = fit_purpose(use, ask(words.model, context=row).shape, words.gpus, row or 4096, rank, precision or "bf16")
    print(json.dumps(purpose_json(found), indent=1) if as_json else "\n".join(purpose_lines(found)))


def _serve(
    words: InterviewAnswers, row: int | None, rps: float | None, ttft: str | None,
    tpot: str | None, prompt: int, answer: int,
    as_json: bool,
) -> None:  # fmt: skip
    import json

    from bessemer.plan.cost_model.serving import demand_of, serving_json, serving_lines, ways_to_serve
    from bessemer.plan.request import ask

    if words.model is None or rps is None:
        raise _fault("--serve: write --model and --rps, such as: bessemer plan --serve --model 7b --rps 10")
    shape, demand = ask(words.model, context=row).shape, demand_of(rps, prompt, answer, ttft, tpot)
    ways = ways_to_serve(shape, demand, words.gpus)
    told = serving_json(shape, demand, ways)
    print(json.dumps(told, indent=1) if as_json else "\n".join(serving_lines(shape, demand, ways)))


@app.command()
def check(
    rows: Path = typer.Argument(help="A CSV file with the columns of vTrain's or llm-foundry's published table."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """Predict the step time of every row from its configuration alone, beside what was measured.

    Example: bessemer plan check benchmarks/data/planner/llmfoundry_mfu.csv
    """
    import json

    from bessemer.plan.check import check_file, table, to_json

    found = check_file(rows)
    print(json.dumps(to_json(found), indent=1) if as_json else "\n".join(table(found)))
