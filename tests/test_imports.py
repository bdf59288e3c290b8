"""What may import what: the layers of the package, and what `import bessemer` and `--help` must not load.

Loaded modules are read from `sys.modules` of a fresh interpreter; a clock would only measure the machine.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a user should not wait for when asking for help.
HEAVY = {"torch", "numpy", "pydantic", "pyarrow", "tokenizers", "transformers", "bessemer.spec"}

IMPORT = "import bessemer"
HELP = """
import runpy, sys
sys.argv = ["bessemer", "--help"]
try:
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code, stop.code
"""


def modules_after(code: str) -> tuple[set[str], str]:
    """The names in `sys.modules` after `code` ran in a fresh interpreter, and what it printed."""
    report = "\nimport json, sys; sys.stderr.write(chr(10) + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


def test_layers_and_torch_free_parts() -> None:
    """The contracts of [tool.importlinter] in pyproject.toml hold."""
    beside_python = str(Path(sys.executable).parent)
    lint_imports = shutil.which("lint-imports", path=beside_python) or shutil.which("lint-imports")
    if lint_imports is None:
        pytest.skip("lint-imports is not installed: pip install 'bessemer[dev]'")
    done = subprocess.run([lint_imports, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_is_light() -> None:
    modules, _ = modules_after(IMPORT)
    assert "bessemer" in modules
    assert modules & HEAVY == set()


def test_help_is_light() -> None:
    modules, printed = modules_after(HELP)
    assert "Usage" in printed
    assert "bessemer.cli.main" in modules
    assert modules & HEAVY == set()


FIRST_STEP = """
import sys
from pathlib import Path
from bessemer.observe.view import RunView
from bessemer.spec.load import load_spec
from bessemer.session.session import train

class View(RunView):
    def step(self, record):
        print(*(name for name in {unused!r} if name in sys.modules))

train(load_spec(Path({spec!r})), View())
"""


def test_the_first_step_of_one_process_loads_no_distributed_tensors_and_no_compiler(tmp_path: Path) -> None:
    """Together they take as long to import as torch itself. (Saves do: torch's checkpoint writer needs DTensor.)"""
    unused = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"]
    rows, spec = tmp_path / "rows.jsonl", tmp_path / "tiny.yaml"
    rows.write_text("".join(json.dumps({"text": f"row {i} of few"}) + "\n" for i in range(40)))
    spec.write_text(
        f"{{name: tiny, runs: {tmp_path}, model: {{width: 16, layers: 1, heads: 2}}, tokenizer: {{vocab: 300}},"
        f" data: {{sources: {{a: {{path: {rows}}}}}, context: 16}}, budget: {{steps: 1, batch: 32}}}}"
    )
    modules, printed = modules_after(FIRST_STEP.format(spec=str(spec), unused=unused))
    assert "torch" in modules
    assert printed == "\n"
