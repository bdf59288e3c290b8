"""Fetches the page's chart library when the package is built: no third-party code lies in the repository.

Only the archive with the checksum below is used. Without a network or a registry the build goes on with a warning, and
`bessemer watch` draws its charts on the server. `python setup.py build_py` fetches it later.
"""

import base64
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE, VERSION = "uplot", "1.6.32"
SHA512 = "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
FILES = {"dist/uPlot.iife.min.js": "uPlot.iife.min.js", "dist/uPlot.min.css": "uPlot.min.css",
         "LICENSE": "uPlot-LICENSE.txt"}  # fmt: skip
FOLDER = Path(__file__).parent / "src/bessemer/watch/page/charts"
DOCS = Path(__file__).parent / "docs"
TIMEOUT_S = 60


def registry() -> str:
    """The npm registry that this machine is configured for; empty if it has none."""
    for name, value in os.environ.items():
        if name.lower() == "npm_config_registry" and value:
            return value
    for path in (Path(".npmrc"), Path.home() / ".npmrc"):
        if path.is_file() and (found := re.search(r"^\s*registry\s*=\s*(\S+)", path.read_text(), re.M)):
            return found[1]
    return ""


def archive() -> bytes:
    """The package's archive, from npm or the configured registry."""
    if npm := shutil.which("npm"):
        with tempfile.TemporaryDirectory() as folder:
            command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True, cwd=folder)
            return next(Path(folder).glob("*.tgz")).read_bytes()
    if not (address := registry()).startswith("https://"):
        raise OSError("npm is not installed, and no registry is configured (npm_config_registry)")
    with urllib.request.urlopen(
        f"{address.rstrip('/')}/{PACKAGE}/-/{PACKAGE}-{VERSION}.tgz", timeout=TIMEOUT_S
    ) as answer:
        return bytes(answer.read())


def fetch() -> None:
    if all((FOLDER / name).is_file() for name in FILES.values()):
        return
    content = archive()
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != SHA512:
        raise OSError(f"{PACKAGE} {VERSION} from the registry has another checksum than expected")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        for source, name in FILES.items():
            member = packed.extractfile(f"package/{source}")
            assert member is not None
            (FOLDER / name).write_bytes(member.read())


class BuildWithCharts(build_py):
    def run(self) -> None:
        try:
            fetch()
        except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError, StopIteration) as error:
            print(f"warning: the chart library was not fetched ({error}): the page's charts are drawn by the server",
                  file=sys.stderr)  # fmt: skip
        super().run()
        if not self.editable_mode and DOCS.is_dir():  # `bessemer mcp` and `assist install` read the pages
            target = Path(self.build_lib) / "bessemer/assist/docs"
            shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns("images"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithCharts})
