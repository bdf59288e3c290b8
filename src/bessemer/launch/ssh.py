"""SSH: machines of your own, without a scheduler. They share the folder that the command is run in (NFS or the like).

One script starts node.sh on every host, and tells, stops and shows it by the process id that it left beside the logs.
"""

from __future__ import annotations

import shlex

from bessemer.launch.job import JobState, LaunchJob, call
from bessemer.launch.request import LaunchRequest

CLIENT = "ssh"
FILE = "launch.sh"

TEMPLATE = r"""#!/bin/bash
# {name} on machines of your own: bash {file} start | status | logs | stop
set -euo pipefail
HOSTS=({hosts})
PORT={port} # the first host must be reachable here by the others
SSH="${{SSH:-ssh -o BatchMode=yes}}" # keys, users and ports belong into ~/.ssh/config
folder={folder}
python={python} workdir={workdir} # quoted for the shells of the hosts

on() {{ # HOST COMMAND: run it there
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
    start) # look at all of them before the first one starts
      on "$host" "test -f '$folder/node.sh'" || fail "$host: not reached, or without $folder: the hosts must share it"
      if on "$host" "$alive"; then fail "$host: already running"; fi
      machine="$(on "$host" "echo machine \$(hostname) \$(cat $boot 2> /dev/null)" | grep ^machine)"
      for i in "${{!machines[@]}}"; do
        if [ "$machine" = "${{machines[$i]}}" ]; then
          fail "$host: the same machine as ${{HOSTS[$i]}}: name each machine once in --hosts"
        fi
      done
      machines+=("$machine")
      ;;
    status)
      if on "$host" "$alive"; then state=RUNNING; else state=ENDED; fi
      echo "$host|$state|$(on "$host" "tail -n 1 '$log' 2> /dev/null" || true)"
      ;;
    logs) on "$host" "tail -n 100 '$log' | sed 's/^/$host: /'" ;;
    stop) # torchrun hands SIGTERM on: the workers finish the step, save and leave
      if on "$host" "$alive && kill -TERM \"\$(cat '$pid')\""; then
        echo "$host: asked to save and leave"
      else
        echo "$host: not running"
      fi
      ;;
    *) fail "write start, status, logs or stop" ;;
  esac
done

if [ "${{1:-start}}" = start ]; then
  # The first host tells its own address: the names here may be aliases that the others do not know.
  others=("${{HOSTS[@]:1}}")
  ask="cd $workdir && $python -m bessemer.parallel.address --seen \"\$SSH_CONNECTION\" ${{others[*]#*@}}"
  head="$(on "${{HOSTS[0]}}" "$ask" | tail -n 1)"
  [ -n "$head" ] || fail "${{HOSTS[0]}}: did not tell its address (the command was: $ask)"
  is_host=1
  for host in "${{HOSTS[@]}}"; do
    meet="PET_NNODES=${{#HOSTS[@]}} PET_RDZV_BACKEND=c10d PET_RDZV_ID={label} PET_RDZV_ENDPOINT=$head:$PORT"
    meet="$meet PET_RDZV_CONF=is_host=$is_host"
    is_host=0
    # Its own session and no open pipe, so that it outlives this connection.
    run="$meet setsid nohup bash '$folder/node.sh' >> '$folder/$host.log' 2>&1 < /dev/null"
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


def job_id(request: LaunchRequest, printed: str) -> str:
    return ",".join(request.hosts)


def states(job: LaunchJob) -> list[JobState]:
    rows = call(["bash", f"{job.folder}/{FILE}", "status"]).splitlines()
    return [JobState(host, state, detail=last) for host, state, last in (row.split("|", 2) for row in rows)]


def logs(job: LaunchJob) -> list[str]:
    return ["bash", f"{job.folder}/{FILE}", "logs"]


def cancel(job: LaunchJob) -> list[str]:
    return ["bash", f"{job.folder}/{FILE}", "stop"]
