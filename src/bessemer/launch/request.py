"""LaunchRequest: the target and the resources of a run, checked. Every target writes its files from one.

Also refuses to write secrets into generated files: known forms of tokens, and the values of secrets in the
environment. The message names file, line and kind, never the secret. Keys reach a run by name, through the environment,
`.env` or the target's secret store.
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
from bessemer.plan.search.layout import check_processes, data_ranks
from bessemer.spec.quantity import parse_duration
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

# Options of each target beyond nodes, GPUs and restarts. An option of another target is refused, not ignored.
TARGET_OPTIONS = {
    "slurm": {"cpus", "memory", "time", "gpu_type", "image", "python", "partition", "account", "qos", "array"},
    "kubernetes": {"cpus", "memory", "time", "image", "python", "namespace", "volume", "secret", "min_nodes"},
    "sky": {"cpus", "memory", "gpu_type", "image", "python", "install", "cloud", "volume", "on_demand"},
    "modal": {"cpus", "memory", "time", "gpu_type", "image", "install", "volume", "secret"},
    "ssh": {"hosts", "python"},
    "local": {"python"},
}
CPUS_PER_GPU = 8
MODAL_GPUS = 8  # several Modal nodes must be complete machines
# Written without quotes into generated files, where a space or a quote would change the meaning.
UNQUOTED = ("gpu_type", "partition", "account", "qos", "namespace", "volume", "secret", "cloud")
ARRAY_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)


@dataclass(frozen=True)
class LaunchRequest:
    """The options of `bessemer launch submit`. An empty string leaves the choice to the target."""

    spec: RunSpec
    on: str
    nodes: int = 1
    gpus: int = 1  # per node; 0: one process on the CPU
    max_restarts: int = 3
    cpus: int = 0  # per node; 0: CPUS_PER_GPU for each GPU
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
    workdir: str = ""  # relative paths of the spec start here

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def folder(self) -> Path:
        """The folder of the generated files, on this machine."""
        return (Path(self.spec.runs) / self.name / "launch").absolute()

    @property
    def processes(self) -> int:
        return max(1, self.gpus)

    @property
    def seconds(self) -> int | None:
        return int(parse_duration(self.time)) if self.time else None

    @property
    def cpus_per_node(self) -> int:
        return self.cpus or CPUS_PER_GPU * self.gpus or 1

    @property
    def interpreter(self) -> str:
        """This interpreter where the nodes share the file system, else the image's python3."""
        shared = self.on in ("slurm", "ssh", "local") and not self.image
        return self.python or (sys.executable if shared else "python3")

    @property
    def port(self) -> int:
        """Port of the rendezvous, derived from the name: other runs most likely use another."""
        return 20000 + zlib.crc32(self.name.encode()) % 10000

    @property
    def label(self) -> str:
        """The name in the characters that Kubernetes and clouds allow: lower case, digits and dashes."""
        text = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name.lower())
        return text.strip("-")[:50].strip("-") or "run"


def _check_text(request: LaunchRequest) -> None:
    """Refuse options that would start a new line or a new option in a generated file."""
    options = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "workdir"}
    texts = {f"--{name.replace('_', '-')}": text for name, text in options.items() if isinstance(text, str)}
    texts |= {"--hosts": "".join(request.hosts), "runs": str(request.folder)}
    texts["the folder you launch from"] = request.workdir or str(Path.cwd())
    for option, text in texts.items():
        if not text.isprintable():
            raise UserError(f"{option} {text!r}: contains a line break or another control character; remove it")
    names = (*UNQUOTED, "memory") if request.on == "slurm" else UNQUOTED
    for name in names:
        if match := re.search(r"[\s'\"`\\#$;]", text := getattr(request, name)):
            raise UserError(f"--{name.replace('_', '-')} {text!r}: must not contain {match[0]!r}; remove it")


def _check_time(time: str) -> None:
    try:
        seconds = parse_duration(time)
    except ValueError as error:
        raise UserError(f"--time: {error}") from None
    if seconds < 1:
        raise UserError(f"--time {time}: is too short to train: write for example 24h, or leave it out for no limit")


def _check_array(array: str) -> None:
    """Check Slurm's syntax: numbers and ranges FIRST-LAST[:STEP] with commas, and %N for N at a time."""
    tasks, percent, at_once = array.partition("%")
    valid = not percent or (at_once.isascii() and at_once.isdecimal() and int(at_once) > 0)
    for part in tasks.split(","):
        match = ARRAY_PART.fullmatch(part)
        valid = valid and match is not None and int(match[3] or 1) > 0
        if match and match[2] and int(match[2]) < int(match[1]):
            raise UserError(f"--array {array}: {part} ends before it begins: write the smaller number first")
    if not valid:
        raise UserError(f"--array {array}: write for example 0-3, 0,2,5 or 0-15%4 (4 at a time)")


def _model_shape(spec: RunSpec) -> ModelShape | None:
    """The shape of `model.hf`, if its folder is on this machine."""
    if spec.model.hf is None:
        return None
    from bessemer.session.start import open_source  # imports torch

    source = open_source(spec)
    return source.shape if source else None


def _check_layout(request: LaunchRequest) -> None:
    """Refuse now what training would refuse only after waiting in a queue."""
    hf = request.spec.model.hf
    if hf is not None and not (Path(hf).expanduser() / "config.json").is_file():
        return  # the folder is on the target: training checks it there
    shape, min_nodes = _model_shape(request.spec), request.min_nodes or request.nodes
    for nodes in range(min_nodes, request.nodes + 1):
        try:
            check_processes(request.spec, shape, nodes * request.processes)
        except UserError as error:
            allowed = f" (on {nodes} nodes, which --min-nodes {min_nodes} allows)" if nodes < request.nodes else ""
            raise UserError(f"{error}{allowed}") from None


def idle_ranks_note(request: LaunchRequest) -> str:
    """A note if a step has fewer rows than data-parallel ranks; empty if it has enough or the spec does not say."""
    batch, context = request.spec.budget.batch, request.spec.data.context
    ranks = data_ranks(request.spec.parallel, request.nodes * request.processes)
    if not isinstance(batch, int) or not isinstance(context, int) or ranks <= (rows := max(1, round(batch / context))):
        return ""
    return (
        f"note     a step has {rows} rows for {ranks} data-parallel processes: {ranks - rows} of them would be idle; "
        f" raise budget.batch to {ranks * context}, or use fewer GPUs"
    )


def check_request(request: LaunchRequest) -> LaunchRequest:
    """The request with its defaults filled in. UserError for options that the target lacks or still needs."""
    on, options = request.on, TARGET_OPTIONS.get(request.on)
    if options is None:
        raise UserError(f"--on {on or 'missing'}: write one of {', '.join(TARGET_OPTIONS)}, such as --on slurm")
    requested = {option for known in TARGET_OPTIONS.values() for option in known if getattr(request, option)}
    for option in sorted(requested - options):
        targets = " and ".join(target for target, known in TARGET_OPTIONS.items() if option in known)
        raise UserError(f"--{option.replace('_', '-')}: {on} has no such option; it is for {targets}")
    _check_text(request)
    if request.time:
        _check_time(request.time)
    if request.array:
        _check_array(request.array)
    needs = {
        "kubernetes": {"image": "--image IMAGE, a container image with Bessemer in it",
                       "volume": "--volume CLAIM, a PersistentVolumeClaim that holds data and runs"},
        "ssh": {"hosts": "--hosts HOST[,HOST...], which share this folder"},
    }.get(on, {})  # fmt: skip
    if on in ("sky", "modal"):
        needs = {"gpu_type": "--gpu-type, such as H100"} if request.gpus else {}
        if not request.image:
            needs["install"] = "--install PACKAGE (a name or URL for pip), or --image"
    for option, example in needs.items():
        if not getattr(request, option):
            raise UserError(f"--on {on} needs {example}")
    if on == "local" and request.nodes != 1:
        raise UserError(f"--nodes {request.nodes}: the local queue has one node; use --on slurm or ssh for several")
    if on == "modal" and request.nodes > 1 and request.gpus != MODAL_GPUS:
        raise UserError(
            f"--gpus {request.gpus}: with --nodes {request.nodes} Modal only joins complete machines: "
            f"write --gpus {MODAL_GPUS}, or --nodes 1"
        )
    if on == "sky" and request.nodes > 1 and not request.volume:
        raise UserError(
            "--on sky --nodes: several nodes need a shared bucket for checkpoints: add --volume s3://BUCKET"
        )
    if request.min_nodes > request.nodes:
        raise UserError(f"--min-nodes {request.min_nodes} is more than --nodes {request.nodes}")
    if on == "ssh":
        for host in request.hosts:
            if not re.fullmatch(r"[\w.@-]+", host) or host.startswith("-"):
                raise UserError(f"--hosts {host}: write a name or user@name; set ports in ~/.ssh/config")
        names = [host.rpartition("@")[2].lower() for host in request.hosts]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--hosts: {name} is named {names.count(name)} times; name each machine once")
        request = replace(request, nodes=len(request.hosts))
    _check_layout(request)
    return request if request.workdir else replace(request, workdir=str(Path.cwd()))


# Keys that targets pass on by name; .env.example says how to get each.
KEY_NAMES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

SECRET_PATTERNS = {
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
MIN_SECRET_CHARS = 12
MIN_ENTROPY_BITS = 2.5  # per character: repeated or few characters are no secret


def entropy_bits(text: str) -> float:
    """Shannon entropy in bits per character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Values that look like secrets, by variable: a telling name, long, many different characters, not a path."""
    return {
        name: value
        for name, value in environment.items()
        if SECRET_NAME.search(name)
        and len(value) >= MIN_SECRET_CHARS
        and entropy_bits(value) >= MIN_ENTROPY_BITS
        and not value.startswith(("/", "~", "./"))
        and " " not in value
    }


def find_secrets(name: str, text: str, environment: Mapping[str, str]) -> list[str]:
    """`FILE:LINE: kind` of each secret in the text."""
    secrets = environment_secrets(environment)
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        kinds = [kind for kind, pattern in SECRET_PATTERNS.items() if re.search(pattern, line)]
        kinds += [f"the value of {variable}" for variable, value in secrets.items() if value in line]
        findings += [f"{name}:{number}: {kind}" for kind in kinds]
    return findings


def refuse_secrets(files: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
    """Raise UserError, with one line for each secret, if the files contain any."""
    environment = os.environ if environment is None else environment
    findings = [finding for name, text in files.items() for finding in find_secrets(name, text, environment)]
    if findings:
        fix = "; nothing was written: remove it from the spec or option, and set it in the environment"
        raise UserError("\n".join(f"{finding}{fix}" for finding in findings))
