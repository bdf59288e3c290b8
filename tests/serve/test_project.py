"""The starter projects: placeholders, names, and (slow) that they build and work with each other."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.starters.project import SERVED, new_project

PG = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.mark.parametrize("kind", SERVED)
def test_files_and_placeholders(kind, tmp_path):
    result = CliRunner().invoke(app, ["new", kind, str(tmp_path / "my-shop")])
    assert result.exit_code == 0, result.output
    files = [path for path in (tmp_path / "my-shop").rglob("*") if path.is_file()]
    assert {".env.example", ".gitignore", "README.md"} <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        assert "{{" not in text.replace("${{", "") or path.suffix in (".jsx", ".mjs"), path
        assert "{{project}}" not in text and path.suffix != ".tmpl"
    keys = re.findall(r"^\w+_KEY=(.*)$", (tmp_path / "my-shop" / ".env.example").read_text(), re.M)
    assert keys and set(keys) == {"my-shop_development_your_key_here"}
    ignored = (tmp_path / "my-shop" / ".gitignore").read_text()
    assert ".env" in ignored


def test_mistakes(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for kind, name, message in (("site", "x", "cluster, endpoint or web-form"), ("endpoint", "My Shop", "lower-case"),
                                ("endpoint", "taken", "exists already")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            new_project(kind, tmp_path / name)


@pytest.mark.slow
def test_the_endpoints_own_tests(tmp_path):
    new_project("endpoint", tmp_path / "shop")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path / "shop")]
    result = subprocess.run(command, cwd=tmp_path / "shop", capture_output=True, text=True)
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
def test_the_container_file_starts_the_endpoint(tmp_path):
    """What its lines do, without a container: the files that it copies are enough for the command, its requirements are
    met here, and its health check passes."""
    new_project("endpoint", tmp_path / "shop")
    lines = (tmp_path / "shop" / "Dockerfile").read_text().splitlines()
    image = tmp_path / "image"
    image.mkdir()
    for line in lines:
        if line.startswith("COPY"):
            *sources, target = line.split()[1:]
            for source in sources:
                shutil.copy(tmp_path / "shop" / source, image / target)
    assert "-r requirements.txt" in next(line for line in lines if line.startswith("RUN pip install"))
    for line in (image / "requirements.txt").read_text().splitlines():
        requirement = Requirement(line)
        assert version(requirement.name) in requirement.specifier, line
    port = str(free_port())
    assert lines.index("USER app") < len(lines) - 1 and lines[-1].startswith("CMD")
    check, start = (
        json.loads(next(line for line in lines if line.startswith(begin)).removeprefix(begin).replace("8080", port))
        for begin in ("HEALTHCHECK CMD ", "CMD ")
    )
    process = subprocess.Popen([sys.executable, "-m", *start], cwd=image, env={**os.environ, "APP_KEY": "key"})
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        assert check[0] == "python"
        assert subprocess.run([sys.executable, *check[1:]], cwd=image).returncode == 0
    finally:
        process.terminate()
        process.wait()
    assert subprocess.run([sys.executable, *check[1:]], cwd=image, capture_output=True).returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_form_builds_and_asks_the_endpoint(tmp_path, server):
    """Model, endpoint and form as three servers; a text goes through all of them."""
    for kind, name in (("endpoint", "shop"), ("web-form", "form")):
        new_project(kind, tmp_path / name)
    form = tmp_path / "form"
    env = {**os.environ, "NEXT_TELEMETRY_DISABLED": "1"}
    for command in (["npm", "install", "--no-audit", "--no-fund"], ["npm", "test"], ["npm", "run", "build"]):
        result = subprocess.run(command, cwd=form, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    ports = [free_port(), free_port()]
    endpoint = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "app:app", "--port", str(ports[0])], cwd=tmp_path / "shop",
        env=env | {"MODEL_URL": f"{server.url}/v1", "APP_KEY": "key"},
    )  # fmt: skip
    site = subprocess.Popen(
        ["node", "node_modules/next/dist/bin/next", "start", "-p", str(ports[1])], cwd=form,
        env=env | {"ENDPOINT_URL": f"http://127.0.0.1:{ports[0]}", "ENDPOINT_KEY": "key"},
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{ports[0]}/health")
        page = wait_for(f"http://127.0.0.1:{ports[1]}/")
        assert "form</h1>" in page and "your_key_here" not in page
        request = urllib.request.Request(
            f"http://127.0.0.1:{ports[1]}/api/predict", json.dumps({"text": "hello"}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        assert answer["task"] == "generate" and answer["text"] and answer["stored"] is False
    finally:
        for process in (endpoint, site):
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str) -> str:
    end = time.monotonic() + 120
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read().decode()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)


SUPABASE = """
create role anon; create role authenticated; create schema auth; create table auth.users (id uuid primary key);
create function auth.uid() returns uuid language sql stable as
  $$ select nullif(current_setting('request.jwt.claim.sub', true), '')::uuid $$;
grant usage on schema auth to anon, authenticated; grant usage on schema public to anon, authenticated;
insert into auth.users values ('00000000-0000-0000-0000-000000000001'), ('00000000-0000-0000-0000-000000000002');
"""
ANNA_ID = "00000000-0000-0000-0000-000000000001"
ANNA, BELA = (f"set role authenticated; set request.jwt.claim.sub = '00000000-0000-0000-0000-00000000000{i}'; "
              for i in (1, 2))  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not PG or os.geteuid() != 0, reason="needs PostgreSQL's server, started from root")
def test_users_see_only_their_rows(tmp_path):
    """The schema in a real PostgreSQL, with what Supabase provides around it."""
    new_project("web-form", tmp_path / "form")
    schema = (tmp_path / "form/supabase/migrations/0001_predictions.sql").read_text()
    place = Path("/tmp") / f"bessemer-pg-{os.getpid()}"
    place.mkdir()
    shutil.chown(place, "postgres", "postgres")

    def run(*command, **options):
        return subprocess.run(["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command],
                              capture_output=True, text=True, cwd="/tmp", **options)  # fmt: skip

    def sql(text):
        return run(PG[-1] / "psql", "-h", place, "-d", "postgres", "-qAt", "-v", "ON_ERROR_STOP=1", input=text)

    try:
        assert run(PG[-1] / "initdb", "-D", place / "data").returncode == 0
        flags = f"-c listen_addresses='' -k {place}"
        assert (
            run(PG[-1] / "pg_ctl", "-D", place / "data", "-w", "-l", place / "log", "-o", flags, "start").returncode
            == 0
        )
        for text in (SUPABASE, schema):
            assert (result := sql(text)).returncode == 0, result.stderr
        insert = "insert into predictions (input, output) values ('hi', '{}');"
        assert sql(ANNA + insert).returncode == 0
        assert sql(ANNA + "select count(*) from predictions;").stdout.strip() == "1"
        assert sql(BELA + "select count(*) from predictions;").stdout.strip() == "0"
        forged = f"insert into predictions (user_id, input, output) values ('{ANNA_ID}', 'x', '{{}}');"
        assert "row-level security" in sql(BELA + forged).stderr
        assert "permission denied" in sql("set role anon; select * from predictions;").stderr
        assert "permission denied" in sql(ANNA + "update predictions set input = 'y';").stderr
    finally:
        run(PG[-1] / "pg_ctl", "-D", place / "data", "-m", "immediate", "stop")
        shutil.rmtree(place)
