"""No secret in a generated file: known forms of tokens, and the values of this environment's own secrets.

A finding names file, line and kind, never the secret. Keys reach a run through the environment, `.env`, or the target's
store of secrets, by name.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping

from bessemer.errors import UserError

# The keys that targets hand on by name; .env.example says how to get each.
KEYS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

PATTERNS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret key": r"(?i)aws_secret_access_key[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+]{40}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "an API key that begins with sk-": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a Modal token": r"\ba[ks]-[A-Za-z0-9]{20,}\b",
    "a W&B key": r"(?i)\b(?:wandb[a-z_]*key|api_key)[\"']?\s*[:=]\s*[\"']?(?:[0-9a-f]{40}\b|wandb_v\d_\w{20,})",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\b[a-z][a-z0-9+.-]*://[^\s/:@$]+:[^\s/:@$]{3,}@",
}
SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:api_?)?(?:key|token|secret|password|passwd|credentials?|auth)(?:_|$|id$)")
SHORTEST = 12
LEAST_BITS = 2.5  # a character; English words are near 4 over their letters, but short and with few of them


def entropy_bits(text: str) -> float:
    """Shannon entropy of its characters, in bits a character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) if text else 0.0


def environment_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Values that look like secrets, by variable: a telling name, long, many different characters, no path."""
    return {
        name: value
        for name, value in environment.items()
        if SECRET_NAME.search(name)
        and len(value) >= SHORTEST
        and entropy_bits(value) >= LEAST_BITS
        and not value.startswith(("/", "~", "./"))
        and " " not in value
    }


def find_secrets(name: str, text: str, environment: Mapping[str, str]) -> list[str]:
    """`FILE:LINE: kind` of each finding."""
    own = environment_secrets(environment)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        kinds = [kind for kind, pattern in PATTERNS.items() if re.search(pattern, line)]
        kinds += [f"the value of {variable}" for variable, value in own.items() if value in line]
        found += [f"{name}:{number}: {kind}" for kind in kinds]
    return found


def refuse_secrets(files: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
    """Raise UserError, one line for each secret, if there is any."""
    known = os.environ if environment is None else environment
    found = [finding for name, text in files.items() for finding in find_secrets(name, text, known)]
    if found:
        fix = "; nothing was written: take it out of the spec or option it came from, and set it in the environment"
        raise UserError("\n".join(f"{finding}{fix}" for finding in found))
