"""The documentation site, built by `make docs`. Its pages load nothing from the network."""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "Bessemer"
author = "the Bessemer authors"
copyright = author
version = release = (ROOT / "src/bessemer/__init__.py").read_text().partition('__version__ = "')[2].partition('"')[0]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "images"]
nitpicky = True  # a reference that leads nowhere is a warning, and `make docs` fails on warnings
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["misc.highlighting_failure"]  # specs and outputs in blocks are not always YAML or shell

html_theme = "furo"
html_title = f"Bessemer {version}"
html_static_path: list[str] = []
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

# Files outside of docs/ are copied into the site where a page links to them. Pages of the repository's root and folders
# cannot be: their links become text.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]*(?:\.md|/)(?:#[^)]*)?)\)")


def drop_links_to_the_repository(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = OUTSIDE.sub(r"\1", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", drop_links_to_the_repository)
