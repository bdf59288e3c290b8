"""A server at saturation for some minutes: memory over time, lost requests, and what SIGTERM does to those in flight.

    python benchmarks/serve_soak.py MODEL --minutes 10 --clients 48

More clients than slots ask without pause, some leave before their answer. At the end, under the same load, the server
gets SIGTERM: every request that it has accepted must be answered, and the process must end with 0.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import psutil
import torch


class Client(threading.Thread):
    """Asks until told to stop. `lost`: requests that were sent and got no complete answer."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.port, self.draw = port, random.Random(seed)
        self.answered = self.left = self.refused = 0
        self.lost: list[str] = []
        self.ended, self.draining = threading.Event(), False

    def run(self) -> None:
        while not self.ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            try:
                connection.connect()
            except OSError as error:
                if not self.draining:
                    self.lost.append(repr(error))
                return
            self.ask(connection)
            connection.close()

    def ask(self, connection: http.client.HTTPConnection) -> None:
        stream, leaves = self.draw.random() < 0.5, self.draw.random() < 0.1
        body = {"prompt": "x" * self.draw.randint(1, 100), "max_tokens": self.draw.randint(1, 60), "stream": stream,
                "ignore_eos": True, "n": self.draw.choice((1, 1, 2))}  # fmt: skip
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if leaves:
                self.left += 1
                return
            response = connection.getresponse()
            text = response.read().decode()
            complete = text.endswith("data: [DONE]\n\n") if stream else "usage" in text
            if response.status == 200 and complete and '"error"' not in text:
                self.answered += 1
            else:
                self.lost.append(f"{response.status} {text[-200:]}")
        except (OSError, http.client.HTTPException) as error:
            if self.draining and not isinstance(error, TimeoutError):
                self.refused += 1  # the connection was made, but not accepted before the signal
            else:
                self.lost.append(repr(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "bessemer", "serve", options.model, "--port", "0", "--slots", str(options.slots)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = next(line for line in server.stdout if line.startswith("serving"))
    port = int(line.split()[1].split(":")[2].partition("/")[0])
    clients = [Client(port, seed) for seed in range(options.clients)]
    for client in clients:
        client.start()
    process, start, memory = psutil.Process(server.pid), time.monotonic(), []
    while time.monotonic() - start < 60 * options.minutes:
        time.sleep(min(10.0, 6 * options.minutes))
        memory.append((round(time.monotonic() - start, 1), round(process.memory_info().rss / 1e6, 1)))
        print(*memory[-1], "MB", sum(client.answered for client in clients), "answered", flush=True)
    answered = sum(client.answered for client in clients)
    for client in clients:
        client.draining = True
    server.send_signal(signal.SIGTERM)
    code, drained_s = server.wait(120), time.monotonic() - start - memory[-1][0]
    for client in clients:
        client.ended.set()
        client.join(60)
    lost = [reason for client in clients for reason in client.lost]
    settled = memory[len(memory) // 3][1]
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = git.stdout.strip()
    report = {
        "command": sys.argv, "commit": commit, "torch": torch.__version__, "cores": os.cpu_count(),
        "machine": platform.platform(), "load": os.getloadavg(), "minutes": options.minutes, "answered": answered,
        "answered_after_sigterm": sum(client.answered for client in clients) - answered,
        "not_accepted_after_sigterm": sum(client.refused for client in clients),
        "left_by_clients": sum(client.left for client in clients), "lost": lost, "exit_code": code,
        "drained_s": round(drained_s, 1), "memory_mb": memory, "growth_mb": round(memory[-1][1] - settled, 1),
    }  # fmt: skip
    out = options.out or Path(f"benchmarks/results/{date.today()}-serve-soak.json")
    out.write_text(json.dumps(report, indent=1) + "\n")
    print({key: value for key, value in report.items() if key != "memory_mb"})
    raise SystemExit(bool(lost) or code != 0)


if __name__ == "__main__":
    main()
