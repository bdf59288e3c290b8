"""The documentation site: it builds without a warning, loads nothing from the network, and mistakes fail the build."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
for package in ("sphinx", "furo", "myst_parser"):
    pytest.importorskip(package, reason="the extra that builds the site is not installed: run `make docs` once")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What a browser would fetch by itself from another host. Links that a reader follows are not.
EXTERNAL = (
    re.compile(r"<(?:script|img|iframe|source|video|embed)\b[^>]*\bsrc\s*=\s*[\"']?(?:https?:)?//[^\s>]*", re.I),
    re.compile(r"<link\b[^>]*\bhref\s*=\s*[\"']?(?:https?:)?//[^\s>]*", re.I),
    re.compile(r"@import\s+(?:url\()?\s*[\"']?(?:https?:)?//[^;]*", re.I),
    re.compile(r"url\(\s*[\"']?(?:https?:)?//[^)]*", re.I),
    re.compile(r"(?:importScripts|import|fetch)\(\s*[\"'](?:https?:)?//[^)]*"),
)


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True)


def external(text: str) -> list[str]:
    return [match[0] for pattern in EXTERNAL for match in pattern.finditer(text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(DOCS, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """With its title, also in the side bar of the first page."""
    index = (site / "index.html").read_text()
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page.name
        assert page.stem == "index" or f'href="{page.stem}.html"' in index, page.name
    assert "中文简介" in index and list((site / "_downloads").rglob("notebook.ipynb"))


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js", ".svg")]
    assert len(files) > 50
    assert {str(path.relative_to(site)): found for path in files if (found := external(path.read_text()))} == {}
    for planted in (
        '<script src="https://cdn.example/x.js">', "<link rel=stylesheet href=//fonts.example/a.css>",
        "@import 'https://fonts.example/a.css';", "src: url(https://fonts.example/a.woff2)",
    ):  # fmt: skip
        assert external(planted), planted


@pytest.mark.parametrize(
    ("page", "text", "message"),
    [
        ("doctor", "\n[gone](nowhere.md)\n", "nowhere.md"),
        ("doctor", "\n[gone](guide.md#no-such-heading)\n", "no-such-heading"),
        ("orphan", "# A page outside of the navigation\n", "toctree"),
    ],
)
def test_a_mistake_fails_the_build(page: str, text: str, message: str, tmp_path: Path) -> None:
    """On a copy with few pages, which builds in seconds."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "src" / "bessemer").mkdir(parents=True)
    shutil.copy(ROOT / "src/bessemer/__init__.py", tmp_path / "src/bessemer")
    shutil.copy(DOCS / "conf.py", docs)
    (docs / "index.md").write_text("# Pages\n\n```{toctree}\nguide\ndoctor\n```\n")
    (docs / "guide.md").write_text("# Guide\n\n## A heading\n\n[back](doctor.md), [here](#a-heading)\n")
    (docs / "doctor.md").write_text(
        "# Doctor\n\n[guide](guide.md#a-heading), [spec](../recipes/), [readme](../README.md)\n"
    )
    done = build(docs, tmp_path / "fine")
    assert done.returncode == 0, done.stderr
    with (docs / f"{page}.md").open("a") as file:
        file.write(text)
    done = build(docs, tmp_path / "site")
    assert done.returncode == 1 and message in done.stderr
