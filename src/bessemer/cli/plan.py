"""`bessemer plan`: plans a run before it starts. One command for each question that a user asks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bessemer.cli.console import AS_JSON, SETTINGS, CommandGroup

if TYPE_CHECKING:
    from bessemer.plan.request import InterviewAnswers
    from bessemer.plan.search.budget import BudgetRanking
    from bessemer.plan.search.proposal import Proposal


class _RunByDefault(CommandGroup):
    """`plan ...` means `plan run ...` unless the first word is a command. The help shows an example of each command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, args if args and args[0] in known else ["run", *args])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        super().format_commands(ctx, formatter)
        with formatter.section("Examples"):
            for command in self.commands.values():
                formatter.write(f"  {(command.help or '').partition('Example: ')[2].strip()}\n")


app = typer.Typer(
    cls=_RunByDefault,
    subcommand_metavar="[COMMAND] [SPEC.yaml] [OPTIONS]...",
    help="Plan a run before it starts: layout, batch, learning rate, memory, days and money. Every number comes with "
    "its reason and its error. The word `run` may be left out; without arguments, `bessemer plan` asks questions.",
)
SPEC = typer.Argument(None, help="A run's YAML file. The plan keeps what it sets and decides the rest.")
MODEL = typer.Option(None, "--model", help="A size or a preset, such as 7B or llama-7b.")
TOKENS = typer.Option(None, "--tokens", help="Training tokens, such as 100B. Default: compute-optimal for the model.")
GPUS = typer.Option(None, "--gpus", help="Such as 8xA100-80GB or '2 nodes of 8 H100' (default with a SPEC: this host).")
NETWORK = typer.Option(None, "--network", help="Bandwidth of a node, such as '8 x NDR' or '400 Gb/s'.")
WRITE = typer.Option(None, "--write", help="Write the planned spec to this file, each decision with its reason.")


@app.command()
def run(
    spec: Path | None = SPEC, model: str | None = MODEL, tokens: str | None = TOKENS, gpus: str | None = GPUS,
    network: str | None = NETWORK, settings: list[str] = SETTINGS,
    tokens_per_second: str | None = typer.Option(
        None, "--tokens-per-second", help="Refuse the plan if it is slower than this, with the arithmetic."
    ),
    write: Path | None = WRITE,
    as_json: bool = AS_JSON,
) -> None:  # fmt: skip
    """Plan a training run on given GPUs, or a spec on this machine. Without enough options it asks on a terminal.

    Example: bessemer plan run --model 7b --tokens 100B --gpus 8xA100-80GB
    """
    from bessemer.plan.local import OTHER_MACHINES, check_options, local_json, local_lines
    from bessemer.plan.request import InterviewAnswers, parse_count_option
    from bessemer.plan.search.proposal import check_rate
    from bessemer.session.planning import local_gpus, propose_on, request_plan

    if spec is None and not (model and gpus):
        _plan_answers(_ask_missing(InterviewAnswers(model, tokens, gpus)), network, settings, write, as_json)
        return
    request = request_plan(spec, model, tokens, settings)
    here = None
    if gpus is None:
        from bessemer.train.speed import plan_measured

        here = local_gpus(request)
        if here is None:
            check_options({"--write": write, "--network": network, "--tokens-per-second": tokens_per_second})
            local = plan_measured(request)
            _print(local_json(local), local_lines(local), as_json)
            return
    proposal = propose_on(request, gpus or here, network)
    if rate := parse_count_option("--tokens-per-second", tokens_per_second):
        check_rate(proposal, rate)
    _print_proposal(proposal, as_json)
    if here and not as_json:
        print(f"  others  {OTHER_MACHINES}")
    _write(proposal, write, as_json)


@app.command()
def search(
    spec: Path | None = SPEC,
    budget: str | None = typer.Option(None, "--budget", help="Highest price of the run, such as 50000usd."),
    deadline: str | None = typer.Option(None, "--deadline", help="Longest duration, such as 30d. Default: 30 days."),
    model: str | None = typer.Option(None, "--model", help="A size or a preset. Default: what the budget trains best."),
    tokens: str | None = TOKENS,
    gpus: str | None = typer.Option(None, "--gpus", help="Search one GPU type (H100) or one cluster (8xH100) only."),
    network: str | None = NETWORK,
    settings: list[str] = SETTINGS,
    write: Path | None = WRITE,
    as_json: bool = AS_JSON,
) -> None:
    """Search GPU types, their number and providers for the cheapest run within a budget, a deadline or both.

    Example: bessemer plan search --model 7b --tokens 100B --budget 10000usd --deadline 30d
    """
    from bessemer.plan.request import parse_count_option, parse_limits, request_from_options
    from bessemer.plan.search.budget import choose_model, search_budget
    from bessemer.session.planning import request_plan

    if not (budget or deadline):
        raise _error("plan search: write --budget, such as 5000usd, --deadline, such as 30d, or both")
    limits = parse_limits(budget, deadline)
    if spec is None and model is None:
        if budget is None:
            raise _error("plan search --deadline: write --model or --budget too, such as --model 7b")
        request = choose_model(
            limits, parse_count_option("--tokens", tokens),
            lambda size, count: request_from_options(size, count, settings), gpus, network,
        )  # fmt: skip
    else:
        request = request_plan(spec, model, tokens, settings)
    ranking = search_budget(request, limits, gpus, network)
    _print_ranking(ranking, as_json)
    _write(ranking.best, write, as_json)


@app.command()
def simulate(
    spec: Path | None = SPEC, model: str | None = MODEL, tokens: str | None = TOKENS, gpus: str | None = GPUS,
    network: str | None = NETWORK, settings: list[str] = SETTINGS,
    picture: Path | None = typer.Option(None, "--picture", help="Draw the timeline of one step: FILE.svg."),
    seed: int = typer.Option(0, "--seed", help="Seed of the random failures and delays."),
    as_json: bool = AS_JSON,
) -> None:  # fmt: skip
    """Simulate a planned run with failures, stragglers and preemptions: spread of its finish and cost, and what-ifs.

    Example: bessemer plan simulate --model 70b --tokens 2T --gpus 4096xH100 --picture step.svg
    """
    from bessemer.plan.present import proposal_json, proposal_lines
    from bessemer.plan.search.budget import alternative_lines
    from bessemer.plan.simulate.run import run_simulation, simulation_json, simulation_lines
    from bessemer.session.planning import propose_on, request_plan

    proposal = propose_on(request_plan(spec, model, tokens, settings), gpus, network)
    simulation = run_simulation(proposal, seed, picture)
    text = [*proposal_lines(proposal), *alternative_lines(proposal), "", *simulation_lines(simulation)]
    _print(proposal_json(proposal) | {"simulation": simulation_json(simulation)}, text, as_json)


@app.command()
def serve(
    model: str = typer.Option(..., "--model", help="A size or a preset, such as 7B, or a run or exported folder."),
    rps: float = typer.Option(..., "--rps", help="Requests per second."),
    ttft: str | None = typer.Option(None, "--ttft", help="Longest time to the first token (default: 500ms)."),
    tpot: str | None = typer.Option(None, "--tpot", help="Longest time per output token (default: 30ms)."),
    prompt: int = typer.Option(1000, "--prompt", help="Tokens of a prompt."),
    answer: int = typer.Option(250, "--answer", help="Tokens of an answer."),
    gpus: str | None = typer.Option(None, "--gpus", help="A GPU type, such as H100. Default: the cheapest."),
    emit: str | None = typer.Option(None, "--emit", help="Write a launch file for vllm, tensorrt-llm or sglang."),
    out: Path | None = typer.Option(None, "--out", help="With --emit: the file (default: ENGINE.yaml)."),
    as_json: bool = AS_JSON,
) -> None:
    """Plan serving: GPUs, replicas, engine settings and the price of a million tokens for a load and two latencies.

    Example: bessemer plan serve --model 7b --rps 10 --ttft 500ms --tpot 50ms
    """
    from bessemer.plan.cost_model.serving import find_serving, parse_demand, serving_json, serving_lines
    from bessemer.plan.request import request_from_options

    if is_folder := Path(model).is_dir():
        from bessemer.export.describe import find_shape

        shape = find_shape(model)
    else:
        shape = request_from_options(model).shape
    demand = parse_demand(rps, prompt, answer, ttft, tpot)
    options = find_serving(shape, demand, gpus)
    if emit is not None:
        from bessemer.plan.serving_files import launch_plan, write_launch_file

        plan = launch_plan(str(Path(model).absolute()) if is_folder else "MODEL", shape, demand, options[0])
        file = write_launch_file(emit, plan, out or Path(f"{emit}.yaml"))
        print(f"written  {file}", file=sys.stderr if as_json else sys.stdout)
    _print(serving_json(shape, demand, options), serving_lines(shape, demand, options), as_json)


@app.command()
def memory(
    use: str = typer.Argument(help="training, lora, qlora, dpo, ppo or inference."),
    model: str = typer.Option(..., "--model", help="A size or a preset, such as 7B or llama-7b."),
    gpus: str = typer.Option(..., "--gpus", help="Such as A100-80GB or 8xH100."),
    context: int = typer.Option(4096, "--context", help="Tokens of a row, a rollout or a conversation."),
    precision: str = typer.Option("bf16", "--precision", help="bf16, fp16, fp8, tf32, fp32; for inference also int4."),
    rank: int = typer.Option(32, "--rank", help="Rank of the adapters of lora and qlora."),
    as_json: bool = AS_JSON,
) -> None:
    """Show what a model needs in GPU memory for training, adapters, preference training, PPO or inference.

    Example: bessemer plan memory qlora --model 70b --gpus A100-80GB --context 2048
    """
    from bessemer.plan.cost_model.purposes import check_use, fit_purpose, purpose_json, purpose_lines
    from bessemer.plan.request import request_from_options

    shape = request_from_options(model, settings=[f"data.context={context}"]).shape
    fit = fit_purpose(check_use(use), shape, gpus, context, rank, precision)
    _print(purpose_json(fit), purpose_lines(fit), as_json)


@app.command()
def job(
    spec: Path = typer.Argument(help="A spec, such as one that --write wrote."),
    gpus: str = typer.Option(..., "--gpus", help="The cluster, such as 16xA100-80GB."),
    on: str = typer.Option(..., "--on", help="slurm, kubernetes, sky, modal or ssh."),
    image: str | None = typer.Option(None, "--image", help="A container image that contains Bessemer."),
    volume: str | None = typer.Option(None, "--volume", help="A volume claim, a Modal volume or a bucket."),
    install: str | None = typer.Option(None, "--install", help="sky and modal: what pip installs."),
    hosts: str | None = typer.Option(None, "--hosts", help="ssh: HOST[,HOST...]."),
    as_json: bool = AS_JSON,
) -> None:
    """Write the files that start a spec on a cluster, for as many nodes as its plan uses. Submits nothing.

    Example: bessemer plan job my-7b.yaml --gpus 16xA100-80GB --on slurm
    """
    from bessemer.launch.submit import planned_request, write_planned
    from bessemer.session.planning import propose_on, request_plan

    proposal = propose_on(request_plan(spec, None, None, []), gpus, None)
    price = proposal.costs[0].price if proposal.costs else None
    options = {"image": image, "volume": volume, "install": install, "hosts": hosts}
    request = planned_request(spec, spec.read_text(), on, proposal.goal.cluster, price, options)
    files, command = write_planned(request)
    _print(
        {"files": files, "start": command}, [*(f"written  {file}" for file in files), f"start    {command}"], as_json
    )


@app.command()
def interview() -> None:
    """Ask for model, tokens and GPUs or budget, one question after the other, then print the plan.

    Example: bessemer plan interview
    """
    from bessemer.plan.request import InterviewAnswers

    _plan_answers(_ask_missing(InterviewAnswers()), None, [], None, False)


@app.command()
def check(
    rows: Path = typer.Argument(help="A CSV file with the columns of vTrain's or llm-foundry's published table."),
    as_json: bool = AS_JSON,
) -> None:
    """Compare predicted with measured step times: every row of a table is predicted from its configuration alone.

    Example: bessemer plan check benchmarks/data/planner/llmfoundry_mfu.csv
    """
    from bessemer.plan.check import check_file, table, to_json

    checked = check_file(rows)
    _print(to_json(checked), table(checked), as_json)


@app.command()
def forecast(
    run: Path = typer.Argument(help="The run's folder, such as runs/demo."),
    at: str | None = typer.Option(None, "--at", help="Forecast from the first part only, such as 30%."),
    as_json: bool = AS_JSON,
) -> None:
    """Forecast the final loss of a run from its curve and schedule, and compare a longer run with a larger model.

    Example: bessemer plan forecast runs/my-run
    """
    from bessemer.plan.run_forecast import forecast_run
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import parse_share

    try:
        share = None if at is None else parse_share(at)
    except ValueError as error:
        raise _error(f"--at: {error}") from None
    forecast = forecast_run(Run.existing(run), share)
    _print(forecast.to_json(), forecast.lines(), as_json)


@app.command("ramp")
def batch_ramp(
    run: Path = typer.Argument(help="The folder of a run that measured its noise scale (observe.noise_every)."),
    first: str | None = typer.Option(None, "--first", help="Tokens of the first batches (default: a quarter)."),
    longest: str | None = typer.Option(None, "--longest", help="Tokens of the last ones (default: 8 times the run's)."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the gradient noise scale over a run, and the batch ramp that follows from it for another run.

    Example: bessemer plan ramp runs/my-run --longest 1M
    """
    from bessemer.plan.batch_ramp import ramp_of_run
    from bessemer.run.directory import Run
    from bessemer.spec.quantity import parse_count

    try:
        sizes = [None if text is None else parse_count(text) for text in (first, longest)]
    except ValueError as error:
        raise _error(f"--first, --longest: {error}") from None
    answer = ramp_of_run(Run.existing(run), *sizes)
    _print(answer.to_json(), answer.lines(), as_json)


def _error(text: str) -> Exception:
    from bessemer.errors import UserError

    return UserError(text)


def _print(data: dict[str, Any], lines: list[str], as_json: bool) -> None:
    import json

    print(json.dumps(data, indent=1) if as_json else "\n".join(lines))


def _ask_missing(answers: InterviewAnswers) -> InterviewAnswers:
    """Ask for what the options leave out, if a person is there to answer."""
    from bessemer.plan.request import ask_missing

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise _error("write --model and --gpus, such as: bessemer plan --model 7b --tokens 100B --gpus 8xA100-80GB")
    return ask_missing(answers, lambda question, default: str(typer.prompt(question, default=default)), print)


def _plan_answers(
    answers: InterviewAnswers, network: str | None, settings: list[str], write: Path | None, as_json: bool
) -> None:
    """The plan of an interview: on the named GPUs, or the best within the budget and deadline."""
    from bessemer.session.planning import propose_on, request_plan

    request = request_plan(None, answers.model, answers.tokens, settings)
    if answers.gpus:
        proposal = propose_on(request, answers.gpus, network)
        _print_proposal(proposal, as_json)
    else:
        from bessemer.plan.request import parse_limits
        from bessemer.plan.search.budget import search_budget

        ranking = search_budget(request, parse_limits(answers.budget, answers.deadline), None, network)
        proposal = ranking.best
        _print_ranking(ranking, as_json)
    _write(proposal, write, as_json)


def _print_proposal(proposal: Proposal, as_json: bool) -> None:
    from bessemer.plan.present import proposal_json, proposal_lines
    from bessemer.plan.search.budget import alternative_lines

    if as_json:
        _print(proposal_json(proposal), [], as_json)
    else:
        _print({}, [*proposal_lines(proposal), *alternative_lines(proposal)], as_json)


def _print_ranking(ranking: BudgetRanking, as_json: bool) -> None:
    from bessemer.plan.present import ranking_json, ranking_lines

    _print(ranking_json(ranking), ranking_lines(ranking), as_json)


def _write(proposal: Proposal, path: Path | None, as_json: bool) -> None:
    """Write the planned spec. With --json the file's name goes to stderr."""
    if path is None:
        return
    import shlex

    from bessemer.plan.present import spec_text, write_spec

    write_spec(path, spec_text(proposal, shlex.join(["bessemer", *sys.argv[1:]])))
    print(f"written  {path}", file=sys.stderr if as_json else sys.stdout)
