"""The page of blind votes: the same votes as in the terminal, and nobody else's pages or host names."""

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn

from bessemer.align.vote import Ballot, Tally
from bessemer.serve.server import listen
from bessemer.serve.vote import make_vote_app

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
ROWS = [
    {"number": n, "prompt": f"prompt {n} {MARKUP}", "a": "same" if n == 2 else f"good {n} {MARKUP}",
     "b": "same" if n == 2 else f"bad {n}", "models": ["x", "y"]}
    for n in range(5)
]  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Iterator[SimpleNamespace]:
    votes, listener = tmp_path / "votes.jsonl", listen("127.0.0.1", 0)
    app = make_vote_app(Ballot(votes, ROWS, "anna"))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield SimpleNamespace(url=f"http://127.0.0.1:{listener.getsockname()[1]}", votes=votes)
    server.should_exit = True
    thread.join()


def call(url: str, body: object = None, **headers: str) -> tuple[int, dict, dict]:
    data = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent), timeout=10) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else {"html": text}, dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)


def test_votes_become_pairs_and_resume(page: SimpleNamespace) -> None:
    _, row, _ = call(f"{page.url}/api/row")
    seen = []
    while row["left"]:
        assert set(row) == {"left", "voter", "number", "position", "prompt", "answers"}  # no names of models
        seen.append(row["answers"][0].startswith("good"))
        choice = "first" if row["answers"][0].startswith("good") else "second"
        if len(seen) == 3:
            again = Ballot(page.votes, ROWS, "anna")
            assert again.next() is not None and again.next()["number"] == row["number"]  # type: ignore[index]
        status, row, _ = call(f"{page.url}/api/vote", {"number": row["number"], "choice": choice})
        assert status == 200
    assert len(seen) == 4  # equal answers are not asked
    tally = Tally.of([page.votes])
    assert tally.wins == (4, 0) and tally.to_json()["votes"]["tie"] == 1
    assert {pair["chosen"].split()[0] for pair in tally.pairs()} == {"good"}


def test_the_page_refuses_strangers(page: SimpleNamespace) -> None:
    _, row, _ = call(f"{page.url}/api/row")
    vote = {"number": row["number"], "choice": "first"}
    assert call(f"{page.url}/api/vote", vote, Host="evil.example")[0] == 403
    status, body, _ = call(f"{page.url}/api/vote", vote, Content_Type="text/plain")  # as a page of another origin can
    assert status == 400 and "send Content-Type: application/json" in body["error"]["message"]
    assert call(f"{page.url}/api/vote", {**vote, "number": row["number"] + 1})[0] == 409
    assert call(f"{page.url}/api/vote", {**vote, "choice": "a"})[0] == 422
    assert not page.votes.exists() or all(json.loads(line)["vote"] == "tie" for line in page.votes.open())
    _, body, headers = call(page.url)
    assert "default-src 'none'" in headers["content-security-policy"] and "good" not in body["html"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None or shutil.which("npm") is None, reason="needs Chromium and npm")
def test_the_page_in_chromium(page: SimpleNamespace, tmp_path: Path) -> None:
    script = shutil.copy(Path(__file__).with_name("vote_test.mjs"), tmp_path)
    for command in (["npm", "install", "--no-audit", "--no-fund", "playwright-core"],
                    ["node", script, page.url, CHROMIUM]):  # fmt: skip
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    assert Tally.of([page.votes]).to_json()["votes"] == {"a": 2, "b": 0, "tie": 2, "skip": 1}
