"""What is written for each target: it parses by the real parsers, and says what was asked."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bessemer.errors import UserError
from bessemer.launch.request import TARGET_OPTIONS, LaunchRequest, check_request, idle_ranks_note
from bessemer.launch.slurm import format_time
from bessemer.launch.submit import generate_files
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec

Ask = Callable[..., LaunchRequest]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("slurm", {"nodes": 2, "gpus": 8, "time": "26h", "partition": "gpu", "account": "lab", "gpu_type": "h100"}),
    ("slurm", {"gpus": 0, "cpus": 2, "array": "0-3", "image": "team/bessemer:1"}),
    ("kubernetes", {"nodes": 4, "gpus": 8, "min_nodes": 2, "time": "10h", "namespace": "ml"}),
    ("kubernetes", {"gpus": 0}),
    ("sky", {"gpus": 8, "cloud": "runpod"}),
    ("sky", {"nodes": 2, "gpus": 1, "on_demand": True, "image": "team/bessemer:1"}),
    ("modal", {"gpus": 1, "secret": "keys", "memory": "64GB", "time": "3h"}),
    ("modal", {"nodes": 2, "gpus": 8, "image": "team/bessemer:1"}),
    ("ssh", {"gpus": 2}),
    ("local", {"gpus": 1}),
]


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.M))


@pytest.mark.parametrize(("on", "options"), CASES)
def test_every_file_parses(ask: Ask, tmp_path: Path, on: str, options: dict[str, Any]) -> None:
    files = generate_files(ask(on, **options))
    scripts = []
    for name, text in files.items():
        if name.endswith((".sh", ".sbatch")):
            scripts.append(tmp_path / name)
            scripts[-1].write_text(text)
        elif name.endswith(".py"):
            ast.parse(text)
        else:
            parsed = list(yaml.safe_load_all(text))
            if on == "kubernetes":
                scripts.append(tmp_path / "node.sh")
                scripts[-1].write_text(parsed[0]["data"]["node.sh"])
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("on", "options"), CASES)
def test_every_target_trains_the_spec_by_torchrun(ask: Ask, tmp_path: Path, on: str, options: dict[str, Any]) -> None:
    request = ask(on, **options)
    files = generate_files(request)
    if on == "kubernetes":
        files = next(yaml.safe_load_all(files["pytorchjob.yaml"]))["data"]
    last = files["node.sh"].splitlines()[-1]
    assert last.startswith("exec ") and "-m bessemer.parallel.agent" in last
    assert f"--nproc-per-node={request.processes} " in last and "--max-restarts=3" in last
    assert '-m bessemer train "$here/spec.yaml"' in last
    assert ("--standalone" in last) == (request.nodes == 1)
    assert ("--numa-binding" in files["node.sh"]) == (request.gpus > 0)
    assert ("NCCL_IB_HCA" in files["node.sh"]) == (request.gpus > 0 and request.nodes > 1)
    (tmp_path / "copy.yaml").write_text(files["spec.yaml"])
    sent = load_spec(tmp_path / "copy.yaml")
    changed = {"runs", "checkpoint"} if on == "sky" else set()
    assert sent.model_dump(exclude=changed) == request.spec.model_dump(exclude=changed)


def test_slurm_says_what_was_asked(ask: Ask) -> None:
    request = ask("slurm", nodes=2, gpus=8, time="26h", partition="gpu", account="lab", gpu_type="h100")
    script = generate_files(request)["job.sbatch"]
    found = directives(script)
    assert found["nodes"] == "2" and found["gpus-per-node"] == "h100:8" and found["time"] == "1-02:00:00"
    assert found["partition"] == "gpu" and found["account"] == "lab" and found["cpus-per-task"] == "64"
    assert found["ntasks-per-node"] == "1" and "requeue" in found and found["signal"] == "B:USR1@120"
    assert found["output"].endswith("slurm-%j.log") and found["open-mode"] == "append"
    # Directives end at the first command: what comes later is a comment to Slurm.
    assert script.index("#SBATCH --signal") < script.index("\nset -u")


def test_a_task_of_an_array_has_its_own_log_name_and_seed(ask: Ask) -> None:
    files = generate_files(ask("slurm", gpus=0, array="0-3"))
    assert directives(files["job.sbatch"])["output"].endswith("slurm-%A_%a.log")
    assert '--set name=tiny-"$SLURM_ARRAY_TASK_ID" --set seed="$SLURM_ARRAY_TASK_ID"' in files["node.sh"]
    start = files["job.sbatch"].index("job=")
    naming = files["job.sbatch"][start : files["job.sbatch"].index("\n\n", start)]
    for variables, expected in (
        ("SLURM_JOB_ID=7", "7"),
        ("SLURM_JOB_ID=9 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=2", "7_2"),
    ):
        done = subprocess.run(["bash", "-uc", f'{variables}\n{naming}\necho "$job"'], capture_output=True, text=True)
        assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(("seconds", "told"), [(59, "0-00:00:59"), (3600, "0-01:00:00"), (90061, "1-01:01:01")])
def test_times_as_slurm_writes_them(seconds: int, told: str) -> None:
    assert format_time(seconds) == told


def test_kubernetes_takes_keys_only_from_a_secret(ask: Ask) -> None:
    config, job = yaml.safe_load_all(generate_files(ask("kubernetes", nodes=4, gpus=8, min_nodes=2))["pytorchjob.yaml"])
    assert config["kind"] == "ConfigMap" and job["kind"] == "PyTorchJob"
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (policy["minReplicas"], policy["maxReplicas"], worker["replicas"]) == (2, 4, 4)
    container = worker["template"]["spec"]["containers"][0]
    assert all(set(variable) == {"name", "valueFrom"} for variable in container["env"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    volumes = {volume["name"]: volume for volume in worker["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)


def test_sky_puts_checkpoints_where_a_new_machine_finds_them(ask: Ask) -> None:
    alone, several = (generate_files(ask("sky", nodes=nodes, gpus=8)) for nodes in (1, 2))
    task = yaml.safe_load(alone["sky.yaml"])
    assert task["resources"]["use_spot"] is True and task["resources"]["accelerators"] == "H100:8"
    assert task["file_mounts"]["/bessemer"] == {"source": "s3://bucket", "mode": "MOUNT_CACHED"}
    assert yaml.safe_load(alone["spec.yaml"])["checkpoint"]["remote"] == "file:///bessemer/checkpoints"
    assert yaml.safe_load(several["spec.yaml"])["runs"] == "/bessemer/runs"
    assert yaml.safe_load(several["sky.yaml"])["num_nodes"] == 2


@pytest.mark.parametrize("options", [options for on, options in CASES if on == "sky"])
def test_sky_yaml_by_skypilots_own_schema(ask: Ask, options: dict[str, Any]) -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    if "infra" not in schemas.get_resources_schema()["properties"]:
        pytest.skip("this skypilot is older than 0.10")
    task = yaml.safe_load(generate_files(ask("sky", **options))["sky.yaml"])
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    jsonschema.validate(task["file_mounts"]["/bessemer"], schemas.get_storage_schema())


@pytest.mark.parametrize("options", [options for on, options in CASES if on == "kubernetes"])
def test_kubernetes_yaml_by_the_operators_own_models(ask: Ask, options: dict[str, Any]) -> None:
    training = pytest.importorskip("kubeflow.training", reason="kubeflow-training is not installed")
    job = list(yaml.safe_load_all(generate_files(ask("kubernetes", **options))["pytorchjob.yaml"]))[1]

    class Response:
        data = json.dumps(job)

    read = training.ApiClient()
    made = read.deserialize(Response(), "KubeflowOrgV1PyTorchJob")
    # A key that a model does not know is dropped when it is read: what comes back must be all that went in.
    assert read.sanitize_for_serialization(made) == job


@pytest.mark.parametrize("options", [options for on, options in CASES if on == "modal"])
def test_the_modal_file_is_an_app(ask: Ask, options: dict[str, Any]) -> None:
    modal = pytest.importorskip("modal", reason="modal is not installed")
    request = ask("modal", **options)
    request.folder.mkdir(parents=True)
    scope: dict[str, Any] = {"__name__": "modal_app"}
    path = request.folder / "modal_app.py"
    path.write_text(generate_files(request)["modal_app.py"])
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert isinstance(scope["train"], modal.Function) and callable(scope["main"])


def test_modal_asks_for_what_was_asked(ask: Ask) -> None:
    tree = ast.parse(generate_files(ask("modal", nodes=2, gpus=8, secret="keys"))["modal_app.py"])
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {word.arg: ast.unparse(word.value) for word in calls["app.function"].keywords}
    assert given["gpu"] == "'H100:8'" and given["secrets"] == "[modal.Secret.from_name('keys')]"
    assert ast.unparse(calls["modal.clustered"]) == "modal.clustered(size=2, rdma=True)"


@pytest.mark.parametrize(
    ("on", "options", "told"),
    [
        ("slrum", {}, "--on slrum: write one of slurm, kubernetes, sky, modal, ssh, local"),
        ("kubernetes", {}, "--on kubernetes needs --image"),
        ("kubernetes", {"image": "i"}, "--on kubernetes needs --volume"),
        ("sky", {"install": "x"}, "--on sky needs --gpu-type"),
        ("sky", {"gpu_type": "H100"}, "--on sky needs --install"),
        ("ssh", {}, "--on ssh needs --hosts"),
        ("ssh", {"hosts": ("a;b",)}, "--hosts a;b: write a name"),
        ("ssh", {"hosts": ("a", "b", "me@A")}, "--hosts: a is named 2 times; name each machine once"),
        ("ssh", {"hosts": ("a",), "partition": "p"}, "--partition: ssh has no such option; it is for slurm"),
        ("slurm", {"time": "26"}, "--time: expected a time with its unit"),
        ("local", {"nodes": 2}, "--nodes 2: the local queue has one node"),
        ("slurm", {"time": "0h"}, "--time 0h: is too short to train"),
        ("kubernetes", {"image": "i", "volume": "v", "time": "0.5s"}, "--time 0.5s: is too short to train"),
        ("slurm", {"array": "5-3"}, "--array 5-3: 5-3 ends before it begins"),
        ("slurm", {"array": "0-3,x"}, "--array 0-3,x: write for example 0-3"),
        ("slurm", {"array": "0-8:0"}, "--array 0-8:0: write for example 0-3"),
        ("slurm", {"array": "0-3%0"}, "--array 0-3%0: write for example 0-3"),
        ("slurm", {"partition": "x\n#SBATCH --evil"}, "--partition 'x\\n#SBATCH --evil': contains a line break"),
        ("slurm", {"partition": "x --evil"}, "--partition 'x --evil': must not contain ' '"),
        ("slurm", {"memory": "1G --evil"}, "--memory '1G --evil': must not contain ' '"),
        ("kubernetes", {"image": "i", "volume": "v", "secret": "s\rx"}, "--secret 's\\rx': contains a line break"),
        ("sky", {"gpu_type": "H100", "install": "a\n  rm x"}, "--install 'a\\n  rm x': contains a line break"),
        ("modal", {"gpu_type": "H100", "install": "x", "volume": 'v""";"""'}, "--volume 'v"),
        ("ssh", {"hosts": ("a",), "python": "py\nx"}, "--python 'py\\nx': contains a line break"),
        (
            "modal",
            {"gpu_type": "H100", "install": "x", "nodes": 2, "gpus": 4},
            "--gpus 4: with --nodes 2 Modal only joins",
        ),
        ("modal", {"install": "x", "nodes": 2, "gpus": 0}, "--gpus 0: with --nodes 2 Modal only joins"),
    ],
)
def test_what_is_missing_or_of_another_target_is_named(
    spec: RunSpec, on: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_request(LaunchRequest(spec, on, **options))
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_every_target_is_known(spec: RunSpec) -> None:
    from bessemer.launch.submit import TARGETS

    assert TARGETS.keys() == TARGET_OPTIONS.keys()


def test_nodes_meet_at_an_address_that_the_first_one_tells(ask: Ask) -> None:
    """Not at the names that ssh or Slurm have for it, which the others may not know."""
    hosts = generate_files(ask("ssh", gpus=1, hosts=("alias1", "me@alias2"), python="/opt/my env/python"))["launch.sh"]
    assert """python=''"'"'/opt/my env/python'"'"''""" in hosts and "PET_RDZV_ENDPOINT=$head:$PORT" in hosts
    assert 'head="$(on "${HOSTS[0]}" "$ask" | tail -n 1)"' in hosts
    files = generate_files(ask("slurm", nodes=2, gpus=1))
    assert 'PET_RDZV_ENDPOINT="$head:' in files["job.sbatch"] and "-m bessemer.parallel.address" in files["job.sbatch"]
    assert 'PET_RDZV_CONF="is_host=$((SLURM_NODEID == 0))"' in files["node.sh"]
    assert "parallel.address" not in generate_files(ask("slurm", nodes=1, gpus=1))["job.sbatch"]


@pytest.mark.parametrize("array", ["7", "0-3", "0,2,5", "0-15:4", "1-4,9%2"])
def test_arrays_as_slurm_takes_them(ask: Ask, array: str) -> None:
    assert directives(generate_files(ask("slurm", array=array))["job.sbatch"])["array"] == array


@pytest.mark.parametrize(
    ("parallel", "options", "words"),
    [
        ({"tp": 3}, {"nodes": 2, "gpus": 8}, "parallel.tp: 3 does not divide 2 heads"),
        ({"dp_shard": 5}, {"nodes": 2, "gpus": 8}, "dp_shard 5 needs 5 processes, and there are 16"),
        ({"dp_shard": 2}, {"gpus": 0}, "dp_shard 2 needs 2 processes, and there are 1"),
    ],
)
def test_a_layout_that_training_refuses_is_refused_before_it_is_queued(
    spec: RunSpec, parallel: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    changed = spec.model_copy(update={"parallel": spec.parallel.model_copy(update=parallel)})
    with pytest.raises(UserError, match=words) as fault:
        check_request(LaunchRequest(changed, "slurm", **options))
    assert "\n" not in str(fault.value)


def test_the_layout_must_fit_every_number_of_nodes_that_may_train(spec: RunSpec) -> None:
    changed = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"dp_shard": 16})})
    request = LaunchRequest(changed, "kubernetes", nodes=4, gpus=8, image="i", volume="v")
    check_request(request)
    with pytest.raises(UserError, match=r"there are 24: .* \(on 3 nodes, which --min-nodes 2 allows\)"):
        check_request(replace(request, min_nodes=2))


def test_weights_that_lie_where_the_run_goes_are_checked_there(spec: RunSpec) -> None:
    model = spec.model.model_copy(update={"hf": "not/here"})
    check_request(LaunchRequest(spec.model_copy(update={"model": model}), "slurm", gpus=8))


def test_processes_without_a_row_of_a_step_get_a_note(ask: Ask) -> None:
    assert idle_ranks_note(ask("slurm", gpus=8)) == ""  # 256 tokens in rows of 32
    assert "a step has 8 rows for 16 data-parallel processes: 8 of them" in idle_ranks_note(
        ask("slurm", nodes=2, gpus=8)
    )
