"""`bessemer serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

from pathlib import Path

import typer

from bessemer.cli.console import CHECKPOINT, DEVICE
from bessemer.errors import UserError


def serve(
    model: Path | None = typer.Argument(
        None, help="A run such as runs/demo, one of its checkpoints, an import, a Hugging Face or LoRA folder."
    ),
    watch: Path | None = typer.Option(None, "--watch", help="A live run: always serve its newest checkpoint."),
    adapter: list[str] = typer.Option(
        [], "--adapter", help="NAME=FOLDER: serve a LoRA folder or run of the same base as another model. Repeatable."
    ),
    name: str | None = typer.Option(None, "--name", help="The model's name in the API (default: its folder's name)."),
    host: str = typer.Option("127.0.0.1", "--host", help="The address to bind; 0.0.0.0 for all."),
    port: int = typer.Option(8000, "--port", min=0, max=65535, help="0 takes a free one."),
    slots: int = typer.Option(16, "--slots", min=1, help="Samples that are computed at the same time."),
    context: int | None = typer.Option(None, "--context", min=2, help="Most tokens of a prompt and its answer."),
    draft: str | None = typer.Option(
        None, "--draft", help="Speculative decoding: ngram, or the folder of a smaller model with the same tokenizer."
    ),
    compiled: bool = typer.Option(False, "--compile", help="Compile decoding on a GPU: half a minute at the start."),
    template: str | None = typer.Option(
        None, "--template", help="Chat template if the model has none: chatml, llama3, plain, none or a Jinja file."
    ),
    queue: int = typer.Option(512, "--queue", min=1, help="Requests that may wait; more get status 429."),
    queue_seconds: float = typer.Option(120.0, "--queue-seconds", min=0.1, help="Longest wait for a slot."),
    request_seconds: float = typer.Option(600.0, "--request-seconds", min=0.1, help="Longest time of an answer."),
    max_tokens: int = typer.Option(16384, "--max-tokens", min=1, help="Most new tokens of an answer."),
    drain_seconds: int = typer.Option(60, "--drain-seconds", min=0, help="Time for running requests after SIGTERM."),
    cors: list[str] = typer.Option([], "--cors", help="Origin of a web page that may call the server. Repeatable."),
    anonymous: bool = typer.Option(False, "--anonymous", help="Allow a public --host without keys."),
    checkpoint: str = CHECKPOINT,
    device: str = DEVICE,
) -> None:
    """Serve a model with OpenAI's HTTP API and a chat page.

    Chat and completions for models that write text, /v1/embeddings for encoders, /v1/classify for classifiers. Keys
    come from the environment: BESSEMER_API_KEYS=key1,key2.

    Example: bessemer serve runs/demo
    """
    folder = watch or model
    if folder is None or (watch is not None and model is not None):
        raise UserError("serve what? Give a MODEL, or --watch RUN" if folder is None else "give MODEL or --watch RUN")
    if watch is not None and (checkpoint != "last" or adapter):
        raise UserError("--watch serves the newest checkpoint: leave out --checkpoint and --adapter")
    from bessemer.serve.models import ModelOptions
    from bessemer.serve.scheduler import QueueLimits
    from bessemer.serve.server import ServeOptions
    from bessemer.serve.server import serve as run_server

    options = ModelOptions(checkpoint, device, template, slots, context, draft, compiled)
    limits = QueueLimits(
        queue=queue, client_queue=max(1, queue // 2), queue_s=queue_seconds, request_s=request_seconds,
        max_tokens=max_tokens,
    )  # fmt: skip
    run_server(
        ServeOptions(
            folder, name, adapter, watch is not None, host, port, tuple(cors), anonymous, drain_seconds, options, limits
        )
    )
