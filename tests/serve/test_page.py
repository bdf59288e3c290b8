"""The chat page in a real browser: type, stream, stop, markup in an answer, the width of a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None or shutil.which("npm") is None, reason="needs Chromium and npm")
def test_the_chat_page(server, tmp_path):
    script = shutil.copy(Path(__file__).with_name("page_test.mjs"), tmp_path)
    for command in (["npm", "install", "--no-audit", "--no-fund", "playwright-core"],
                    ["node", script, server.url, CHROMIUM]):  # fmt: skip
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
