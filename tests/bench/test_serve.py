"""`bessemer bench serve`: its numbers against hand-computed ones, and against a real server."""

import json
import statistics
import threading

import numpy as np
import pytest
from tests.serve.conftest import llama_folder, running
from typer.testing import CliRunner

from bessemer.bench.serve import (
    PROMISES,
    Load,
    Promise,
    RequestTimes,
    ServeReport,
    measure_load,
    parse_lengths,
    percentile,
    plan_requests,
    table,
)
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.serve.models import ModelOptions, load_served


def test_arrivals_are_a_poisson_process():
    planned = plan_requests(Load("x", requests=4000, rate=5.0, lengths=((100, 40, 3.0), (1000, 400, 1.0))))
    gaps = np.diff([at for at, _, _ in planned])
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # of an exponential distribution, as the mean
    short = [(prompt, answer) for _, prompt, answer in planned if prompt <= 150]
    assert len(short) / 4000 == pytest.approx(0.75, abs=0.03)
    assert {min(p for p, _ in short), max(p for p, _ in short)} == {50, 150}
    assert planned == plan_requests(Load("x", requests=4000, rate=5.0, lengths=((100, 40, 3.0), (1000, 400, 1.0))))
    assert {at for at, _, _ in plan_requests(Load("x", requests=5, rate=0))} == {0.0}


def test_numbers_by_hand():
    times = [
        RequestTimes(0.0, 10, 3, [1.0, 1.5, 2.0], 2.0),
        RequestTimes(0.5, 20, 1, [4.0], 4.0),
        RequestTimes(1.0, error="refused", end_s=0.1),
    ]
    summary = ServeReport("m", Load("x"), 5.0, times).summary(Promise(ttft_s=2.0, tpot_s=0.5))
    assert summary["requests"] == 3 and summary["failed"] == 1 and summary["requests_per_s"] == 0.4
    assert summary["output_tokens_per_s"] == 0.8 and summary["prompt_tokens_per_s"] == 6.0
    assert summary["ttft_s"]["p50"] == 2.5 and summary["tpot_s"]["p99"] == 0.5 and summary["itl_s"]["p50"] == 0.5
    assert summary["goodput_per_s"] == 0.2 and summary["attained"] == 1 / 3 and not summary["passed"]


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(0).random(37))
    for q in (50, 95, 99):
        assert percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_lengths():
    assert parse_lengths("256x128") == [(256, 128, 1.0)]
    assert parse_lengths("128x64:0.8,2048x256:0.2") == [(128, 64, 0.8), (2048, 256, 0.2)]
    for text in ("256", "ax1", "0x5", "5x5:-1"):
        with pytest.raises(UserError, match="PROMPTxANSWER"):
            parse_lengths(text)


def test_a_measurement_that_is_cut_has_the_rates_of_what_completed(monkeypatch):
    """Two of three requests end; the third goes on until after the end of the measurement."""
    over = threading.Event()

    def send(target, load, number, start, prompt_tokens, times, answer):
        if number == 2:
            times.events_s.append(0.01)
            over.wait(60)
        else:
            times.tokens, times.events_s, times.end_s = 5, [0.1], 0.2

    monkeypatch.setattr("bessemer.bench.serve.send", send)
    report = measure_load(Load("http://127.0.0.1:9/v1", "m", requests=3, rate=0, seconds=0.3))
    over.set()
    summary = report.summary(Promise(ttft_s=1.0))
    assert summary["requests"] == 3 and summary["failed"] == 0 and summary["unfinished"] == 1
    assert summary["seconds"] == pytest.approx(0.2) and summary["output_tokens_per_s"] == pytest.approx(50)
    assert summary["attained"] == pytest.approx(2 / 3) and not summary["passed"]
    assert "2 answered, 0 failed, 1 not ended, in 0.2 s" in table(summary)[1]


def test_against_a_server(tmp_path):
    folder = llama_folder(tmp_path / "tiny")
    with running([load_served("tiny", folder, ModelOptions(device="cpu", slots=4))]) as server:
        command = [
            "bench",
            "serve",
            f"{server.url}/v1",
            "--requests",
            "6",
            "--rate",
            "0",
            "--lengths",
            "16x8",
            "--ignore-eos",
        ]
        out = tmp_path / "load.json"
        result = CliRunner().invoke(app, [*command, "--slo", "batch", "--json", "--out", str(out)])
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        planned = plan_requests(Load("", requests=6, rate=0, lengths=[(16, 8, 1.0)]))
        details = json.loads(out.read_text())["times"]
        assert [times["tokens"] for times in details] == [answer for _, _, answer in planned]
        assert summary["passed"] and summary["failed"] == 0 and summary["ttft_s"]["p50"] > 0
        table = CliRunner().invoke(app, [*command, "--lengths", "600x8"])
        assert table.exit_code == 1 and "6 failed" in table.output and "context" in table.output
        cut = CliRunner().invoke(app, [*command, "--lengths", "16x400", "--seconds", "0.1", "--json"])
        summary = json.loads(cut.stdout)
        assert summary["unfinished"] == 6 and summary["failed"] == 0 and summary["output_tokens_per_s"] == 0
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError) and "is the server running" in str(result.exception)
    assert {"interactive", "batch", "streaming", "edge"} == set(PROMISES)
