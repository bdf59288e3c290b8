"""Launches over SSH: your own machines, without a scheduler. They share the current folder (NFS or similar).

One script starts node.sh on every host, and finds it again for status, logs and stop by the pid file next to the log.
"""

from __future__ import annotations

import shlex

from bessemer.launch.job import JobState, LaunchJob, run_client
from bessemer.launch.request import LaunchRequest

CLIENT = "ssh"
FILE = "launch.sh"

TEMPLATE = r"""#!/bin/bash
# {name} on your own machines: bash {file} start | status | logs | stop
set -euo pipefail
HOSTS=({hosts})
PORT={port} # the others must reach the first host on this port
SSH="${{SSH:-ssh -o BatchMode=yes}}" # set keys, users and ports in ~/.ssh/config
folder={folder}
python={python} workdir={workdir} # quoted for the shells of the hosts

on() {{ # HOST COMMAND: run a command on a host
  # shellcheck disable=SC2029,SC2086
  $SSH "$1" "$2"
}}

fail() {{
  echo "$1" >&2
  exit 1
}}

machines=() boot=/proc/sys/kernel/random/boot_id
for host in "${{HOSTS[@]}}"; do
  pid="$folder/$host.pid" log="$folder/$host.log"
  alive="test -s '$pid' && kill -0 \"\$(cat '$pid')\" 2> /dev/null"
  case "${{1:-start}}" in
    start) # check all hosts before the first one starts
      on "$host" "test -f '$folder/node.sh'" || fail "$host: not reachable, or without $folder: the hosts must share it"
      if on "$host" "$alive"; then fail "$host: already running"; fi
      machine="$(on "$host" "echo machine \$(hostname) \$(cat $boot 2> /dev/null)" | grep ^machine)"
      for i in "${{!machines[@]}}"; do
        if [ "$machine" = "${{machines[$i]}}" ]; then
          fail "$host: is the same machine as ${{HOSTS[$i]}}: list each machine once in --hosts"
        fi
      done
      machines+=("$machine")
      ;;
    status)
      if on "$host" "$alive"; then state=RUNNING; else state=ENDED; fi
      echo "$host|$state|$(on "$host" "tail -n 1 '$log' 2> /dev/null" || true)"
      ;;
    logs) on "$host" "tail -n 100 '$log' | sed 's/^/$host: /'" ;;
    stop) # torchrun passes SIGTERM on: the workers finish the step, save and exit
      if on "$host" "$alive && kill -TERM \"\$(cat '$pid')\""; then
        echo "$host: told to save and exit"
      else
        echo "$host: not running"
      fi
      ;;
    *) fail "write start, status, logs or stop" ;;
  esac
done

if [ "${{1:-start}}" = start ]; then
  # The first host reports its own address: the names here may be aliases that the others do not know.
  others=("${{HOSTS[@]:1}}")
  ask="cd $workdir && $python -m bessemer.parallel.address --seen \"\$SSH_CONNECTION\" ${{others[*]#*@}}"
  head="$(on "${{HOSTS[0]}}" "$ask" | tail -n 1)"
  [ -n "$head" ] || fail "${{HOSTS[0]}}: did not report its address (the command was: $ask)"
  is_host=1
  for host in "${{HOSTS[@]}}"; do
    rendezvous="PET_NNODES=${{#HOSTS[@]}} PET_RDZV_BACKEND=c10d PET_RDZV_ID={label} PET_RDZV_ENDPOINT=$head:$PORT"
    rendezvous="$rendezvous PET_RDZV_CONF=is_host=$is_host"
    is_host=0
    # A new session and no open pipe, so that it outlives this connection.
    run="$rendezvous setsid nohup bash '$folder/node.sh' >> '$folder/$host.log' 2>&1 < /dev/null"
    on "$host" "$run & echo \$! > '$folder/$host.pid'"
    echo "$host: started"
  done
fi
"""


def write(request: LaunchRequest) -> dict[str, str]:
    return {
        FILE: TEMPLATE.format(
            name=request.name, file=f"{request.folder}/{FILE}", hosts=" ".join(map(shlex.quote, request.hosts)),
            port=request.port, folder=shlex.quote(str(request.folder)), label=request.label,
            python=shlex.quote(shlex.quote(request.interpreter)), workdir=shlex.quote(shlex.quote(request.workdir)),
        )
    }  # fmt: skip


def submit(request: LaunchRequest) -> list[str]:
    return ["bash", f"{request.folder}/{FILE}", "start"]


def job_id(request: LaunchRequest, output: str) -> str:
    return ",".join(request.hosts)


def states(job: LaunchJob) -> list[JobState]:
    rows = run_client(["bash", f"{job.folder}/{FILE}", "status"]).splitlines()
    return [JobState(host, state, detail=last) for host, state, last in (row.split("|", 2) for row in rows)]


def logs(job: LaunchJob) -> list[str]:
    return ["bash", f"{job.folder}/{FILE}", "logs"]


def cancel(job: LaunchJob) -> list[str]:
    return ["bash", f"{job.folder}/{FILE}", "stop"]
