"""Launches on Kubernetes: a PyTorchJob of the Kubeflow training operator, and a ConfigMap with node.sh and the spec.

With an elasticPolicy the operator runs workers only and passes the rendezvous to torchrun in PET_ variables. The
working folder of the pods is the volume, so relative paths of the spec (data, runs) are on it.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

from bessemer.launch.job import JobState, LaunchJob, node_script, run_client
from bessemer.launch.request import KEY_NAMES, LaunchRequest
from bessemer.parallel.agent import SAVE_S
from bessemer.spec.load import dump_spec

CLIENT = "kubectl"
FILE = "pytorchjob.yaml"
WORK = "/work"

TEMPLATE = """# {name}: submit with `kubectl apply -f {file}`. Needs the Kubeflow training operator (kubeflow.org/v1).
apiVersion: v1
kind: ConfigMap
metadata:
  name: {label}-launch
  namespace: {namespace}
data:
  node.sh: |
{node}
  spec.yaml: |
{spec}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {label}
  namespace: {namespace}
spec:
  nprocPerNode: "{processes}"
  elasticPolicy:
    rdzvBackend: c10d
    rdzvId: {label}
    # Training continues with this many nodes while others are replaced; equal to replicas: it waits for all.
    minReplicas: {min_nodes}
    maxReplicas: {nodes}
    maxRestarts: {max_restarts}
  runPolicy:
    # Finished pods stay for `kubectl logs`.
    cleanPodPolicy: None
    backoffLimit: {backoff}{deadline}
  pytorchReplicaSpecs:
    Worker:
      replicas: {nodes}
      # A failed pod restarts and continues from the last checkpoint.
      restartPolicy: OnFailure
      template:
        spec:
          # Eviction sends SIGTERM: the workers finish the step, save and exit within this time.
          terminationGracePeriodSeconds: {grace}
          containers:
            - name: pytorch # the operator looks for this name
              image: {image}
              command: [bash, /launch/node.sh]
              workingDir: {work}{environment}
              resources:
                # Requests equal to limits: the pod is evicted last and can have exclusive CPUs.
                requests: {resources}
                limits: {resources}
              volumeMounts:
                - {{name: launch, mountPath: /launch}}
                - {{name: work, mountPath: {work}}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - name: launch
              configMap: {{name: {label}-launch}}
            - name: work
              persistentVolumeClaim: {{claimName: {volume}}}
            # Workers and NCCL share memory through /dev/shm, 64 MiB by default. It counts as memory.
            - name: shm
              emptyDir: {{medium: Memory, sizeLimit: {shm}}}
"""


def write(request: LaunchRequest) -> dict[str, str]:
    in_pod = replace(request, workdir=WORK)
    resources = {"cpu": str(request.cpus_per_node), "memory": request.memory or f"{64 * request.gpus or 8}Gi"}
    if request.gpus:
        resources["nvidia.com/gpu"] = str(request.gpus)
    secret = request.secret or "bessemer"
    keys = "".join(
        f"\n                - name: {key}\n                  valueFrom:\n"
        f"                    secretKeyRef: {{name: {json.dumps(secret)}, key: {key}, optional: true}}"
        for key in KEY_NAMES
    )
    return {
        FILE: TEMPLATE.format(
            name=request.name, file=f"{request.folder}/{FILE}", label=request.label,
            namespace=json.dumps(request.namespace or "default"), work=WORK,
            node=textwrap.indent(node_script(in_pod), "    "), spec=textwrap.indent(dump_spec(request.spec), "    "),
            processes=request.processes, nodes=request.nodes, min_nodes=request.min_nodes or request.nodes,
            max_restarts=request.max_restarts, backoff=10 * max(1, request.max_restarts),
            deadline=f"\n    activeDeadlineSeconds: {request.seconds}" if request.seconds else "",
            grace=SAVE_S + 20, image=json.dumps(request.image), resources=json.dumps(resources),
            environment=f"\n              env: # kubectl create secret generic {secret} --from-env-file=.env{keys}",
            volume=json.dumps(request.volume), shm=f"{8 * request.processes}Gi",
        )
    }  # fmt: skip


def submit(request: LaunchRequest) -> list[str]:
    return ["kubectl", "apply", "-f", f"{request.folder}/{FILE}"]


def job_id(request: LaunchRequest, output: str) -> str:
    return request.label


def states(job: LaunchJob) -> list[JobState]:
    options = ["--namespace", job.where or "default", "-o", "json"]
    status = json.loads(run_client(["kubectl", "get", "pytorchjob", job.id, *options]))
    conditions = [c for c in status.get("status", {}).get("conditions", []) if c.get("status") == "True"]
    newest = conditions[-1] if conditions else {"type": "Submitted"}
    label = f"training.kubeflow.org/job-name={job.id}"
    pods = json.loads(run_client(["kubectl", "get", "pods", "-l", label, *options]))["items"]
    return [
        JobState(job.id, newest["type"], newest.get("lastTransitionTime", ""), newest.get("message", "")),
        *(
            JobState(pod["metadata"]["name"], pod["status"].get("phase", ""), detail=pod["spec"].get("nodeName", ""))
            for pod in pods
        ),
    ]


def logs(job: LaunchJob) -> list[str]:
    label = f"training.kubeflow.org/job-name={job.id}"
    options = ["--namespace", job.where or "default"]
    return ["kubectl", "logs", "-l", label, "--prefix", "--tail=100", *options]


def cancel(job: LaunchJob) -> list[str]:
    return ["kubectl", "delete", "--namespace", job.where or "default", "-f", f"{job.folder}/{FILE}"]
