"""Lets the tests of families import their shared proof: `import parity`."""

import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("parity")
sys.path.insert(0, str(Path(__file__).parent))
