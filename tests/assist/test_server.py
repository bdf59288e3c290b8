"""The server by the official client: refusals, questions to a person, resources, the token; and a run end to end."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import anyio
import pytest

from bessemer.assist.access import Permission
from bessemer.cli.assist import all_verbs

from .conftest import environment, over_stdio

pytest.importorskip("mcp")
import httpx2
import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from bessemer.assist.server import Assistant
from bessemer.assist.transport import check_token
from bessemer.errors import UserError

TOKEN = "a-token-of-enough-length"


@contextmanager
def assistant(project: Path, *allow: str) -> Iterator[Assistant]:
    made = Assistant(all_verbs(), project, Permission.parse(list(allow)))
    try:
        yield made
    finally:
        made.close()


def text_of(result: Any) -> str:
    return result.content[0].text


def test_reading_only(project: Path) -> None:
    """Tools, hints, refusals and errors; the answer of a tool is what the verb prints."""

    async def use() -> None:
        with assistant(project) as made:
            async with Client(made.server()) as client:
                tools = {tool.name: tool for tool in (await client.list_tools()).tools}
                assert tools["spec_check"].annotations.read_only_hint and not tools["train"].annotations.read_only_hint
                assert (
                    tools["train"].annotations.destructive_hint
                    and "wait_s" in tools["train"].input_schema["properties"]
                )
                for name, arguments in (
                    ("train", {"spec": "tiny.yaml"}),
                    ("checkpoints_prune", {"run": "runs/tiny"}),
                    ("plan_run", {"spec": "tiny.yaml", "write": "new.yaml"}),
                    ("launch_submit", {"spec": "tiny.yaml", "on": "slurm"}),
                ):
                    refused = await client.call_tool(name, arguments)
                    assert refused.is_error and "not allowed" in text_of(refused), name
                outside = await client.call_tool("spec_check", {"spec": "../other.yaml"})
                assert outside.is_error and "is outside" in text_of(outside)
                assert not made.jobs.jobs, "nothing was started"
                answer = await client.call_tool("spec_check", {"spec": "tiny.yaml"})
                assert not answer.is_error and answer.structured_content["run"] == "tiny"
                command = [sys.executable, "-m", "bessemer", "spec", "check", "tiny.yaml", "--json"]
                printed = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True)
                assert text_of(answer) == printed.stdout.strip()
                missing = await client.call_tool("runs_metrics", {"run": "runs/tiny"})
                assert missing.is_error and "not a run" in text_of(missing)
                assert (await client.call_tool("nonsense", {})).is_error

    anyio.run(use)
    assert sorted(path.name for path in project.iterdir()) == ["data", "tiny.yaml"]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("action", ["accept", "decline"])
def test_a_person_is_asked(project: Path, mode: str, action: str) -> None:
    questions = []

    async def answer(_: object, params: types.ElicitRequestFormParams) -> types.ElicitResult:
        questions.append(params.message)
        return types.ElicitResult(action=action, content={"allow": True} if action == "accept" else None)

    async def use() -> None:
        with assistant(project, "ask") as made:
            async with Client(made.server(), mode=mode, elicitation_callback=answer) as client:
                result = await client.call_tool("new", {"kind": "endpoint", "folder": "shop"})
                assert result.is_error == (action == "decline"), text_of(result)
            async with Client(made.server(), mode=mode) as unable:
                assert "not allowed" in text_of(await unable.call_tool("new", {"kind": "endpoint", "folder": "other"}))

    anyio.run(use)
    assert len(questions) == 1 and "bessemer new --json endpoint shop" in questions[0]
    assert (project / "shop" / "README.md").exists() == (action == "accept")
    assert not (project / "other").exists()


def test_resources(project: Path) -> None:
    async def use() -> None:
        with assistant(project) as made:
            async with Client(made.server()) as client:
                uris = {str(each.uri) for each in (await client.list_resources()).resources}
                assert {"bessemer://runs", "bessemer://docs/guide", "bessemer://docs/verbs"} <= uris
                for uri, part in (
                    ("verbs", "## bessemer runs metrics"),
                    ("configuration", "optimizer"),
                    ("guide", "#"),
                ):
                    page = (await client.read_resource(f"bessemer://docs/{uri}")).contents[0]
                    assert part in page.text
                for uri in ("bessemer://docs/../../etc/passwd", "bessemer://runs/../..", "bessemer://other"):
                    with pytest.raises(Exception, match=r"no such|outside"):
                        await client.read_resource(uri)

    anyio.run(use)


def test_the_token_that_an_address_needs() -> None:
    assert check_token("0.0.0.0", TOKEN) == TOKEN
    assert len(check_token("127.0.0.1", "")) > 20
    for host, token, message in (("0.0.0.0", "", "set a token"), ("127.0.0.1", "short", "too short")):
        with pytest.raises(UserError, match=message):
            check_token(host, token)


@contextmanager
def http_server(project: Path, *options: str) -> Iterator[str]:
    """The address of a server in a process."""
    command = [sys.executable, "-m", "bessemer", "mcp", "--http", "--port", "0", "--root", str(project), *options]
    variables = {**os.environ, **environment(BESSEMER_MCP_TOKEN=TOKEN)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert TOKEN not in line
        yield re.search(r"http://\S+", line)[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@asynccontextmanager
async def connected(kind: str, project: Path, *options: str) -> AsyncIterator[Client]:
    if kind == "stdio":
        async with Client(over_stdio(project, *options)) as client:
            yield client
        return
    with http_server(project, *options) as address:
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401)):
            request = urllib.request.Request(address, b"{}", {"Content-Type": "application/json", **headers})
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == status
        foreign = {"Authorization": f"Bearer {TOKEN}", "Host": "evil.example", "Content-Type": "application/json"}
        with pytest.raises(HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(address, b"{}", foreign))
        assert refused.value.code == 421
        http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120)
        async with http, Client(streamable_http_client(address, http_client=http)) as client:
            yield client


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_a_run_end_to_end(project: Path, kind: str) -> None:
    """Plan, launch, watch, diagnose, report; with permission to run, but not outside the folder."""

    async def use() -> None:
        async with connected(kind, project, "--allow", "run") as client:
            plan = await client.call_tool("plan_run", {"spec": "tiny.yaml", "gpus": "1xH100"})
            assert not plan.is_error and plan.structured_content, text_of(plan)
            lines: list[str] = []

            async def progress(done: float, total: float | None, message: str | None) -> None:
                lines.append(message or "")

            started = await client.call_tool("train", {"spec": "tiny.yaml", "wait_s": 0.2}, progress_callback=progress)
            job = started.structured_content["job"]
            assert started.structured_content["state"] == "running"
            refused = await client.call_tool("train", {"spec": "tiny.yaml", "set": ["runs=/elsewhere"]})
            assert refused.is_error and "is outside" in text_of(refused)
            listed = (await client.call_tool("jobs", {})).structured_content["result"]
            assert job in [each["job"] for each in listed]
            trained = await client.call_tool("job", {"job": job, "wait_s": 300}, progress_callback=progress)
            assert trained.structured_content["state"] == "finished", text_of(trained)
            assert any("step" in line or "plan" in line for line in lines), lines
            seen = (await client.call_tool("runs_list", {"folder": "runs"})).structured_content["result"]
            assert [(run["name"], run["step"]) for run in seen] == [("tiny", 30)]
            metrics = (await client.call_tool("runs_metrics", {"run": "runs/tiny", "names": "loss"})).structured_content
            losses = [row["loss"] for row in metrics["rows"]]
            assert len(losses) == 30 and losses[-1] < losses[0] and metrics["summary"]["loss"]["nonfinite"] == 0
            saved = (await client.call_tool("checkpoints_list", {"run": "runs/tiny"})).structured_content["result"]
            assert saved and saved[-1]["step"] == 30
            diagnosed = await client.call_tool("diagnose", {"paths": ["runs/tiny"], "wait_s": 120})
            findings = diagnosed.structured_content["findings"]
            assert diagnosed.structured_content["read"] and not [f for f in findings if f["severity"] == "critical"]
            report = await client.call_tool("report", {"run": "runs/tiny", "wait_s": 120})
            assert not report.is_error and "tiny" in text_of(report)
            resource = (await client.read_resource("bessemer://runs/tiny")).contents[0]
            assert json.loads(resource.text)[0]["name"] == "tiny"

    anyio.run(use)
