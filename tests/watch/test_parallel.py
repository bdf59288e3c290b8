"""Places on the axes of parallel coordinates, computed by the page's own code in Node."""

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

pytest.importorskip("msgspec")

from bessemer.watch.export import as_script

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")


def axis(values: list[Any]) -> dict[str, Any]:
    source = resources.files("bessemer.watch").joinpath("page", "parallel.js").read_text(encoding="utf-8")
    row = json.dumps({"key": "optimizer.lr", "values": values})
    program = (
        f"const show = (_, value) => String(value);\n{as_script(source)}\nconsole.log(JSON.stringify(makeAxis({row})));"
    )
    result = subprocess.run([str(NODE), "-e", program], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def test_numbers_are_spread_and_logarithmic_over_two_decades() -> None:
    assert axis([1, 3, None, 2])["shares"] == [0, 1, None, 0.5]
    assert axis([1e-4, 1e-2, 1e-3])["shares"] == pytest.approx([0, 1, 0.5])
    assert axis([5, 5])["shares"] == [0.5, 0.5] and axis([5, 5])["ticks"] == [[0.5, "5"]]


def test_words_and_mixtures_stand_in_order() -> None:
    assert axis(["adamw", "muon", "adamw", None, "lion"])["shares"] == [0, 1, 0, None, 0.5]
    assert [word for _, word in axis([0.5, "auto"])["ticks"]] == ["0.5", "auto"]
    assert axis([{"a": 1}, True])["ticks"] == [[0, "true"], [1, '{"a":1}']]
