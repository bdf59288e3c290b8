"""What must not be shown: credentials in addresses and in the options of a remote file system. An address may carry a
password or a signature, since some servers give no other way in. It is used as it is, but messages, origins and keys
have it without them."""

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
# What gcsfs takes as `token` without it being one: ways of finding a token.
_NOT_SECRET = frozenset({"anon", "google_default", "cloud", "browser", "cache"})
# Parameters of signed addresses beside those whose names say it: S3, Google Cloud, Azure, CloudFront.
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


def shown(path: str) -> str:
    """A path or URL as it may be printed and stored: without a password and without the signature of its query."""
    if "://" not in path:
        return path
    try:
        parts = urlsplit(path)
    except ValueError:  # such as a bracket that is no IPv6 address
        return re.sub(r"//[^/@]*@", "//", path).partition("?")[0]
    host = parts.netloc.rpartition("@")[2]
    kept = [item for item in parts.query.split("&") if item and not _is_secret(item.partition("=")[0])]
    return urlunsplit(parts._replace(netloc=host, query="&".join(kept), fragment=parts.fragment))


def redacted(message: object) -> str:
    """An error's text on one line, every address in it shown as `shown` does."""
    text = " ".join(str(message).split())
    return _ADDRESS.sub(lambda match: shown(match.group()), text)


def environment_for(protocol: str) -> str:
    """Where the libraries of a file system look for credentials, in words for a message."""
    return _ENVIRONMENT.get(protocol, "the variables of its library, or a netrc file")


def check_storage(storage: Mapping[str, Any], where: str = "storage") -> None:
    """Refuses options that look like secrets: a spec is copied into every run's folder and shown in reports."""
    for name, value in storage.items():
        place = f"{where}.{name}"
        if isinstance(value, Mapping):
            check_storage(value, place)
        elif isinstance(value, str) and (_names_secret(name) and value not in _NOT_SECRET):
            raise UserError(
                f"{place}: looks like a secret, and a spec is copied into the run's folder; delete it here and set it "
                f"in the environment ({environment_for('s3')}; {environment_for('gs')}; {environment_for('az')})"
            )
        elif isinstance(value, str) and shown(value) != value:
            raise UserError(f"{place}: the address holds a password or signature; set it in the environment")


def _is_secret(name: str) -> bool:
    return bool(_SIGNATURE.fullmatch(name)) or _names_secret(name)


def _names_secret(name: str) -> bool:
    """By whole words, so that `aws_secret_access_key` and `accountKey` are found, and `keyboard` is not."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    lowered = [word.lower() for word in words]
    pairs = {first + second for first, second in pairwise(lowered)}
    return not _SECRET_WORDS.isdisjoint({*lowered, *pairs, name.lower()})
