"""Budgets and deadlines: what is ranked keeps the limits, the arithmetic adds up, and impossible wishes get it told."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import load_prices
from bessemer.plan.hardware import find_gpu, gpu_catalogue
from bessemer.plan.present import ranking_json, ranking_lines
from bessemer.plan.recipe.pretraining import optimal_tokens
from bessemer.plan.request import DAY, BudgetLimits, parse_limits, parse_money
from bessemer.plan.search.budget import alternatives, choose_model, search_budget, speed_up

from ..plans import plan_on, request

BILLION = 10**9


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.mark.parametrize(
    ("text", "usd"),
    [("50000usd", 5e4), ("$50k", 5e4), ("50,000 USD", 5e4), ("1.5M", 1.5e6), ("usd 99.5", 99.5), ("200 dollars", 200)],
)
def test_money_as_people_write_it(text: str, usd: float) -> None:
    assert parse_money(text) == usd


@pytest.mark.parametrize("text", ["0usd", "0", "-5", "much", "", "50 eur", "1,5,"])
def test_no_money_is_refused_with_a_form(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget .*such as") as fault:
        parse_money(text)
    assert "\n" not in str(fault.value)


@given(st.floats(1, 1e9), st.sampled_from(["", "k", "M"]))
def test_money_is_scaled(number: float, scale: str) -> None:
    wanted = float(f"{number:.2f}") * {"": 1, "k": 1e3, "M": 1e6}[scale]
    if wanted > 0:
        assert parse_money(f"{number:.2f}{scale}") == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["0d", "-3d", "soon", "30"])
def test_no_time_is_refused_with_a_form(text: str) -> None:
    with pytest.raises(UserError, match=r"--deadline .*such as"):
        parse_limits(None, text)


def test_a_ranking_keeps_its_limits_and_names_every_gpu_that_is_rented() -> None:
    limits = parse_limits("20000usd", "30d")
    found = search_budget(request("7b", 100 * BILLION), limits)
    offers = found.offers()
    assert len(offers) > 5 and [cost.usd for _, cost in offers] == sorted(cost.usd for _, cost in offers)
    assert all(cost.usd <= 20_000 and cost.wall_s <= 30 * DAY for _, cost in offers)
    told = {way.proposal.goal.cluster.gpu.name for way in found.options} | {
        name.split(" x ")[-1] for name, _ in found.lost
    }
    prices = load_prices().prices
    assert told == {
        price.gpu for price in prices if price.term in ("on_demand", "spot") and price.gpu in gpu_catalogue()
    }
    assert found.best.costs[0].usd == offers[0][1].usd


def test_the_price_is_hours_times_price_and_what_goes_with_them() -> None:
    found = search_budget(request("7b", 100 * BILLION), parse_limits("20000usd", "30d"))
    way, cost = found.offers()[0]
    proposal = way.proposal
    assert proposal.seconds == pytest.approx(100 * BILLION / proposal.best.tokens_per_s)
    gpu_usd = proposal.goal.cluster.count * cost.wall_s / 3600 * cost.price.usd_hour
    assert cost.parts["gpus"] == pytest.approx(gpu_usd) and cost.usd == pytest.approx(sum(cost.parts.values()))
    assert cost.usd > gpu_usd, "storage and the preparation of data are not free"


def test_types_that_were_not_searched_could_not_have_been_cheaper() -> None:
    """Their bound is a price at 80 % of the peak; planned in full, each costs more than the best."""
    found = search_budget(request("1b", 20 * BILLION), parse_limits(None, "30d"))
    bounds = {name: why for name, why in found.lost if "of its peak" in why}
    looked_at = 0
    for name in bounds:
        proposal = plan_on("1b", f"{find_gpu(name).node} x {name}", 20 * BILLION)
        bound = float(bounds[name].split()[0].strip("$").replace(",", ""))
        for cost in proposal.costs[:1]:  # none where so many are not rented together
            looked_at += 1
            assert cost.usd > max(bound, found.options[0].usd)
    assert looked_at > 3


@pytest.mark.parametrize(
    ("budget", "deadline", "words"),
    [
        (
            "1000usd",
            "30d",
            r"4e\+22 FLOPs, or [\d,]+ hours of .* times the budget; nearest: --budget \d+usd, or --tokens",
        ),
        pytest.param("1000usd", None, r"times the budget; nearest: --budget", marks=pytest.mark.slow),
        pytest.param(
            "40000usd",
            "1d",
            r"times the budget; nearest: --budget .*--deadline \d+d with \d+ x",
            marks=pytest.mark.slow,
        ),
        (None, "1h", r"no 16,384 GPUs of any type .* nearest: --deadline \d+d with"),
    ],
)
def test_impossible_wishes_get_the_arithmetic_and_the_nearest(
    budget: str | None, deadline: str | None, words: str
) -> None:
    with pytest.raises(UserError, match=words) as fault:
        search_budget(request("7b", 1000 * BILLION), parse_limits(budget, deadline))
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(("deadline", "words"), [("10s", "in 10s, nor in "), ("2h", "in 2h 00m, nor in ")])
def test_a_deadline_nobody_keeps_is_named_as_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, deadline: str, words: str
) -> None:
    monkeypatch.setattr("bessemer.plan.search.budget.options_within", lambda *args, **options: ([], []))
    with pytest.raises(UserError, match=f"no GPU that is rented trains them {words}"):
        search_budget(request("7b", 100 * BILLION), parse_limits("1usd", deadline))


def test_a_deadline_of_a_second_gets_the_nearest_that_is_possible() -> None:
    with pytest.raises(UserError, match=r"do that in 1s; nearest: --deadline 1d with"):
        search_budget(request("7b", 100 * BILLION), parse_limits(None, "1s"))


def test_what_no_gpu_mends_is_told_by_its_key() -> None:
    with pytest.raises(UserError, match=r"parallel\.tp: 3 does not divide"):
        search_budget(request("7b", 100 * BILLION, degrees={"tp": 3}), parse_limits("50k", "30d"))
    found = search_budget(request("1b", 20 * BILLION, precision="fp8"), parse_limits("50k", "30d"))
    assert all("fp8" in way.proposal.goal.cluster.gpu.peaks for way in found.options)


def test_the_nearest_plan_is_possible() -> None:
    """What the refusal proposes is not refused."""
    asked = request("7b", 1000 * BILLION)
    with pytest.raises(UserError) as fault:
        search_budget(asked, parse_limits("1000usd", "30d"))
    budget = re.search(r"--budget (\d+usd)", str(fault.value))
    tokens = re.search(r"--tokens ([\d.]+)B", str(fault.value))
    assert budget and tokens
    assert search_budget(asked, parse_limits(budget[1], "30d")).options
    assert search_budget(request("7b", int(float(tokens[1]) * BILLION)), parse_limits("1000usd", "30d")).options


def test_a_cluster_that_is_named_is_held_to_the_deadline() -> None:
    with pytest.raises(UserError, match=r"8 x A100-80GB take .* days .* nearest: --deadline \d+d, about \d+ GPUs"):
        search_budget(request("7b", 1000 * BILLION), parse_limits(None, "10d"), "8xA100-80GB")
    found = search_budget(request("7b", 10 * BILLION), parse_limits(None, "10d"), "8xA100-80GB")
    assert [way.name for way in found.options] == ["8 x A100-80GB"]
    alone = search_budget(request("7b", 100 * BILLION), parse_limits("50k", "30d"), "H100")
    assert {way.proposal.goal.cluster.gpu.name for way in alone.options} == {"H100"}


def test_the_model_for_a_budget_spends_it_and_follows_the_law() -> None:
    limits = parse_limits("2000usd", "30d")
    asked = choose_model(limits, None, lambda size, tokens: request(size, tokens))
    tokens = asked.spec.budget.tokens
    assert isinstance(tokens, int) and tokens == pytest.approx(optimal_tokens(asked.shape.parameters), rel=0.15)
    best = search_budget(asked, limits)
    assert 0.6 * 2000 < best.options[0].usd <= 2000
    assert "Besiroglu" in best.best.plan.decisions["budget.tokens"].source
    fixed = choose_model(limits, 10 * BILLION, lambda size, tokens: request(size, tokens))
    assert fixed.spec.budget.tokens == 10 * BILLION and fixed.shape.parameters > asked.shape.parameters


def test_a_ranking_as_text_and_as_json() -> None:
    found = search_budget(request("1b", 20 * BILLION), BudgetLimits(1000.0, 30 * DAY, default_deadline=True))
    text = "\n".join(ranking_lines(found))
    for word in ("within $1,000 and 30 days (no --deadline was given)", "lost: $", "MFU", "memory  [", "optimizer.lr"):
        assert word in text
    told = ranking_json(found)
    assert told["offers"][0]["usd"] <= 1000 and told["limits"]["deadline_days"] == 30
    assert {"gpu", "gpus", "provider", "region", "term", "days", "usd", "mfu"} <= told["offers"][0].keys()
    assert all(lost["why"] for lost in told["lost"])


def test_levers_are_plans_of_their_own() -> None:
    base = plan_on("1b", "8xA100-80GB", 20 * BILLION)
    found = dict(alternatives(base))
    assert found.keys() == {"8 x H100", "twice the GPUs"}
    assert found["twice the GPUs"].goal.cluster.count == 16 and found["twice the GPUs"].wall_s < base.wall_s
    assert "precision fp8" in dict(alternatives(plan_on("1b", "1xH100", 20 * BILLION)))
    times = speed_up(base)
    assert times is not None and 6 < times <= 8
    assert speed_up(plan_on("13b", "8xA100-80GB", 20 * BILLION)) is None, "one cannot hold it"
