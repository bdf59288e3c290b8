"""The MCP server: the verbs as tools, runs and docs as resources. A tool answers with the JSON of its verb's --json.

Built on the low-level server of the official SDK, because schemas come from the command line, not from functions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from bessemer import __version__
from bessemer.assist.access import TOOLS, Level, Permission, check_paths, needed_level, refusal
from bessemer.assist.jobs import VerbAnswer, VerbJob, VerbJobs
from bessemer.assist.pages import DocsPages
from bessemer.assist.verbs import Verb
from bessemer.errors import UserError
from bessemer.run.directory import list_runs

WAIT_S, LONGEST_WAIT_S = 30.0, 600.0
QUESTION = "allow"  # the key of the question that a person answers
RUN_PARTS = {"": "runs list", "/lineage": "checkpoints lineage", "/checkpoints": "checkpoints list"}
INSTRUCTIONS = """Bessemer plans, trains, guards and explains LLM training runs. Check a spec (spec_check) and plan it
(plan_run) before you train. train answers with a job when it takes long: poll job, or read the run with runs_list and
runs_metrics. Calls above the server's permission are refused: tell the user the command instead of working around it.
All paths are relative to the server's folder. Read bessemer://docs/guide first, bessemer://docs/configuration for the
keys of a spec."""
_WAIT = {
    "type": "number", "minimum": 0, "maximum": LONGEST_WAIT_S, "default": WAIT_S,
    "description": "Seconds to wait for the answer. A verb that takes longer becomes a background job.",
}  # fmt: skip
_JOB = {"type": "string", "description": "A job such as job-1."}
Context = ServerRequestContext[Any, Any]


class Assistant:
    """The handlers of the server. `close()` ends its jobs."""

    def __init__(self, verbs: Sequence[Verb], root: Path, permission: Permission) -> None:
        self.root, self.permission = root.resolve(), permission
        self.verbs = {verb.tool_name: verb for verb in verbs if verb.path in TOOLS and verb.answers_json}
        self.jobs = VerbJobs(self.root)
        self.pages = DocsPages(verbs)
        self.close = self.jobs.close

    def server(self) -> Server[Any]:
        return Server(
            "bessemer", version=__version__, title="Bessemer", instructions=INSTRUCTIONS,
            on_list_tools=self.list_tools, on_call_tool=self.call_tool, on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates, on_read_resource=self.read_resource,
        )  # fmt: skip

    async def list_tools(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        tools = [_tool(verb) for verb in self.verbs.values()]
        job = {"type": "object", "properties": {"job": _JOB, "wait_s": _WAIT}, "required": ["job"]}
        read_only, cancels = types.ToolAnnotations(read_only_hint=True), types.ToolAnnotations(destructive_hint=True)
        tools += [
            types.Tool(name="job", description="The state of a background job, or its answer once it has finished.",
                       input_schema=job, annotations=read_only),
            types.Tool(name="jobs", description="All background jobs of this server.",
                       input_schema={"type": "object", "properties": {}}, annotations=read_only),
            types.Tool(name="job_cancel", description="End a background job. Training saves a checkpoint first.",
                       input_schema={"type": "object", "properties": {"job": _JOB}, "required": ["job"]},
                       annotations=cancels),
        ]  # fmt: skip
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        try:
            return await self._call(context, params, dict(params.arguments or {}))
        except UserError as error:
            return _failure(str(error))

    async def _call(
        self, context: Context, params: types.CallToolRequestParams, arguments: dict[str, Any]
    ) -> types.CallToolResult | types.InputRequiredResult:
        if params.name == "jobs":
            return _success([job.to_json() for job in self.jobs.jobs.values()])
        wait_s = _seconds(arguments.pop("wait_s", WAIT_S))
        if params.name in ("job", "job_cancel"):
            job = self.jobs.get(str(arguments.get("job", "")))
            if params.name == "job":
                return await self._answer(context, job, wait_s)
            if (asked := await self._permit(context, params, job.level, f"Cancel {job.verb} ({job.id})?")) is not None:
                return asked
            self.jobs.cancel(job)
            return _success(job.to_json())
        if (verb := self.verbs.get(params.name)) is None:
            raise UserError(f"{params.name}: no such tool; there are {', '.join(self.verbs)}")
        words = verb.command(arguments)
        check_paths(arguments, self.root)
        level = needed_level(verb.path, arguments)
        question = f"Run this in {self.root}?\nbessemer {' '.join(words)}"
        if (asked := await self._permit(context, params, level, question)) is not None:
            return asked
        return await self._answer(context, self.jobs.start(verb.path, level, words), wait_s)

    async def _answer(self, context: Context, job: VerbJob, wait_s: float) -> types.CallToolResult:
        answer = await self.jobs.wait(job, wait_s, context.session.report_progress)
        if answer is None:
            return _success(job.to_json() | {"next": f"call the tool job with job={job.id}"})
        return _finished(answer)

    async def _permit(
        self, context: Context, params: types.CallToolRequestParams, level: Level, question: str
    ) -> types.CallToolResult | types.InputRequiredResult | None:
        """None if the call is allowed, by the server's start or by a person; else what to answer instead."""
        if level <= self.permission.level:
            return None
        refused = _failure(refusal(params.name, level))
        capabilities = context.session.client_capabilities
        if not self.permission.ask or capabilities is None or capabilities.elicitation is None:
            return refused
        schema: Any = {"type": "object", "properties": {QUESTION: {"type": "boolean", "title": "Run it"}},
                       "required": [QUESTION]}  # fmt: skip
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            result: Any = await context.session.elicit_form(question, schema, context.request_id)
        elif (result := (params.input_responses or {}).get(QUESTION)) is None or params.request_state != question:
            form = types.ElicitRequestFormParams(message=question, requested_schema=schema)
            request = types.ElicitRequest(params=form)
            return types.InputRequiredResult(input_requests={QUESTION: request}, request_state=question)
        accepted = isinstance(result, types.ElicitResult) and result.action == "accept"
        return None if accepted and (result.content or {}).get(QUESTION) is True else _failure("the user declined")

    async def list_resources(self, _: Context, __: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        resources = [types.Resource(uri="bessemer://runs", name="runs", mime_type="application/json",
                                    description="All runs with state, step and loss.")]  # fmt: skip
        resources += [
            types.Resource(uri=f"bessemer://runs/{run.name}", name=run.name, mime_type="application/json")
            for run in list_runs(self.root / "runs")
        ]
        resources += [
            types.Resource(uri=f"bessemer://docs/{name}", name=name, mime_type="text/markdown", description=title)
            for name, title in self.pages.titles().items()
        ]
        return types.ListResourcesResult(resources=resources)

    async def list_templates(
        self, _: Context, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        templates = [
            types.ResourceTemplate(uri_template=f"bessemer://runs/{{name}}{part}", name=verb,
                                   mime_type="application/json")
            for part, verb in RUN_PARTS.items()
        ]  # fmt: skip
        return types.ListResourceTemplatesResult(resource_templates=templates)

    async def read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        kind, _, rest = uri.removeprefix("bessemer://").partition("/")
        try:
            if kind == "docs":
                return _resource(uri, "text/markdown", self.pages.text(rest))
            if kind == "runs":
                name, slash, part = rest.partition("/")
                if slash + part in RUN_PARTS:
                    text = await self._verb_text(RUN_PARTS[slash + part], f"runs/{name}" if name else "runs")
                    return _resource(uri, "application/json", text)
        except UserError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        raise MCPError(types.INVALID_PARAMS, f"{uri}: no such resource")

    async def _verb_text(self, path: str, folder: str) -> str:
        verb = next(verb for verb in self.verbs.values() if verb.path == path)
        arguments = {next(each.name for each in verb.parameters if not each.flag): folder}
        check_paths(arguments, self.root)
        job = self.jobs.start(path, Level.READ, verb.command(arguments))

        async def quiet(*_: object) -> None: ...

        answer = await self.jobs.wait(job, LONGEST_WAIT_S, quiet)
        if answer is None or answer.value is None:
            raise UserError(answer.error if answer else f"{folder}: did not answer")
        return answer.text


def _tool(verb: Verb) -> types.Tool:
    level, schema = TOOLS[verb.path], verb.schema()
    schema["properties"] = schema["properties"] | {"wait_s": _WAIT}
    needs = "" if level is Level.READ else f" Needs the permission `{'run' if level is Level.RUN else 'write'}`."
    hints = types.ToolAnnotations(read_only_hint=level is Level.READ, destructive_hint=level is Level.RUN)
    return types.Tool(
        name=verb.tool_name, title=f"bessemer {verb.path}", description=verb.summary + needs, input_schema=schema,
        annotations=hints,
    )  # fmt: skip


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_WAIT_S:
        raise UserError(f"wait_s: {value!r}: write a number from 0 to {LONGEST_WAIT_S:g}")
    return float(value)


def _structured(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"result": value}


def _success(value: Any) -> types.CallToolResult:
    text = types.TextContent(text=json.dumps(value, indent=1, ensure_ascii=False))
    return types.CallToolResult(content=[text], structured_content=_structured(value))


def _failure(message: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


def _finished(answer: VerbAnswer) -> types.CallToolResult:
    """The verb's JSON as it printed it. An exit code of 1 with an answer is a result, such as problems in the data."""
    if answer.value is None:
        return _failure(answer.error or f"exit code {answer.code} without an answer")
    content: list[Any] = [types.TextContent(text=answer.text)]
    if answer.code:
        content.append(types.TextContent(text=f"exit code {answer.code}: {answer.error}".rstrip(": ")))
    return types.CallToolResult(
        content=content, structured_content=_structured(answer.value), is_error=answer.code not in (0, 1)
    )


def _resource(uri: str, kind: str, text: str) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=kind, text=text)])
