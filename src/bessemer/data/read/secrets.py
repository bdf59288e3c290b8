"""Removes credentials from URLs and refuses them in storage options. A URL may carry a password or a signature; it is
used as it is, but messages, document origins and cache keys hold the redacted form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bessemer.errors import UserError

_SECRET_WORDS = frozenset({
    "key", "keys", "secret", "secrets", "token", "tokens", "password", "passwd", "passphrase", "pwd", "sas",
    "credential", "credentials", "auth", "authorization", "cookie", "signature", "connectionstring",
})  # fmt: skip
# Values of gcsfs's `token` option that name a way to find a token.
_NOT_SECRET = frozenset({"anon", "google_default", "cloud", "browser", "cache"})
# Query parameters of signed URLs (S3, Google Cloud, Azure, CloudFront) whose names hold no secret word.
_SIGNATURE = re.compile(
    r"x-amz-.*|x-goog-.*|awsaccesskeyid|googleaccessid|expires|sig|se|sp|sv|sr|st|spr|skoid|sktid|skt|ske|sks|skv"
    r"|policy|key-pair-id|hdnea|hdnts",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_ENVIRONMENT = {
    **dict.fromkeys(("s3", "s3a"), "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    **dict.fromkeys(("gs", "gcs"), "GOOGLE_APPLICATION_CREDENTIALS"),
    **dict.fromkeys(("az", "abfs", "abfss"), "AZURE_STORAGE_CONNECTION_STRING"),
    "hf": "HF_TOKEN",
}


def redact(path: str) -> str:
    """A path or URL without its password and without the signature in its query: safe to print and to store."""
    if "://" not in path:
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # such as an unclosed bracket
        return re.sub(r"//[^/@]*@", "//", path).partition("?")[0]
    public = []
    for item in filter(None, parts.query.split("&")):
        name = item.partition("=")[0]
        if not (_SIGNATURE.fullmatch(name) or _names_secret(name)):
            public.append(item)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="&".join(public)))


def redact_message(message: object) -> str:
    """An error's text on one line, with every URL in it redacted."""
    text = " ".join(str(message).split())
    return _ADDRESS.sub(lambda match: redact(match.group()), text)


def environment_for(protocol: str) -> str:
    """The environment variables in which a file system's library looks for credentials."""
    return _ENVIRONMENT.get(protocol, "the variables of its library, or a netrc file")


def check_storage_options(storage: Mapping[str, Any], where: str = "storage") -> None:
    """Refuses options that look like secrets: a spec is copied into every run folder and shown in reports."""
    for name, value in storage.items():
        place = f"{where}.{name}"
        if isinstance(value, Mapping):
            check_storage_options(value, place)
        elif isinstance(value, str) and (_names_secret(name) and value not in _NOT_SECRET):
            raise UserError(
                f"{place}: looks like a secret, and specs are copied into run folders; delete it and set it "
                f"in the environment ({environment_for('s3')}; {environment_for('gs')}; {environment_for('az')})"
            )
        elif isinstance(value, str) and redact(value) != value:
            raise UserError(f"{place}: the URL holds a password or signature; set credentials in the environment")


def _names_secret(name: str) -> bool:
    """Compares words, so that `aws_secret_access_key` and `accountKey` match but `keyboard` does not."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    pairs = {first + second for first, second in pairwise(words)}
    return not _SECRET_WORDS.isdisjoint({*words, *pairs, name.lower()})
