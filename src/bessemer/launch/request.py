"""Request: where a run is to go and on what. Every target writes its files from one of these.

No secret in a generated file: known forms of tokens, and the values of this environment's own secrets.

A finding names file, line and kind, never the secret. Keys reach a run through the environment, `.env`, or the target's
store of secrets, by name.
"""

from __future__ import annotations

import math
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from bessemer.errors import UserError
from bessemer.plan.search.layout import data_ranks
from bessemer.plan.search.replicas import check_processes
from bessemer.spec.quantity import parse_duration
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

# What each target can be told, beyond nodes, GPUs and restarts. An option of another target is refused, not ignored.
TAKES = {
    "slurm": {"cpus", "memory", "time", "gpu_type", "image", "python", "partition", "account", "qos", "array"},
    "kubernetes": {"cpus", "memory", "time", "image", "python", "namespace", "volume", "secret", "min_nodes"},
    "sky": {"cpus", "memory", "gpu_type", "image", "python", "install", "cloud", "volume", "on_demand"},
    "modal": {"cpus", "memory", "time", "gpu_type", "image", "install", "volume", "secret"},
    "ssh": {"hosts", "python"},
    "local": {"python"},
}
CPUS_PER_GPU = 8
MODAL_GPUS = 8  # Modal joins whole machines
# Written into lines and comments as they are: a space or a quote would begin something else there.
UNQUOTED = ("gpu_type", "partition", "account", "qos", "namespace", "volume", "secret", "cloud")
ARRAY_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)


@dataclass(frozen=True)
class LaunchRequest:
    """What was asked for. Empty strings are what the target decides itself."""

    spec: RunSpec
    on: str
    nodes: int = 1
    gpus: int = 1  # of each node; 0: one process on the CPU
    max_restarts: int = 3
    cpus: int = 0  # of each node; 0: a few for each GPU
    memory: str = ""
    time: str = ""
    gpu_type: str = ""
    image: str = ""
    python: str = ""
    install: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    array: str = ""
    namespace: str = ""
    volume: str = ""
    secret: str = ""
    min_nodes: int = 0
    cloud: str = ""
    on_demand: bool = False
    hosts: tuple[str, ...] = ()
    workdir: str = ""  # where the command is run: relative paths of the spec start there

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def folder(self) -> Path:
        """Where its files go, on this machine."""
        return (Path(self.spec.runs) / self.name / "launch").absolute()

    @property
    def processes(self) -> int:
        return max(1, self.gpus)

    @property
    def seconds(self) -> int | None:
        return int(parse_duration(self.time)) if self.time else None

    @property
    def cpus_wanted(self) -> int:
        return self.cpus or CPUS_PER_GPU * self.gpus or 1

    @property
    def interpreter(self) -> str:
        """This very one where the nodes share our file system, the image's own elsewhere."""
        shared = self.on in ("slurm", "ssh", "local") and not self.image
        return self.python or (sys.executable if shared else "python3")

    @property
    def port(self) -> int:
        """Of the rendezvous, where no job number can make it this run's own."""
        return 20000 + zlib.crc32(self.name.encode()) % 10000

    @property
    def label(self) -> str:
        """The name as Kubernetes and the clouds allow it: lower case, digits and dashes."""
        kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name.lower())
        return kept.strip("-")[:50].strip("-") or "run"


def _check_text(request: LaunchRequest) -> None:
    """No option may begin a second line, or a second option, in a file that is written from it."""
    options = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "workdir"}
    texts = {f"--{name.replace('_', '-')}": text for name, text in options.items() if isinstance(text, str)}
    texts |= {"--hosts": "".join(request.hosts), "runs": str(request.folder)}
    texts["the folder you launch from"] = request.workdir or str(Path.cwd())
    for option, text in texts.items():
        if not text.isprintable():
            raise UserError(f"{option} {text!r}: holds a line break or another control character; remove it")
    names = (*UNQUOTED, "memory") if request.on == "slurm" else UNQUOTED
    for name in names:
        if found := re.search(r"[\s'\"`\\#$;]", text := getattr(request, name)):
            raise UserError(f"--{name.replace('_', '-')} {text!r}: must not hold {found[0]!r}; remove it")


def _check_time(time: str) -> None:
    try:
        seconds = parse_duration(time)
    except ValueError as error:
        raise UserError(f"--time: {error}") from None
    if seconds < 1:
        raise UserError(f"--time {time}: leaves no time to train: write such as 24h, or leave it out for no limit")


def _check_array(array: str) -> None:
    """Slurm's own form: numbers and ranges FIRST-LAST[:STEP] with commas, and %N for N at a time."""
    tasks, percent, at_once = array.partition("%")
    valid = not percent or (at_once.isascii() and at_once.isdecimal() and int(at_once) > 0)
    for part in tasks.split(","):
        found = ARRAY_PART.fullmatch(part)
        valid = valid and found is not None and int(found[3] or 1) > 0
        if found and found[2] and int(found[2]) < int(found[1]):
            raise UserError(f"--array {array}: {part} ends before it begins: write the smaller number first")
    if not valid:
        raise UserError(f"--array {array}: write such as 0-3, 0,2,5 or 0-15%4 (4 at a time)")


def _model_shape(spec: RunSpec) -> ModelShape | None:
    """The shape of `model.hf`, where its folder is on this machine."""
    if spec.model.hf is None:
        return None
    from bessemer.session.start import open_source  # imports torch

    source = open_source(spec)
    return source.shape if source else None


def _check_layout(request: LaunchRequest) -> None:
    """Refuse now what training would refuse after the wait in a queue."""
    hf = request.spec.model.hf
    if hf is not None and not (Path(hf).expanduser() / "config.json").is_file():
        return  # it lies where the run goes: training checks it there
    given, least = _model_shape(request.spec), request.min_nodes or request.nodes
    for nodes in range(least, request.nodes + 1):
        try:
            check_processes(request.spec, given, nodes * request.processes)
        except UserError as fault:
            allowed = f" (on {nodes} nodes, which --min-nodes {least} allows)" if nodes < request.nodes else ""
            raise UserError(f"{fault}{allowed}") from None


def idle_note(request: LaunchRequest) -> str:
    """A word on processes that get no row of a step, where the spec tells; training lets them wait."""
    batch, context = request.spec.budget.batch, request.spec.data.context
    ranks = data_ranks(request.spec.parallel, request.nodes * request.processes)
    if not isinstance(batch, int) or not isinstance(context, int) or ranks <= (rows := max(1, round(batch / context))):
        return ""
    return (
        f"note     a step has {rows} rows for {ranks} data-parallel processes: {ranks - rows} of them have nothing to "
        f"compute; raise budget.batch to {ranks * context}, or use fewer GPUs"
    )


def check(request: LaunchRequest) -> LaunchRequest:
    """The request with its defaults filled in; UserError for what the target cannot do or still needs."""
    on, takes = request.on, TAKES.get(request.on)
    if takes is None:
        raise UserError(f"--on {on or 'missing'}: write --on {', '.join(list(TAKES)[:-1])} or {list(TAKES)[-1]}")
    asked = {option for options in TAKES.values() for option in options if getattr(request, option)}
    for option in sorted(asked - takes):
        owners = " and ".join(target for target, options in TAKES.items() if option in options)
        raise UserError(f"--{option.replace('_', '-')}: {on} has no such thing; it is for {owners}")
    _check_text(request)
    if request.time:
        _check_time(request.time)
    if request.array:
        _check_array(request.array)
    needs = {
        "kubernetes": [
            ("image", "--image IMAGE, a container image with Bessemer in it"),
            ("volume", "--volume CLAIM, a PersistentVolumeClaim that holds data and runs"),
        ],
        "ssh": [("hosts", "--hosts HOST[,HOST...], which share this folder")],
        "sky": []
        if request.image
        else [("install", "--install WHAT (a URL or name that pip takes there), or --image")],
        "modal": []
        if request.image
        else [("install", "--install WHAT (a URL or name that pip takes there), or --image")],
    }.get(on, [])
    if on in ("sky", "modal") and request.gpus:
        needs = [("gpu_type", "--gpu-type, such as H100"), *needs]
    for option, how in needs:
        if not getattr(request, option):
            raise UserError(f"--on {on} needs {how}")
    if on == "local" and request.nodes != 1:
        raise UserError(f"--nodes {request.nodes}: a local queue has one node; use --on slurm or ssh for several")
    if on == "modal" and request.nodes > 1 and request.gpus != MODAL_GPUS:
        raise UserError(
            f"--gpus {request.gpus}: with --nodes {request.nodes} Modal joins whole machines: "
            f"write --gpus {MODAL_GPUS}, or --nodes 1"
        )
    if on == "sky" and request.nodes > 1 and not request.volume:
        raise UserError("--on sky --nodes: several nodes need a bucket for their checkpoints: --volume s3://BUCKET")
    if request.min_nodes > request.nodes:
        raise UserError(f"--min-nodes {request.min_nodes} is more than --nodes {request.nodes}")
    if on == "ssh":
        for host in request.hosts:
            if not re.fullmatch(r"[\w.@-]+", host) or host.startswith("-"):
                raise UserError(f"--hosts {host}: write a name or user@name; ports belong into ~/.ssh/config")
        names = [host.rpartition("@")[2].lower() for host in request.hosts]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--hosts: {name} is named {names.count(name)} times; name each machine once")
        request = replace(request, nodes=len(request.hosts))
    _check_layout(request)
    return request if request.workdir else replace(request, workdir=str(Path.cwd()))


# The keys that targets hand on by name; .env.example says how to get each.
KEYS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

PATTERNS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_secret_access_key[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+]{40}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "an API key that begins with sk-": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a Modal token": r"\ba[ks]-[A-Za-z0-9]{20,}\b",
    "a W&B key": r"(?i)\b(?:wandb[a-z_]*key|api_key)[\"']?\s*[:=]\s*[\"']?(?:[0-9a-f]{40}\b|wandb_v\d_\w{20,})",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@$]+:[^\s/:@$]{3,}@",
}
SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd|credentials?|auth)(?:_|$|id$)")
SHORTEST = 12
LEAST_BITS = 2.5  # a character; English words are near 4 over their letters, but short and with few of them


def entropy_bits(text: str) -> float:
    """Shannon entropy of its characters, in bits a character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Values that look like secrets, by variable: a telling name, long, many different characters, no path."""
    return {
        name: value
        for name, value in environment.items()
        if SECRET_NAME.search(name)
        and len(value) >= SHORTEST
        and entropy_bits(value) >= LEAST_BITS
        and not value.startswith(("/", "~", "./"))
        and " " not in value
    }


def find_secrets(name: str, text: str, environment: Mapping[str, str]) -> list[str]:
    """`FILE:LINE: kind` of each finding."""
    own = environment_secrets(environment)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        kinds = [kind for kind, pattern in PATTERNS.items() if re.search(pattern, line)]
        kinds += [f"the value of {variable}" for variable, value in own.items() if value in line]
        found += [f"{name}:{number}: {kind}" for kind in kinds]
    return found


def refuse_secrets(files: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
    """Raise UserError, one line for each secret, if there is any."""
    known = os.environ if environment is None else environment
    found = [finding for name, text in files.items() for finding in find_secrets(name, text, known)]
    if found:
        fix = "; nothing was written: take it out of the spec or option it came from, and set it in the environment"
        raise UserError("\n".join(f"{finding}{fix}" for finding in found))
