"""The page's server: what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.requests import Request
from starlette.testclient import TestClient

from bessemer.run.directory import Run, RunWriter
from bessemer.watch import library as library_module
from bessemer.watch.access import MAX_BODY_BYTES, MAX_QUERY_BYTES, PageAccess
from bessemer.watch.app import MODULES, Pages, make_app
from bessemer.watch.export import export_run
from bessemer.watch.library import LAYER_BINS, Library, open_library

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> & more"

ORIGIN = "http://127.0.0.1"


def client(runs: Path, token: str = "", local: bool = True, control: bool = False) -> Any:
    app = make_app(Library(runs), PageAccess(token, local, 8800), control)
    return TestClient(app, base_url=ORIGIN, follow_redirects=False, raise_server_exceptions=False)


def test_the_list_and_one_run(runs: Path) -> None:
    page = client(runs)
    listed = page.get("/api/runs").json()
    assert {run["name"] for run in listed["runs"]} == {"first", "second run"} and listed["control"] is False
    assert all(run["state"] == "finished" and run["step"] == 60 and "folder" not in run for run in listed["runs"])
    facts = page.get("/api/runs/second%20run").json()
    assert facts["decisions"][0]["value"] == 0.02 and "lr: 0.02" in facts["spec"]
    assert facts["reports"] == ["anomaly-000030"] and facts["ranks"]["own_s"] == [0.4, 0.5]
    compared = page.get("/api/compare?runs=first|second run").json()
    assert {"key": "optimizer.lr", "values": [0.01, 0.02]} in compared["rows"]
    results = {row["key"]: row["values"] for row in compared["results"]}
    assert list(results) == ["tokens/s", "loss", "validation loss"]
    assert results["validation loss"][1] == pytest.approx(results["validation loss"][0] + 0.01)


def test_series_by_step_tokens_and_time(runs: Path) -> None:
    page = client(runs)
    answer = page.get("/api/runs/first/series?names=loss|lr|validation:loss|unknown&bins=500").json()
    steps, validation = answer["groups"]
    assert steps["x"] == list(range(60)) and answer["rows"] == 60
    assert steps["series"]["loss"]["mean"][30] is None and steps["series"]["loss"]["bad"][30] == 1
    assert steps["series"]["loss"]["mean"][0] == pytest.approx(3.0) and "low" not in steps["series"]["loss"]
    assert validation["x"] == [10, 20, 30, 40, 50, 60] and set(steps["series"]["unknown"]["mean"]) == {None}
    tokens = page.get("/api/runs/first/series?names=loss&x=tokens&from=1280&to=2560&bins=4").json()["groups"][0]
    assert tokens["x"][0] <= 1280 and tokens["x"][-1] >= 2400 and len(tokens["x"]) == 4
    bins = tokens["series"]["loss"]
    assert all(low < high for low, high in zip(bins["low"], bins["high"], strict=True))
    seconds = page.get("/api/runs/first/series?names=loss&x=time").json()["groups"][0]["x"]
    assert seconds[-1] == pytest.approx(30.0)
    placed = page.get("/api/runs/first/events?x=time").json()["events"]
    assert next(event for event in placed if event["kind"] == "veto")["place"] == pytest.approx(15.5)


def test_layers_are_rows_of_a_picture(runs: Path) -> None:
    page = client(runs)
    answer = page.get("/api/runs/first/layers").json()
    assert answer["x"] == [9, 19, 29, 39, 49, 59] and answer["available"] == ["grad_norm", "dead"]
    norms, dead = answer["maps"]["grad_norm"], answer["maps"]["dead"]
    assert norms["layers"] == ["embedding", "blocks.0"] and norms["rows"][1] == [1, 10, 100, 1000, 10000, 100000]
    assert dead["bad"] == [[1, 2]] and dead["rows"][1][2] is None and dead["rows"][1][5] == pytest.approx(59 / 60)
    answer = page.get("/api/runs/first/layers?quantities=grad_norm|none&x=tokens&from=2000&to=4000").json()
    assert list(answer["maps"]) == ["grad_norm"] and answer["x"][0] <= 2000 <= answer["x"][1]


def test_many_layer_samples_are_thinned_to_their_highest(runs: Path, new_run: Callable[..., Run]) -> None:
    run = new_run("deep", steps=1)
    with RunWriter(run.folder) as writer:
        for step in range(5 * LAYER_BINS):
            writer.layer_record({"step": step, "update_ratio": {"blocks.0": 9.0 if step == 777 else 1e-3}})
    answer = client(runs).get("/api/runs/deep/layers").json()
    row = answer["maps"]["update_ratio"]["rows"][0]
    assert len(row) == len(answer["x"]) == LAYER_BINS and row.index(9.0) == 777 // 5 and row.count(9.0) == 1


def test_readings_of_the_machine_are_curves(runs: Path) -> None:
    page = client(runs)
    names = page.get("/api/runs/first/names").json()["names"]["system"]
    assert {"step", "gpu_power_w", "cpu_busy_share"} <= set(names)
    (group,) = page.get("/api/runs/first/series?names=system:gpu_power_w|system:ram_bytes").json()["groups"]
    assert group["journal"] == "system" and group["series"]["system:gpu_power_w"]["mean"] == [690.0] * 6
    assert group["series"]["system:ram_bytes"]["mean"][0] == 1 << 33


def test_events_lead_to_their_reports(runs: Path) -> None:
    events = client(runs).get("/api/runs/first/events").json()["events"]
    veto = next(event for event in events if event["kind"] == "veto")
    assert veto["report"] == "anomaly-000030.md" and veto["place"] == 30 and "step 30" in veto["line"]
    assert "report" not in events[0]


def test_a_report_is_boxed_in_and_samples_are_data(runs: Path) -> None:
    page = client(runs)
    report = page.get("/api/runs/first/reports/anomaly-000030")
    policy = report.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'") and "script" not in policy
    (sample,) = page.get("/api/runs/first/samples").json()
    assert sample["answer"] == MARKUP
    answer = page.get("/api/runs/first/samples")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "script-src 'self'" in page.get("/").headers["content-security-policy"]
    for name in MODULES:  # text from runs reaches the page by textContent only
        source = page.get(f"/static/{name}").text
        assert not any(
            word in source for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(")
        )


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..", "/api/runs/../secret", "/api/runs/..%2Fsecret", "/api/runs/%2e%2e%2fsecret", "/api/runs/%00",
        "/api/runs/linked", "/api/runs/first%2F..%2F..%2Fsecret", "/api/runs//etc",
        "/api/runs/first/reports/..%2F..%2Fspec", "/api/runs/first/reports/../../secret/spec",
        "/api/runs/first/reports/linked", "/static/../app.py", "/static/..%2Fapp.py", "/static/charts",
        "/api/runs/first/checkpoints/%2E%2E%2F", "/api/runs/first/checkpoints/%2Fetc",
        "/api/runs/first/profiles/..%2F..%2Fsecret", "/api/runs/first/profiles/linked.json.gz",
        "/api/runs/first/profiles/linked.json.gz/parts", "/api/compare?runs=first|..%2Fsecret",
        "/api/stream?run=..%2Fsecret",
    ],
)  # fmt: skip
def test_no_path_leads_out(runs: Path, path: str) -> None:
    os.symlink(runs.parent / "secret", runs / "linked")
    (runs.parent / "secret" / "x.html").write_text("secret")
    os.symlink(runs.parent / "secret" / "x.html", runs / "first" / "reports" / "linked.html")
    (runs / "first" / "profiles").mkdir()
    os.symlink(runs.parent / "secret" / "x.html", runs / "first" / "profiles" / "linked.json.gz")
    answer = client(runs).get(path)
    assert answer.status_code == 404 and "secret" not in answer.text
    assert "linked" not in client(runs).get("/api/runs").text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "", "[::2]", "10.0.0.1"]
)
def test_a_forged_host_is_refused(runs: Path, host: str) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/api/stream"):
        assert client(runs).get(path, headers={"host": host}).status_code == 403
    for good in ("localhost:8800", "127.0.0.1", "[::1]:8800"):
        assert client(runs).get("/api/runs", headers={"host": good}).status_code == 200


def test_another_sites_origin_is_refused(runs: Path) -> None:
    page = client(runs, control=True)
    for origin in ("http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:81"):
        assert page.get("/api/runs", headers={"origin": origin}).status_code == 403
    assert page.get("/api/runs", headers={"origin": ORIGIN}).status_code == 200
    assert page.get("/api/runs", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    for headers in ({}, {"origin": ORIGIN}, {"x-bessemer": "1"}, {"origin": "http://evil", "x-bessemer": "1"}):
        assert page.post("/api/runs/first/control", json={"action": "stop"}, headers=headers).status_code == 403
    assert page.put("/api/runs").status_code == 405 and page.delete("/api/runs/first").status_code == 405


@pytest.mark.parametrize("token", ["", "wrong", "right2", "r", "é"])
def test_a_missing_or_wrong_token(runs: Path, token: str) -> None:
    page = client(runs, token="right", local=False)
    for path in ("/", "/static/app.js", "/api/runs", "/api/stream?run=first", "/nothing"):
        assert page.get(path).status_code == 401
        assert page.get(path, params={"token": token}).status_code == 401
        given = {"authorization": f"Bearer {token}".encode()}
        assert page.get(path, headers=given).status_code == 401
        assert page.get(path, headers={"cookie": f"bessemer-8800={token.encode().hex()}"}).status_code == 401
    headers = {"origin": ORIGIN, "x-bessemer": "1"}
    assert page.post("/api/runs/first/control?token=right", json={}, headers=headers).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(runs: Path) -> None:
    page = client(runs, token="right", local=False)
    assert page.get("/api/runs", headers={"authorization": "Bearer right"}).status_code == 200
    answer = page.get("/?run=first&token=right", headers={"host": "gpu-box:8800"})
    assert answer.status_code == 303 and answer.headers["location"] == "/?run=first"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("bessemer-8800=right;") and "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert page.get("/api/runs", headers={"cookie": "bessemer-8800=right"}).status_code == 200
    away = page.get("//evil.example/?token=right")
    assert away.headers["location"].startswith("/") and not away.headers["location"].startswith("//")


def test_oversized_and_odd_requests(runs: Path) -> None:
    page = client(runs, control=True)
    headers = {"origin": ORIGIN, "x-bessemer": "1"}
    assert page.get("/api/runs?x=" + "a" * MAX_QUERY_BYTES).status_code == 414
    assert page.get("/api/runs", headers={"x-long": "a" * 40_000}).status_code == 431
    at = "/api/runs/first/control"
    assert page.post(at, content=b"x" * (MAX_BODY_BYTES + 1), headers=headers).status_code == 413
    assert page.post(at, content=iter([b"x" * 9000, b"x" * 9000]), headers=headers).status_code == 413
    for body in (b"", b"{", b"[]", b'{"action": 3}', b'{"action": "rm"}', b'{"action": "lr", "value": "x"}'):
        assert page.post(at, content=body, headers=headers).status_code in (400, 409)
    for query in ("bins=abc", "bins=99999999999999", "from=nan", "to=x", "x=wall"):
        assert page.get(f"/api/runs/first/series?{query}").status_code == 400
    many = "|".join(f"a{i}" for i in range(600))
    assert len(page.get("/api/runs/first/series", params={"names": many}).json()["groups"][0]["series"]) == 256


def test_control_needs_the_switch_and_a_live_run(runs: Path) -> None:
    headers, body = {"origin": ORIGIN, "x-bessemer": "1"}, {"action": "save"}
    assert client(runs).post("/api/runs/first/control", json=body, headers=headers).status_code == 403
    page = client(runs, control=True)
    refused = page.post("/api/runs/first/control", json=body, headers=headers)
    assert refused.status_code == 409 and "not running" in refused.json()["error"]
    with RunWriter(runs / "live") as run:
        run.event("started", step=0, total_steps=10)
        asked = page.post("/api/runs/live/control", json={"action": "lr", "value": 0.5}, headers=headers)
        assert asked.status_code == 200
        (path,) = (runs / "live" / "control").iterdir()
        written = json.loads(path.read_text())
    assert written["action"] == "lr" and written["value"] == 0.5 and written["id"] == asked.json()["id"]
    assert written["who"].startswith("page")


def stream_messages(page: Any, path: str, count: int, act: Callable[[int], None]) -> list[tuple[str, str, Any]]:
    """Kind, id and content of messages; `act` runs after each."""

    async def read() -> list[tuple[str, str, Any]]:
        found: list[tuple[str, str, Any]] = []
        scope = {"type": "http", "method": "GET", "path": "/api/stream", "headers": [], "query_string": path.encode()}

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        response: Any = await Pages(page, False).stream(Request(scope, receive))
        async for chunk in response.body_iterator:
            lines = dict(line.partition(": ")[::2] for line in chunk.decode().splitlines() if line)
            if "event" in lines:
                found.append((lines["event"], lines.get("id", ""), json.loads(lines["data"])))
                act(len(found))
            if len(found) >= count:
                break
        return found

    return asyncio.run(read())


def test_the_stream_follows_appends_and_a_cut(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "POLL_S", 0.01)
    monkeypatch.setattr("bessemer.watch.app.POLL_S", 0.01)
    library = Library(runs)
    with RunWriter(runs / "first") as run:

        def act(number: int) -> None:
            if number == 2:
                run.step({"step": 60, "loss": 1.0})
            if number == 3:
                time.sleep(0.3)
                run.remove_metrics_from(20)

        found = [one for one in stream_messages(library, "run=first", 5, act) if one[0] == "run"]
    rows = [content["rows"] for _, _, content in found]
    assert rows[:2] == [60, 61] and rows[-1] == 20
    generations = [content["generation"] for _, _, content in found]
    assert generations[0] == generations[1] < generations[-1]
    assert all(identifier == f"{content['generation']}:{content['rows']}" for _, identifier, content in found)


def test_a_long_journal_is_sampled_until_it_is_read(
    runs: Path, new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run("long", steps=1000)
    monkeypatch.setattr(library_module, "SAMPLED_BYTES", 1000)
    page = client(runs)
    first = page.get("/api/runs/long/series?names=loss|lr").json()
    assert first["sampled"] and first["groups"][0]["x"][0] == 0 and first["groups"][0]["rows"] > 20
    give_up = time.monotonic() + 60
    while page.get("/api/runs/long/series?names=loss|lr").json()["sampled"]:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_viewers_share_answers(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(runs)
    run = library.run("first")
    computed = []
    genuine = library_module.bin_column
    monkeypatch.setattr(library_module, "bin_column", lambda *given: computed.append(1) or genuine(*given))
    answers = [run.series(["loss", "lr"], "step", None, None, 100) for _ in range(100)]
    assert len(computed) == 3 and all(answer is answers[0] for answer in answers)  # x, loss, lr


def test_a_run_opened_by_its_own_folder(runs: Path) -> None:
    library, name = open_library(runs / "first")
    assert name == "first" and library.root == runs.resolve()


def test_the_export_holds_everything_and_no_markup_of_the_run(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "first.html"
    size = export_run([runs / "first", runs / "second run"], out)
    text = out.read_text()
    assert size == len(text.encode()) and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script>window" not in text and "src=" not in text.split('id="export"')[0].split("<body>")[1]
    data = json.loads(text.split('<script type="application/json" id="export">')[1].split("</script>")[0])
    series = data["answers"]["runs/first/series?step"]["groups"][0]["series"]
    assert len(series["loss"]["mean"]) == 60 and MARKUP in data["reports"]["first/anomaly-000030"]
    assert data["answers"]["runs/second%20run"]["name"] == "second run"
    assert not any(isinstance(value, float) and math.isnan(value) for value in series["loss"]["mean"])


def test_a_damaged_run_is_still_shown(runs: Path, new_run: Callable[..., Run]) -> None:
    run = new_run("damaged")
    (run.folder / "plan.json").write_text("{")
    (run.folder / "spec.yaml").write_text("a: [")
    run.steps_path.write_bytes(b"\0\0\n{}\n[1]\n" + run.steps_path.read_bytes()[:-7])
    with run.events_path.open("a") as file:
        file.write('{"kind": "veto"}\n{"kind": 3}\nnull\n')
    page = client(runs)
    assert page.get("/api/runs/damaged").json()["decisions"] == []
    assert page.get("/api/runs/damaged/events").status_code == 200
    assert page.get("/api/runs/damaged/series?names=loss").json()["rows"] == 60  # {} is a record, the torn one is not
    assert page.get("/api/compare?runs=damaged|first").status_code == 200
