"""The `pii` step: what it finds at the edges of each rule, and that placeholders depend on nothing but the values."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bessemer.data.curate.filters.pii import Pii, entropy_bits, find_pii
from bessemer.data.curate.filters.pii_numbers import luhn
from bessemer.data.curate.step import Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.dedup import PII_KINDS, PiiSpec
from bessemer.spec.data import STEPS

TEXT = "Write to jo@acme.org or ann@acme.org, then to JO@acme.org; or ring +49 30 123456 (030/123456)."


def found(text: str, *kinds: Any, private_ips: bool = False) -> list[str]:
    return [text[hit.start : hit.end] for hit in find_pii(text, kinds or PII_KINDS, private_ips)]


def run(text: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    document = Document(text, "f", 1)
    [outcome] = Pii(PiiSpec(**settings), 0).apply([document])
    return outcome, document.labels


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b+c@d-e.co.uk", ["a.b+c@d-e.co.uk"]),
        ("'o'hara@x.org'", ["o'hara@x.org"]),
        ("müller@straße.de and пётр@почта.рф", ["müller@straße.de", "пётр@почта.рф"]),
        ("请写信给zhang@qq.com谢谢", ["zhang@qq.com"]),
        ('"\\nbob@x.org\\n"', ["bob@x.org"]),
        ("?to=bob@x.org&cc=%20ann@x.org", ["bob@x.org", "ann@x.org"]),
        ("mail jo [at] x [dot] org or jo(at)x.org", ["jo [at] x [dot] org", "jo(at)x.org"]),
        ("bob@[192.0.2.1]", ["bob@[192.0.2.1]"]),
        ("x" * 64 + "@x.org", ["x" * 64 + "@x.org"]),
        ("x" * 65 + "@x.org", []),
        ("bob@x.org.", ["bob@x.org"]),
        ("bob@host", []),
        ("@property @app.route x@ @x.org", []),
        ("icon@2x.png getty@tty1.service", []),
        ("look (at) this or that", []),
        ("git@github.com:a/b.git u@h.org:/srv ssh -p 22 u@h.org ssh://git@h.org/x", []),
        ("for ssh access write to u@h.org", ["u@h.org"]),
        ("https://name@h.org/x https://$A:$B@h.org", []),
        ("aes128-gcm@openssh.com", []),
    ],
)
def test_emails(text: str, expected: list[str]) -> None:
    assert found(text, "email") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+1 212 555 0199", ["+1 212 555 0199"]),
        ("+1 212 555 019", []),  # a digit too few, and one too many
        ("+1 212 555 01999", []),
        ("+44 (0)20 7946 0958", ["+44 (0)20 7946 0958"]),
        ("+12125550199, +999 212 555 0199", ["+12125550199"]),  # there is no +999
        ("x+12125550199", []),
        ("7 + 12125550199", []),
        ("(212) 555-0199 (112) 555-0199", ["(212) 555-0199", "(112) 555-0199"]),
        ("212-555-0199. 212-155-0199.", ["212-555-0199"]),  # no exchange begins with 1
        ("order 212-555-0199", []),
        ("order by phone: 212-555-0199", ["212-555-0199"]),
        ("CVE-2014-81480, phone-2014-81480", []),
        ("01 23 45 67 80. Bytes 01 02 03 04 05", ["01 23 45 67 80"]),
        ("212 555 0199 212 555 0188 100", []),  # a row of a table
        ("030/123456. 030-12345", ["030/123456"]),
        ("+49 30 123456 (030/123456)", ["+49 30 123456", "030/123456"]),
        ("5550199", []),
        ("Tel. 5550199", ["5550199"]),
        ("Tel. 555-0142, 5550143, 555014", ["555-0142", "5550143"]),
        ("Tel. 555-0142 and 20000000", ["555-0142"]),
        ("Tel. 212 555 0142, 2125550143", ["212 555 0142", "2125550143"]),
        ("Tel. 030/123456 but 5550199", ["030/123456"]),  # a word speaks for the next number only,
        ("a motel" + " and" * 9 + " 5550199", []),  # and a part of one for none
        ("tel 555019", []),
        ("Fax 2023-01-15", []),
        ("call 5550199 times", []),
        ("Call 2125550199", ["2125550199"]),
        ("Call us at 5550199", ["5550199"]),
        ("006435 254463 and 0064 35 254463", ["0064 35 254463"]),
        ("电话：13812345678", ["13812345678"]),
        ("£2125550199 2125550199", []),
        ("spring\n666-10-1962", []),
        ("0049 30 123456. 0045 0004 06 00", ["0049 30 123456"]),
        ("12:06 1083555", []),
        ("041 117 132\n133 112 255", []),
    ],
)
def test_phones(text: str, expected: list[str]) -> None:
    assert found(text, "phone") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123-45-6789", ["123-45-6789"]),
        ("001-01-0001 899-99-9999", ["001-01-0001", "899-99-9999"]),
        ("000-45-6789 666-45-6789 900-45-6789 123-00-6789 123-45-0000", []),
        ("078-05-1120", []),  # printed in an advertisement
        ("123456789 123 45 6789", []),
        ("SSN 123456789, SSN: 123 45 6789, SSN#123-45-6789", ["123456789", "123 45 6789", "123-45-6789"]),
        ("part 123-45-6789", []),
        ("x-123-45-6789 123-45-6789-0 1123-45-6789 123-45-67890", []),
    ],
)
def test_social_security_numbers(text: str, expected: list[str]) -> None:
    assert found(text, "ssn") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4111 1111 1111 1111", ["4111 1111 1111 1111"]),
        ("4111-1111-1111-1111 and 4111111111111111", ["4111-1111-1111-1111", "4111111111111111"]),
        ("4111111111111112", []),
        ("3782 822463 10005", ["3782 822463 10005"]),
        ("5555555555554444, 2223003122003222", ["5555555555554444", "2223003122003222"]),
        ("2220990000000002", []),  # Luhn holds, but Mastercard begins at 2221
        ("1111111111111117", []),  # no network
        ("4222222222222", []),  # thirteen digits are rarely a card,
        ("Visa 4222222222222", ["4222222222222"]),  # unless they are called one
        ("0.4111111111111111 x4111111111111111 fuzzer-4111111111111111", []),
        ("4111111111111111*x", []),
        ("1234 4111 1111 1111 1111 1234", []),
        ("4111111111111111 4111111111111111 #4111111111111111", []),  # a row of numbers
    ],
)
def test_credit_cards(text: str, expected: list[str]) -> None:
    assert found(text, "credit_card") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DE89370400440532013000", ["DE89370400440532013000"]),
        ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFF", ["DE89 3704 0044 0532 0130 00"]),
        ("GB82 WEST 1234 5698 7654 32.", ["GB82 WEST 1234 5698 7654 32"]),
        ("DE87370400440532013000 DE88370400440532013000 DE8937040044053201300 DE893704004405320130000", []),
        ("AB12 3456 DE89370400440532013000", ["DE89370400440532013000"]),
        ("XX89370400440532013000 ADE89370400440532013000", []),
        ("de89370400440532013000", ["de89370400440532013000"]),
        (
            "pay to nl91abna0417164300 or De89 3704 0044 0532 0130 00",
            ["nl91abna0417164300", "De89 3704 0044 0532 0130 00"],
        ),
        ("gb82 west 1234 5698 7654 32 fr1420041010050500013M02606", ["gb82 west 1234 5698 7654 32"]),
        ("iban fr1420041010050500013m02606", ["fr1420041010050500013m02606"]),
        (
            "DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00",
            ["DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00"],
        ),
        ("de87370400440532013000 be5c5f2ac04db35e in12 many more words that come", []),
        ("iban: de89370400440532013000", ["de89370400440532013000"]),
    ],
)
def test_ibans(text: str, expected: list[str]) -> None:
    assert found(text, "iban") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("93.184.216.34", ["93.184.216.34"]),
        ("93.184.216.256 093.184.216.34 93.184.216", []),
        ("1.93.184.216.34 93.184.216.34.1", []),
        ("8.8.8.8 or 63.63.63.63 or 31.99.99.99", []),  # sections and versions
        ("1.1.1.100 64.1.1.1 32.99.1.1", ["1.1.1.100", "64.1.1.1", "32.99.1.1"]),
        ("2023-10-10 13:55:36 8.8.8.8 up", ["8.8.8.8"]),
        ("for root from 8.8.8.8 port 22", ["8.8.8.8"]),
        ("ping 8.8.8.8, 8.8.4.4:53, 8.8.0.0/16", ["8.8.8.8", "8.8.4.4", "8.8.0.0"]),
        ("version 93.184.216.34 lib-93.184.216.34 v93.184.216.34 93.184.216.34-beta", []),
        ('ObjectIdentifier("1.3.101.110")', []),
        ("hosts 10.0.0.0 10.255.255.255 192.168.0.0 169.254.255.255 255.255.255.255", []),
        (
            "9.255.255.255, host 11.0.0.0, 172.15.255.255, 172.32.0.0",
            ["9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0"],
        ),
        ("10.0.0.1 192.168.1.1 127.0.0.1 203.0.113.9 239.0.0.1", []),
        ("2606:2800:220:1:248:1893:25c8:1946.", ["2606:2800:220:1:248:1893:25c8:1946"]),
        ("[2a02::1]:443", ["2a02::1"]),
        ("::ffff:93.184.216.34 from ::ffff:5db8:d822", ["::ffff:93.184.216.34", "::ffff:5db8:d822"]),
        ("[::ffff:8.8.8.8]:443 64:ff9b::5db8:d822 ::8.8.4.4", ["::ffff:8.8.8.8", "64:ff9b::5db8:d822", "::8.8.4.4"]),
        ("::ffff:192.168.0.1 ::ffff:0a00:0001 64:ff9b::10.0.0.1", []),
        ("2001:db8::1 fe80::1 ::1 fd00::1", []),
        ("std::a1 12:30:45 00:1a:2b:3c:4d:5e x[1::2] 2006::", []),
    ],
)
def test_ip_addresses(text: str, expected: list[str]) -> None:
    assert found(text, "ip") == expected


def test_private_addresses_are_found_when_asked_for() -> None:
    text = "host 10.0.0.1, 192.168.7.200, 2001:db8::1, fe80::1, ::1, 93.184.216.34"
    assert found(text, "ip", private_ips=True) == [
        "10.0.0.1",
        "192.168.7.200",
        "2001:db8::1",
        "fe80::1",
        "::1",
        "93.184.216.34",
    ]


PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "\n".join(["MIIEpAIBAAKCAQEA" * 4] * 6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AKIAIOSFODNN7EXAMPLE", ["AKIAIOSFODNN7EXAMPLE"]),
        ("AKIAIOSFODNN7EXAMPL XAKIAIOSFODNN7EXAMPLE AKIAIOSFODNN7EXAMPLEA", []),
        ("ghp_" + "a1B2" * 9, ["ghp_" + "a1B2" * 9]),
        ("ghp_" + "a1B2" * 8 + "a1B", []),
        ("glpat-a1B2c3D4e5F6g7H8i9J0", ["glpat-a1B2c3D4e5F6g7H8i9J0"]),
        ("xoxb-123456789012-abcdefABCDEF", ["xoxb-123456789012-abcdefABCDEF"]),
        ("AIza" + "a1B2c" * 7, ["AIza" + "a1B2c" * 7]),
        ("sk_live_" + "a1B2" * 4, ["sk_live_" + "a1B2" * 4]),
        ("sk-q7Zk2Pw9Xr4Tn8VbLm3Y", ["sk-q7Zk2Pw9Xr4Tn8VbLm3Y"]),
        ("task-force-141-and-more-of-it sk-fading-circle-of-number2", []),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"]),
        (f"{PEM}\n-----END RSA PRIVATE KEY-----\nrest", [f"{PEM}\n-----END RSA PRIVATE KEY-----"]),
        (f"{PEM}\nand then it was cut off", [PEM]),
        ("the header -----BEGIN PRIVATE KEY----- and -----END PRIVATE KEY-----", []),
        ("-----BEGIN PRIVATE KEY-----\n" + "MIIEpAIB" * 7 + "\n-----END PRIVATE KEY-----", []),  # too short
        ("https://joe:s3cret!@h.org/x", ["s3cret!"]),
        ("https://joe:password@h.org https://${U}:${P1}@h.org https://u:wachtwoord@h.org", []),
        ('api_key = "q7Zk2Pw9Xr4Tn8Vb"', ["q7Zk2Pw9Xr4Tn8Vb"]),
        ('api_key = "q7Zk2Pw9Xr4Tn8V"', []),  # fifteen signs
        ('"password": "q7Zk2Pw9Xr4Tn8Vb",', ["q7Zk2Pw9Xr4Tn8Vb"]),
        ("TOKEN=q7Zk2Pw9Xr4Tn8Vb", ["q7Zk2Pw9Xr4Tn8Vb"]),
        ('colour = "q7Zk2Pw9Xr4Tn8Vb"', []),
        ('public_key = "q7Zk2Pw9Xr4Tn8Vb"', []),
        ('api_key = "aaaaaaaa11111111"', []),  # two signs are not random,
        ('api_key = "a1a1a1a1a1a1a1a1"', []),  # not even in turn
        ('api_key = "organisationNumber1"', []),
        ("private_key: PKCS12PrivateKeyTypes,", []),
        ("sk-ecdsa-sha2-nistp256-cert-v01", []),
        ("api_key = base64.b64decode2(q7)", []),
        ("?key=q7Zk2Pw9Xr4Tn8Vb&usp=sharing", ["q7Zk2Pw9Xr4Tn8Vb"]),
    ],
)
def test_api_keys(text: str, expected: list[str]) -> None:
    assert found(text, "api_key") == expected


def test_the_checks_against_slow_ones() -> None:
    def slow_luhn(number: str) -> bool:
        doubled = [int(d) * (2 if i % 2 else 1) for i, d in enumerate(number[::-1])]
        return sum(int(d) for value in doubled for d in str(value)) % 10 == 0

    assert all(luhn(str(n)) == slow_luhn(str(n)) for n in range(1000, 3000))
    assert entropy_bits("abcd") == 2.0 and entropy_bits("aaaa") == 0.0


def test_a_value_belongs_to_one_kind_and_the_most_certain_one() -> None:
    hits = find_pii("Tel 4111111111111111 or 5550199@sms.org", PII_KINDS)
    assert [(hit.kind, hit.value) for hit in hits] == [
        ("credit_card", "4111111111111111"),
        ("email", "5550199@sms.org"),
    ]


def test_placeholders() -> None:
    text, labels = run(TEXT)
    assert text == "Write to <EMAIL> or <EMAIL>, then to <EMAIL>; or ring <PHONE> (<PHONE>)."
    assert labels == {"pii_email": 3, "pii_phone": 2}
    text, _ = run(TEXT, placeholders="numbered", form="[{}]")
    assert text == "Write to [EMAIL_1] or [EMAIL_2], then to [EMAIL_1]; or ring [PHONE_1] ([PHONE_2])."
    assert run(TEXT, kinds=["phone"])[0].startswith("Write to jo@acme.org")


def test_one_value_in_two_writings_is_one_value() -> None:
    text, _ = run(
        "+44 (0)20 7946 0958 +442079460958 DE89370400440532013000 DE89 3704 0044 0532 0130 00", placeholders="numbered"
    )
    assert text == "<PHONE_1> <PHONE_1> <IBAN_1> <IBAN_1>"
    assert run("Jo [at] X [dot] org, jo@x.org", placeholders="numbered")[0] == "<EMAIL_1>, <EMAIL_1>"


def test_hashed_placeholders_need_a_key_and_hang_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESSEMER_PII_KEY", raising=False)
    with pytest.raises(UserError, match="BESSEMER_PII_KEY"):
        run(TEXT, placeholders="hashed")
    texts = {}
    for key in ("one", "two"):
        monkeypatch.setenv("BESSEMER_PII_KEY", key)
        step = Pii(PiiSpec(placeholders="hashed"), 0)
        texts[key], _ = run(TEXT, placeholders="hashed")
        assert key not in step.identity and len(step.identity) == 10
        secret = hashlib.blake2b(key.encode()).digest()
        expected = hashlib.blake2b(b"jo@acme.org", key=secret, digest_size=5).hexdigest()
        assert texts[key].count(f"<EMAIL_{expected}>") == 2
    assert texts["one"] != texts["two"]
    monkeypatch.setenv("MINE", "one")
    assert run(TEXT, placeholders="hashed", key_env="MINE")[0] == texts["one"]


@pytest.mark.parametrize("placeholders", ["plain", "numbered", "hashed"])
def test_output_does_not_depend_on_how_the_work_is_split(placeholders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that rotates inside a process gives other text for every division of the same corpus."""
    monkeypatch.setenv("BESSEMER_PII_KEY", "k")
    texts = [f"{n}: a{n % 3}@x.org, a{n % 2}@x.org, ping 8.8.8.{n}" for n in range(12)]

    def split(size: int, order: int) -> list[Any]:
        outcomes = {}
        parts = [list(range(start, min(start + size, 12))) for start in range(0, 12, size)]
        for part in parts[::order]:
            step = Pii(PiiSpec(placeholders=placeholders), 0)  # another process
            documents = [Document(texts[n], "f", n + 1) for n in part]
            outcomes.update(zip(part, step.apply(documents), strict=True))
        return [outcomes[n] for n in range(12)]

    assert all(split(size, order) == split(12, 1) for size, order in itertools.product((1, 2, 5), (1, -1)))


def test_documents_can_go_and_reasons_hold_no_values() -> None:
    assert run(TEXT, action="drop") == (Drop("personal data", 5), {"pii_email": 3, "pii_phone": 2})
    assert run(TEXT, drop_above=4)[0] == Drop("too much personal data", 5)
    assert isinstance(run(TEXT, drop_above=5)[0], str)
    assert run("nothing here", action="drop") == (None, {})


@pytest.mark.parametrize("text", ["", " \n\t ", "plain words"])
def test_text_without_personal_data_stays(text: str) -> None:
    assert run(text) == (None, {})


NEEDED = {"block_urls": {"words": ["x"]}, "opt_out": {"domains": ["x.org"]}, "toxicity": {"classifier": "x"}}


SPECS = [STEPS[name] for name in ("pii", "block_urls", "opt_out", "language", "toxicity")]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.step)
def test_every_setting_is_described_and_its_examples_are_accepted(spec: Any) -> None:
    for name, field in spec.model_fields.items():
        assert field.description and field.examples
        for example in field.examples:
            spec.model_validate({spec.step: NEEDED.get(spec.step, {}) | {name: example}})


BAD = [{"form": "EMAIL"}, {"form": "{} {}"}, {"form": " {} "}, {"kinds": []}, {"kinds": ["email", "email"]}]


@pytest.mark.parametrize("settings", [*BAD, {"kinds": ["name"]}, {"drop_above": -1}, {"key_env": "A-B"}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PiiSpec(**settings)


PIECES = (
    "jo@acme.org|@|212-555-0199|+49 30 123456|4111 1111 1111 1111|DE89370400440532013000|8.8.8.8|93.184.216.34|2a02::1|"
    "123-45-6789|key=|q7Zk2Pw9Xr4Tn8Vb|AKIAIOSFODNN7EXAMPLE|tel | |,|\n|.|-|:|(|é|1|00|a"
)


@given(st.lists(st.sampled_from(PIECES.split("|")), max_size=12).map("".join))
def test_hits_are_ordered_apart_and_inside_the_text(text: str) -> None:
    hits = find_pii(text, PII_KINDS, private_ips=True)
    assert all(0 <= hit.start < hit.end <= len(text) for hit in hits)
    assert all(a.end <= b.start for a, b in itertools.pairwise(hits))
    redacted, labels = run(text, private_ips=True)
    expected, at = "", 0
    for hit in hits:
        expected += f"{text[at : hit.start]}<{hit.kind.upper()}>"
        at = hit.end
    assert redacted == (expected + text[at:] if hits else None)
    assert sum(labels.values()) == len(hits)


# Each makes some pattern start at every place, or run to the end and come back.
NASTY_PIECES = (
    "1|1 |123 |1-|1.|(1|+1|01 23 |0|a@|a@a.|@|a.|eyJ|eyJaaaaaaaaaa.|eyJaaaaaaaaaa.eyJ|sk-|sk-a|ghp_|xoxb-a-|key=|::|1:|"
    "-----BEGIN PRIVATE KEY-----|-----BEGIN PRIVATE KEY-----MIIE|key='aB3xZ9qW7rT5yU1i |://a:b|DE89 3704 |AB12CDEF|"
    "1.2.3.4 |4111 1111 |tel |call 555-|+49 30 |(at)|a [at] a [dot] |Bearer aaaaaaaaaaaaaaaaaaaa|=aaaaaaaaaaaaaaaa1A|"
    "0123456789abcdef|é@é.é|00 49 |ssh |ssh -a "
)
NASTY = NASTY_PIECES.split("|")


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_no_text_of_100_kb_is_slow() -> None:
    for piece in NASTY:
        find_pii((piece * (100_000 // len(piece)))[:100_000] + "x@", PII_KINDS)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("piece", NASTY)
def test_no_text_of_a_megabyte_is_slow(piece: str) -> None:
    find_pii((piece * (1_000_000 // len(piece)))[:1_000_000] + "x@", PII_KINDS)
