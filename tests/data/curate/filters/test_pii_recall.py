"""How much personal data is found, and how much else is taken for it, on generated text (`-s` prints the table).

The generator knows how people write these values and their look-alikes (national telephone plans, bank numbers, log
lines, tables, source code) and nothing of the patterns. A value counts as found when its signs are covered by hits of
its kind; a hit is wrong when it touches no value of its kind.

Templates stand in pii_templates.txt.
"""

from __future__ import annotations

import base64
import hashlib
import random
import re
import string
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.data.curate.filters.pii import Pii, find_pii
from bessemer.data.read.entry import Document
from bessemer.spec.curate.dedup import PII_KINDS, PiiSpec

SEED = 20_261_115
EACH = 330  # positives of each kind: 2,310 in all
ALIKE = 100  # of each sort of look-alike: 2,300 in all

WORDS = """the report was sent after a long meeting about water pumps and nobody read it until spring when the river
rose over its banks so the town had to move its archive into the old mill where volunteers sorted letters maps and
photographs by year and street"""
FIRST = "anna ben carla dmitri elena farid grace hiro ines jack kofi lena marta nils olga pablo qing rosa sven tara zoe"
LAST = "schmidt garcia nguyen kowalski o'neill rossi dubois andersson okafor tanaka ivanov becker haddad novak"
HOSTS = """gmail.com outlook.com yahoo.co.uk web.de orange.fr qq.com proton.me uni-heidelberg.de mit.edu cs.ox.ac.uk
acme-tools.com example.org mail.ru iinet.net.au startup.io studio.photography bbc.co.uk gmx.at t-online.de
freie-schule.berlin company.museum"""
ALPHABETS = {
    "d": string.digits,
    "h": "0123456789abcdef",
    "a": string.ascii_letters + string.digits,
    "l": string.ascii_letters,
    "c": string.ascii_uppercase,
    "u": string.ascii_uppercase + "234567",
    "b": string.ascii_letters + string.digits + "+/",
    "s": string.ascii_letters + string.digits + "_-",
    "p": string.ascii_letters + string.digits + "!$%^&*",
}


def fill(rng: random.Random, template: str) -> str:
    def field(match: re.Match[str]) -> str:
        name = match[1]
        if drawn := re.fullmatch(r"([a-z])(\d+)", name):
            kind, count = drawn[1], int(drawn[2])
            if kind == "n":
                return rng.choice("23456789") + fill(rng, f"{{d{count - 1}}}")
            return "".join(rng.choice(ALPHABETS[kind]) for _ in range(count))
        return FIELDS[name](rng)

    filled = re.sub(r"\{(\w+)\}", field, template)
    return filled.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")


def read_templates() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("pii_templates.txt").read_text("utf-8").split("\n"):
        if line.startswith("== "):
            sections[line[3:]] = []
        elif line and sections:
            sections[list(sections)[-1]].append(line)
    return sections


TEMPLATES = read_templates()


def one_of(rng: random.Random, section: str) -> str:
    return fill(rng, rng.choice(TEMPLATES[section]))


def words(rng: random.Random) -> str:
    every = WORDS.split()
    start = rng.randrange(len(every))
    return " ".join((every * 2)[start : start + rng.randint(2, 9)])


FIELDS: dict[str, Callable[[random.Random], str]] = {
    "w": words,
    "first": lambda rng: rng.choice(FIRST.split()),
    "First": lambda rng: rng.choice(FIRST.split()).title(),
    "last": lambda rng: rng.choice(LAST.split()).replace("'", rng.choice(["", "'"])),
    "host": lambda rng: rng.choice(HOSTS.split()),
    "byte": lambda rng: str(rng.randint(0, 255)),
    "small": lambda rng: str(rng.choice([rng.randint(0, 12), rng.randint(0, 60)])),
    "item": lambda rng: str(rng.randint(1, 20)),
    "year": lambda rng: str(rng.randint(1900, 2030)),
    "month": lambda rng: f"{rng.randint(1, 12):02d}",
    "day": lambda rng: f"{rng.randint(1, 28):02d}",
    "hour": lambda rng: f"{rng.randint(0, 23):02d}",
    "minute": lambda rng: f"{rng.randint(0, 59):02d}",
    "sep": lambda rng: rng.choice("-. "),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128))),
}

# --- values --------------------------------------------------------------------------------------------------------


def email(rng: random.Random) -> str:
    name, host = one_of(rng, "mailboxes"), fill(rng, "{host}")
    name = rng.choice([name, name, name, name.title(), name.upper()])
    if rng.random() < 0.05:
        return f"{name} [at] {host.replace('.', rng.choice([' [dot] ', '.']))}"
    return f"{name}@{host.upper() if rng.random() < 0.05 else host}"


def ssn(rng: random.Random) -> str:
    area = rng.choice([rng.randint(1, 665), rng.randint(667, 899)])
    return f"{area:03d}-{rng.randint(1, 99):02d}-{rng.randint(1, 9999):04d}"


def with_luhn(number: str) -> str:
    total = sum(sum(divmod(int(d) * (1 + (i % 2 == 0)), 10)) for i, d in enumerate(reversed(number)))
    return number + str(-total % 10)


def card_digits(rng: random.Random) -> str:
    master = [f"5{rng.randint(1, 5)}", str(rng.randint(2221, 2720))]
    prefix = rng.choice(["4", "4", *master, "34", "37", "6011", "65", "36", "3530", "62"])
    length = {"34": 15, "37": 15, "36": 14}.get(prefix, 16)
    return with_luhn(prefix + fill(rng, f"{{d{length - 1 - len(prefix)}}}"))


def grouped(number: str, sep: str) -> str:
    parts, at = [], 0
    for size in {15: (4, 6, 5), 14: (4, 6, 4)}.get(len(number), (4, 4, 4, 4)):
        parts.append(number[at : at + size])
        at += size
    return sep.join(parts)


def iban_text(rng: random.Random) -> str:
    country, body = one_of(rng, "ibans").split()
    value = int("".join(str(int(c, 36)) for c in body + country + "00"))
    return f"{country}{98 - value % 97:02d}{body}"


def in_fours(rng: random.Random, value: str) -> str:
    return " ".join(value[i : i + 4] for i in range(0, len(value), 4)) if rng.random() < 0.5 else value


def ip(rng: random.Random) -> str:
    if rng.random() < 0.3:
        groups = [rng.choice(["2a02", "2606", "2001", "2400"])]
        groups += [f"{rng.randint(0x1000, 0xFFFF):x}" for _ in range(7)]
        short = ":".join(groups[: rng.randint(2, 5)]) + "::" + groups[-1]
        return rng.choice([":".join(groups), short])
    first = rng.choice([n for n in range(1, 224) if n not in (10, 127, 192, 172, 198, 203, 169, 100)])
    return fill(rng, f"{first}.{{byte}}.{{byte}}.{{byte}}")


SECRET_NAMES = """api_key API_KEY apiKey SECRET_KEY access_token auth_token client_secret password DB_PASSWORD token key
aws_secret_access_key private_key encryption-key bearer_token"""


def jwt(rng: random.Random) -> str:
    def part(content: str) -> str:
        return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")

    claims = '{"sub":"' + fill(rng, "{d10}") + '"}'
    return ".".join([part('{"alg":"HS256","typ":"JWT"}'), part(claims), fill(rng, "{s43}")])


def pem(rng: random.Random) -> str:
    name = rng.choice(["RSA PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY", "OPENSSH PRIVATE KEY"])
    lines = [fill(rng, "{b64}") for _ in range(rng.randint(3, 25))]
    return "\n".join([f"-----BEGIN {name}-----", *lines, fill(rng, "{a30}=="), f"-----END {name}-----"])


# --- where they stand: at the bar ----------------------------------------------------------------------------------


Placed = tuple[str, int, int]  # a text, and the value in it


def place(rng: random.Random, section: str, value: str, name: str = "") -> Placed:
    text = one_of(rng, section).replace("NAME", name)
    start = text.index("|")
    return text[:start] + value + text[start + 1 :], start, start + len(value)


def placed(rng: random.Random, kind: str, value: str) -> Placed:
    if f"special {kind}" in TEMPLATES and rng.random() < 0.4 and "[at]" not in value:
        return place(rng, f"special {kind}", value)
    return place(rng, "prose" if rng.random() < 0.6 else "data", value)


def positive(rng: random.Random, kind: str) -> Placed:
    if kind == "phone":
        draw = rng.random()
        if draw > 0.8:
            return place(rng, "phone_places", one_of(rng, "plain numbers, which people introduce by a word"))
        value = one_of(rng, "international" if draw < 0.45 else "national")
        return place(rng, "phone_places", value) if rng.random() < 0.4 else placed(rng, kind, value)
    if kind == "api_key":
        if rng.random() < 0.6:
            return placed(rng, kind, rng.choice([lambda rng: one_of(rng, "marked")] * 8 + [jwt, pem])(rng))
        value = one_of(rng, "assigned") if rng.random() < 0.9 else base64.b64encode(rng.randbytes(32)).decode()
        return place(rng, "secret_places", value, rng.choice(SECRET_NAMES.split()))
    if kind == "ssn" and rng.random() < 0.15:  # without hyphens only where it is said what it is
        return place(rng, "special ssn", ssn(rng).replace("-", rng.choice(["", " "])))
    values: dict[str, Callable[[random.Random], str]] = {
        "email": email,
        "ssn": ssn,
        "credit_card": lambda rng: grouped(card_digits(rng), rng.choice(["", " ", "-"])),
        "iban": lambda rng: in_fours(rng, iban_text(rng)),
        "ip": ip,
    }
    return placed(rng, kind, values[kind](rng))


# --- look-alikes: texts without any personal value -----------------------------------------------------------------


def bad_luhn(rng: random.Random) -> str:
    number = card_digits(rng)
    wrong = number[:-1] + str((int(number[-1]) + rng.randint(1, 9)) % 10)
    return grouped(wrong, rng.choice(["", " ", "-"]))


def bad_iban(rng: random.Random) -> str:
    value = iban_text(rng)
    other = f"{(int(value[2:4]) + rng.randint(1, 95)) % 97 + 2:02d}"
    return in_fours(rng, value[:2] + (other if other != value[2:4] else "00") + value[4:])


def version(rng: random.Random) -> str:
    number = ".".join(fill(rng, "{small}") for _ in range(rng.randint(2, 5)))
    return one_of(rng, "versions").replace("V", number)


def section(rng: random.Random) -> str:
    number = ".".join(fill(rng, "{item}") for _ in range(rng.choice([3, 4, 4, 5])))
    return one_of(rng, "sections").replace("N", number)


def digest(rng: random.Random) -> str:
    data = rng.randbytes(8)
    sha512 = base64.b64encode(hashlib.sha512(data).digest()).decode()
    found = [hashlib.md5(data).hexdigest(), hashlib.sha1(data).hexdigest(), hashlib.sha256(data).hexdigest()]
    named = [f"sha256:{found[2]}", f"integrity=sha512-{sha512}", f"etag: {found[0]}", f"commit {found[1][:12]}"]
    return rng.choice([*found, *named])


def maths(rng: random.Random) -> str:
    a, b = (fill(rng, f"{{n{rng.randint(3, 9)}}}") for _ in range(2))
    sums = [f"{a} + {b} = {int(a) + int(b)}", f"x = {a}.{b}", f"{a}-{b}", f"{a} * {b}", f"f({a}, {b})", f"{int(a):,}"]
    more = [f"{a}/{b}", f"({a[:3]}) {b}", f"{a} +{b}", f"2^{a[:3]}", f"-{a}.{b}e+12", f"3.14159265358979{b[:4]}"]
    return rng.choice([*sums, *more, f"[{a}, {b}]"])


def image(rng: random.Random) -> str:
    blob = base64.b64encode(rng.randbytes(rng.choice([60, 300, 900]))).decode()
    wrapped = "\n".join(blob[i : i + 76] for i in range(0, len(blob), 76))
    tag = f'<img src="data:image/png;base64,{blob}">'
    return rng.choice([tag, f"url(data:font/woff2;base64,{blob})", blob, wrapped])


def table(rng: random.Random) -> str:
    width, gap = rng.choice([2, 3, 4, 5, 6]), rng.choice([" ", "  ", "\t", ", ", ","])
    return "\n".join(gap.join(fill(rng, f"{{d{width}}}") for _ in range(8)) for _ in range(3))


MADE = (version, section, digest, maths, image, table, bad_luhn, bad_iban)

# --- the measurement -----------------------------------------------------------------------------------------------


def look_alike(rng: random.Random, sort: str) -> str:
    make = {make.__name__: make for make in MADE}.get(sort)
    value = make(rng) if make else one_of(rng, f"written {sort}")
    return placed(rng, "look-alike", value)[0]


WRITTEN = [section.removeprefix("written ") for section in TEMPLATES if section.startswith("written ")]
SORTS = [*WRITTEN, *(make.__name__ for make in MADE)]


def measure(seed: int = SEED, each: int = EACH, alike: int = ALIKE) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts for each kind, and every mistake in words."""
    rng = random.Random(seed)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in PII_KINDS}
    wrong: list[str] = []
    for kind in PII_KINDS:
        for _ in range(each):
            text, start, end = positive(rng, kind)
            hits = find_pii(text, PII_KINDS)
            covered = {i for hit in hits if hit.kind == kind for i in range(hit.start, hit.end)}
            found = all(i in covered for i in range(start, end) if text[i].isalnum())
            counts[kind].update(positives=1, found=found)
            if not found:
                wrong.append(f"missed {kind}: {text!r}")
            for hit in hits:
                right = hit.kind == kind and hit.start < end and start < hit.end
                counts[hit.kind].update(right=right, false=not right)
                if not right:
                    wrong.append(f"false {hit.kind} {text[hit.start : hit.end]!r} in {text!r}")
    for sort in SORTS:
        for _ in range(alike):
            text = look_alike(rng, sort)
            for hit in find_pii(text, PII_KINDS):
                counts[hit.kind].update(false=1)
                wrong.append(f"false {hit.kind} {text[hit.start : hit.end]!r} from {sort} in {text[:200]!r}")
    return counts, wrong


def table_of(counts: dict[str, Counter[str]]) -> str:
    total: Counter[str] = sum(counts.values(), Counter())
    lines = [f"{'kind':12} {'positives':>9} {'found':>6} {'false':>6} {'recall':>7} {'precision':>9}"]
    for kind, count in [*counts.items(), ("all", total)]:
        numbers = f"{count['positives']:>9} {count['found']:>6} {count['false']:>6}"
        lines.append(f"{kind:12} {numbers} {rates(count)[0]:>7.4f} {rates(count)[1]:>9.4f}")
    return "\n".join(lines)


def rates(count: Counter[str]) -> tuple[float, float]:
    return count["found"] / count["positives"], count["right"] / (count["right"] + count["false"])


def test_generated_personal_data_is_found_and_look_alikes_are_left() -> None:
    counts, wrong = measure()
    print("\n" + table_of(counts))
    print(f"{ALIKE * len(SORTS):,} look-alikes of {len(SORTS)} sorts; everything that went wrong:")
    print("\n".join(wrong))
    assert sum(count["positives"] for count in counts.values()) >= 2_000
    assert ALIKE * len(SORTS) >= 2_000
    for kind, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        recall, precision = rates(count)
        assert recall >= 0.98, (kind, recall)
        assert precision >= 0.97, (kind, precision)


@pytest.mark.parametrize("kind", PII_KINDS)
def test_the_generator_makes_many_different_texts(kind: str) -> None:
    rng = random.Random(SEED)
    assert len({positive(rng, kind)[0] for _ in range(200)}) > 190


def test_what_is_redacted_stays_redacted() -> None:
    """Placeholders are not taken for personal data, nor do they make something out of their surroundings."""
    rng = random.Random(SEED)
    step = Pii(PiiSpec(placeholders="numbered"), 0)
    for kind in PII_KINDS:
        for _ in range(60):
            [redacted] = step.apply([Document(positive(rng, kind)[0], "f", 1)])
            if isinstance(redacted, str):
                assert step.apply([Document(redacted, "f", 1)]) == [None], (kind, redacted)
