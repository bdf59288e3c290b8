"""The rewards of reinforcement learning: functions, verifiers, reward models and judges, each with a weight."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from bessemer.spec.quantity import Bytes, Seconds, ShortSection, SpecSection, check_url, setting

VerifierName = Literal["exact", "math", "regex", "json", "code"]
VERIFIERS: tuple[str, ...] = get_args(VerifierName)
KINDS = ("function", "verifier", "model", "judge")
RewardName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")]
# Which reward reads a setting besides `weight`.
_READ_BY = {
    "column": ("exact", "math", "code"), "extract": ("exact", "math", "json"), "strict": ("exact",),
    "pattern": ("regex",), "json_schema": ("json",), "tests": ("code",), "time": ("code",), "memory": ("code",),
    "isolation": ("code",), "packages": ("code",),
}  # fmt: skip


class EndpointSpec(SpecSection):
    """A model behind an API that follows OpenAI's chat completions."""

    url: str = setting(..., "base URL, without /chat/completions", "http://localhost:8000/v1")
    model: str = setting(..., "name of the model at the endpoint", "my-judge")
    key_env: str | None = setting(None, "environment variable with the key, which is written nowhere", "JUDGE_API_KEY")
    temperature: float = setting(0.0, "sampling temperature", 0.7, ge=0, le=100)
    max_tokens: int = setting(512, "longest answer, in tokens", 512, ge=1, le=10**7)
    parallel: int = setting(8, "requests at the same time", 8, ge=1, le=1024)
    timeout: Seconds = setting(60.0, "timeout of a request", "60s", gt=0)
    retries: int = setting(5, "retries after 429, 5xx, no answer or no connection", 5, ge=0, le=100)

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        check_url(value, "http://localhost:8000/v1")
        if not value.startswith(("http://", "https://")):
            raise ValueError("write http://... or https://...")
        return value.rstrip("/").removesuffix("/chat/completions")


class JudgeSpec(EndpointSpec):
    """A judge that reads a rubric and grades answers."""

    rubric: str = setting(..., "text file that tells the judge what to grade; read at the start", "rubric.md")
    lowest: float = setting(0.0, "grade that is reward 0", 1.0, ge=-1e6, le=1e6)
    highest: float = setting(10.0, "grade that is reward 1", 5.0, ge=-1e6, le=1e6)
    against: str | None = setting(
        None, "column with an answer to compare with, in both orders: reward 1, 0.5 or 0 instead of a grade", "chosen"
    )

    @model_validator(mode="after")
    def _ordered(self) -> JudgeSpec:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest:g} is not below highest {self.highest:g}")
        return self


class RewardSpec(ShortSection):
    """One part of the reward: exactly one of function, verifier, model and judge. `exact` is short for `verifier:
    exact`, and `file.py:name` for `function: file.py:name`."""

    function: str | None = setting(
        None, "your own f(prompts, completions, **columns) -> list of numbers: file.py:name or module:name", "r.py:f"
    )
    verifier: VerifierName | None = setting(None, "exact, math, regex, json or code", "math")
    model: str | None = setting(None, "folder of a reward model", "runs/reward-model")
    judge: JudgeSpec | None = setting(
        None, "a model behind an endpoint", {"url": "http://localhost:8000/v1", "model": "judge", "rubric": "rubric.md"}
    )
    weight: float = setting(1.0, "factor in the sum of rewards", 0.5, ge=-1e6, le=1e6)
    column: str = setting("answer", "exact, math: column with the right answer; code: with the tests", "solution")
    extract: str | None = setting(
        None, "regular expression; what its last match (or group) holds is checked, not the text", r"#### (.+)"
    )
    strict: bool = setting(False, "exact: compare case, spaces and quotes too", True)
    pattern: str | None = setting(None, "regex: what the answer must contain; a dot matches line ends", "^<a>.+</a>$")
    json_schema: dict[str, Any] | str | None = setting(
        None, "json: JSON schema that the answer must follow, or a file with it", {"type": "object"}
    )
    tests: Literal["all", "share"] = setting(
        "all", "code: all (1 if every test passes) or share (of tests that pass)", "share"
    )
    time: Seconds = setting(5.0, "code: processor time that the tests of an answer may take", "5s", gt=0, le=3600)
    memory: Bytes = setting(512 * 2**20, "code: memory limit", "512MiB")
    packages: bool = setting(False, "code: answers may import installed packages, not only Python's library", True)
    isolation: Literal["required", "limits"] = setting(
        "required", "code: refuse machines that cannot isolate processes, or run with limits only", "limits"
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if ":" in value:
            return {"function": value}
        if value in VERIFIERS:
            return {"verifier": value}
        near = difflib.get_close_matches(value, VERIFIERS, 1)
        wrote = f"did you mean {near[0]}?" if near else f"write {', '.join(VERIFIERS)}, or file.py:name"
        raise ValueError(f"no verifier {value!r}; {wrote}")

    @field_validator("function")
    @classmethod
    def _names_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", value):
            raise ValueError(f"{value!r} names no function: write file.py:name or module:name")
        return value

    @field_validator("extract", "pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression ({error}): {value!r}; escape special characters") from None
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> RewardSpec:
        kinds = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            problem = f"{' and '.join(kinds)} are set" if kinds else "it has no kind"
            raise ValueError(f"{problem}: write one of {', '.join(KINDS)}, such as verifier: exact")
        for key, readers in _READ_BY.items():
            if self.verifier not in readers and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is of verifier {' or '.join(readers)}: remove it")
        if self.verifier == "regex" and self.pattern is None:
            raise ValueError("verifier regex needs pattern, such as pattern: '<answer>.+</answer>'")
        return self

    def columns_read(self) -> list[tuple[str, str]]:
        """The setting and the column of each value that the reward reads from a row, but for a user's function."""
        columns = [("column", self.column)] if self.verifier in _READ_BY["column"] else []
        against = self.judge.against if self.judge else None
        return columns + ([("judge.against", against)] if against else [])


Rewards = dict[RewardName, RewardSpec]
