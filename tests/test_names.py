"""Names say what they hold, in the words of the field. Vague ones do not come back."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bessemer"
# Names of classes and modules that told a reader nothing, each with what to write instead.
VAGUE = {
    **dict.fromkeys(
        ("about", "each", "here", "there", "kept", "given", "known", "apart", "standing", "silent", "wish", "wishes",
         "way", "kind", "found", "said", "told", "asked", "mine", "whole", "odd", "written", "shown", "afar", "own",
         "again"),
        "say what it holds: StoreInfo, LocalMachine, PerDocumentStep",
    ),
    "sight": "AttentionMask", "shelf": "CheckpointStore", "alike": "ReplicaCheck", "passage": "PipelineRunner",
    "inside": "LayerStats", "look": "LayerSample", "whereabouts": "PhaseTracker", "hearing": "Trial", "court": "Trial",
    "retrial": "run_trial", "room": "memory_fit", "surroundings": "HostLoad", "lean": "low_memory",
    "halves": "split_weights", "holdings": "rank_memory", "utils": "the concept", "helpers": "the concept",
    "common": "the concept", "misc": "the concept", "manager": "the concept",
}  # fmt: skip
VALUES = ("found", "said", "told", "asked", "kept", "mine", "whole", "about", "odd")  # not fields: some are on disk


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


@cache
def bound_names() -> dict[str, list[str]]:
    """Names that functions, lambdas and comprehensions bind, arguments among them, with the places where they do."""
    names: dict[str, list[str]] = {}

    def visit(node: ast.AST, inside: bool, path: Path) -> None:
        inside = inside or isinstance(node, ast.FunctionDef | ast.Lambda | ast.comprehension)
        bound = node.arg if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        if bound and inside:
            names.setdefault(bound, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child, inside, path)

    for path, tree in modules():
        visit(tree, False, path)
    return names


def test_modules() -> None:
    bad = [f"{path.relative_to(SOURCE)}: rather {VAGUE[path.stem]}" for path, _ in modules() if path.stem in VAGUE]
    assert not bad, "\n".join(["a reader would not search for these modules:", *bad])


def test_classes() -> None:
    bad = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: class {node.name}: rather {VAGUE[node.name.strip('_').lower()]}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.strip("_").lower() in VAGUE
    ]
    assert not bad, "\n".join(["a reader would not search for these classes:", *bad])


@pytest.mark.parametrize("word", VALUES)
def test_values(word: str) -> None:
    bad = bound_names().get(word, [])
    assert not bad, "\n".join([f"`{word}` does not say what the value is (losses, error, local_sum, ...):", *bad])


def test_one_class_for_a_name() -> None:
    """The same public class name in two modules means two concepts with one word."""
    places: dict[str, list[str]] = {}
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, twice
