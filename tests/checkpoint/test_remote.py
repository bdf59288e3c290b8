"""The durable tier, against a real S3 API that also fails at times, and against a folder where S3 adds nothing."""

import http.client
import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from bessemer.checkpoint.manifest import CONFIRMED, NAME, verify
from bessemer.checkpoint.remote import RemoteCheckpoints, recover
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.spec.schema import CheckpointSpec

RULES = CheckpointSpec(keep_last=2)


class Flaky(BaseHTTPRequestHandler):
    """Stands before the server. Every third request is refused, or cut off after the answer's first half."""

    protocol_version = "HTTP/1.1"
    target: str  # host:port
    count: Iterator[int]

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number = next(self.count)
        if number % 6 == 5:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(self.target)
        connection.request(self.command, self.path, body, dict(self.headers))
        reply = connection.getresponse()
        content = reply.read()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if number % 6 == 2 else content)
        if number % 6 == 2:
            self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


numbers = itertools.count()


def remote_at(server: str, patch: pytest.MonkeyPatch) -> RemoteCheckpoints:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    patch.setenv("AWS_ENDPOINT_URL", server)
    return RemoteCheckpoints(f"s3://bucket/checkpoints/run{next(numbers)}/", pause_s=0.01)


@pytest.fixture
def steady_s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> RemoteCheckpoints:
    return remote_at(s3_server, monkeypatch)


@pytest.fixture
def flaky_s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteCheckpoints]:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own pauses would take most of the time
    handler = type("Handler", (Flaky,), {"target": s3_server.removeprefix("http://"), "count": itertools.count()})
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield remote_at(f"http://127.0.0.1:{proxy.server_address[1]}", monkeypatch)
    assert next(handler.count) > 20, "the proxy was in the way"
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def folder(tmp_path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{tmp_path}/durable/run", attempts=3, pause_s=0.001)


@pytest.fixture
def remote(request) -> RemoteCheckpoints:
    return request.getfixturevalue(request.param)


def at(*places: str):
    return pytest.mark.parametrize("remote", places, indirect=True)


@pytest.fixture
def save(checkpoint_store, state_of, manifest_of):
    def save(step, time=None, validation_loss=None):
        from dataclasses import replace

        manifest = replace(manifest_of(step, validation_loss), time=step if time is None else time)
        return checkpoint_store.save(state_of(step), manifest)

    return save


class Events(list):
    def __call__(self, kind, **details):
        self.append({"kind": kind, **details})


@at("steady_s3", "flaky_s3", "folder")
def test_a_lost_disk_recovers_bit_for_bit(remote, checkpoint_store, save, state_of):
    """The disk is lost; the newest checkpoint comes back, with its confirmation and the tags."""
    (checkpoint_store.folder / "tags.json").write_text('{"release": "step-00000010.a1"}')
    remote.mirror(checkpoint_store, save(10), RULES, False)
    newest = save(20)
    checkpoint_store.confirm(newest)
    told = remote.mirror(checkpoint_store, newest, RULES, False)
    assert told == {"bytes": verify(newest).bytes, **({"retried": told["retried"]} if "retried" in told else {})}
    shutil.rmtree(checkpoint_store.folder)

    again, events = CheckpointStore(checkpoint_store.folder), Events()
    fresh = RemoteCheckpoints(remote.url, remote.attempts, remote.pause_s)
    assert recover(again, fresh, events) == newest
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state_of(20).items()}
    assert again.load(newest, loaded).step == 20
    assert all(torch.equal(loaded[name].nan_to_num(), value.nan_to_num()) for name, value in state_of(20).items())
    assert again.confirmed() == [newest] and again.tagged() == {"step-00000010.a1"}
    assert [(event["kind"], event["checkpoint"]) for event in events] == [("fetched", newest.name)]
    assert recover(again, fresh, events) is None, "now the newest is here"


@at("steady_s3", "folder")
def test_remote_retention_has_its_own_length(remote, checkpoint_store, save):
    rules = CheckpointSpec(keep_last=1, remote_keep_last=2, keep_best=True)
    for step, loss in ((1, 1.0), (2, 3.0), (3, 3.0), (4, 3.0)):
        newest = save(step, validation_loss=loss)
        told = remote.mirror(checkpoint_store, newest, rules, False)
        checkpoint_store.thin(newest, rules)
    assert told["removed"] == ["step-00000002.a1"]
    assert [manifest.step for manifest in remote.committed().values()] == [1, 3, 4]


@pytest.mark.parametrize("failing", [NAME, ".metadata", ".distcp"])
def test_an_upload_that_did_not_finish_is_no_checkpoint_and_is_removed(
    folder, checkpoint_store, save, monkeypatch, failing
):
    first, second = save(1), save(2)
    folder.mirror(checkpoint_store, first, RULES, False)
    real = folder.fs.put_file

    def refuse(local, there, **more):
        if there.endswith(failing):
            raise ConnectionError("reset by peer")
        return real(local, there, **more)

    with monkeypatch.context() as patch:
        patch.setattr(folder.fs, "put_file", refuse)
        with pytest.raises(OSError, match=f"{failing}: failed 3 times, at last with ConnectionError: reset"):
            folder.mirror(checkpoint_store, second, RULES, False)
    assert list(folder.committed()) == [first.name]
    third = save(3)
    assert folder.mirror(checkpoint_store, third, RULES, False)["removed"] == [second.name]
    assert list(folder.committed()) == [first.name, third.name]


@pytest.mark.parametrize("every", [3, 4, 7])
def test_calls_that_fail_now_and_then_are_made_again(folder, checkpoint_store, save, monkeypatch, every):
    calls = itertools.count(1)

    def flaky(real):
        def call(*arguments, **more):
            if next(calls) % every == 0:
                raise OSError("the storage is tired")
            return real(*arguments, **more)

        return call

    for name in ("put_file", "get_file", "cat_file", "ls", "rm", "rm_file", "makedirs"):
        monkeypatch.setattr(folder.fs, name, flaky(getattr(folder.fs, name)))
    for step in range(1, 6):
        newest = save(step)
        folder.mirror(checkpoint_store, newest, RULES, False)
    shutil.rmtree(checkpoint_store.folder)
    assert recover(CheckpointStore(checkpoint_store.folder), folder, Events()) == newest
    assert list(folder.committed()) == ["step-00000004.a1", "step-00000005.a1"]
    assert next(calls) > 40


def test_bytes_that_do_not_arrive_are_sent_again(folder, checkpoint_store, save, monkeypatch):
    newest, real, times = save(1), folder.fs.put_file, []

    def short(local, there, **more):
        real(local, there, **more)
        times.append(there)
        if len(times) == 1:
            with open(there, "r+b") as file:
                file.truncate(10)

    monkeypatch.setattr(folder.fs, "put_file", short)
    folder.upload(newest)
    assert times[0] == times[1]
    shutil.rmtree(checkpoint_store.folder)
    verify(folder.fetch(newest.name, folder.committed()[newest.name], CheckpointStore(checkpoint_store.folder)))


def test_a_damaged_remote_one_is_passed_over_for_the_one_before(folder, checkpoint_store, save):
    for step in (1, 2, 3):
        folder.mirror(checkpoint_store, save(step), CheckpointSpec(keep_last=9), False)
    shutil.rmtree(checkpoint_store.folder)
    (shard,) = (path for path in (checkpoint_store.folder.parent / "durable/run/step-00000003.a1").glob("*.distcp"))
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    (checkpoint_store.folder.parent / "durable/run/step-00000002.a1/.metadata").unlink()
    again, events = CheckpointStore(checkpoint_store.folder), Events()
    assert recover(again, folder, events).name == "step-00000001.a1"
    kinds = [(event["kind"], event["checkpoint"]) for event in events]
    assert kinds == [
        ("checkpoint_passed_over", "step-00000003.a1"),
        ("checkpoint_passed_over", "step-00000002.a1"),
        ("fetched", "step-00000001.a1"),
    ]
    assert "hash mismatch" in events[0]["reason"] and "missing" in events[1]["reason"]
    assert [path.name for path, _ in again.committed()] == ["step-00000001.a1"]
    again.sweep()
    assert sorted(path.name for path in again.folder.iterdir()) == ["step-00000001.a1"]


def test_a_damaged_local_one_is_replaced_by_its_sound_copy(folder, checkpoint_store, save):
    newest = save(5)
    folder.mirror(checkpoint_store, newest, RULES, False)
    (newest / CONFIRMED).touch()
    (newest / ".metadata").write_bytes(b"torn")
    assert recover(checkpoint_store, folder, Events()) == newest
    assert verify(newest).step == 5


def test_which_is_newer_is_told_by_the_time_and_not_by_the_step(folder, checkpoint_store, save):
    """What another machine saved since then counts. After a rollback, a smaller step here is the newer one."""
    folder.mirror(checkpoint_store, save(30, time=300), CheckpointSpec(keep_last=9), False)
    checkpoint_store.abandon(-1)
    shutil.rmtree(checkpoint_store.folder / "step-00000030.a1")
    stale = save(20, time=200)
    events = Events()
    assert recover(checkpoint_store, folder, events).name == "step-00000030.a1"
    shutil.rmtree(checkpoint_store.folder / "step-00000030.a1")
    shutil.rmtree(stale)
    save(25, time=350)
    assert recover(checkpoint_store, folder, events) is None and len(events) == 1


def test_a_storage_that_cannot_be_asked(folder, checkpoint_store, save, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(folder.fs, "ls", refuse)
    with pytest.raises(UserError, match=r"Access Denied: there is no local checkpoint.*checkpoint\.remote"):
        recover(checkpoint_store, folder, Events())
    save(1)
    events = Events()
    assert recover(checkpoint_store, folder, events) is None
    assert events[0]["kind"] == "remote_unreachable"


@at("steady_s3", "folder")
def test_a_new_run_has_nothing_to_recover(remote, checkpoint_store):
    events = Events()
    assert recover(checkpoint_store, remote, events) is None and events == []


def test_copies_of_the_weights_go_up_and_stay(folder, checkpoint_store, save, state_of, manifest_of):
    checkpoint_store.write_model(state_of(1), manifest_of(10), every=10)
    for step in (11, 12, 13, 14):
        folder.mirror(
            checkpoint_store, save(step), CheckpointSpec(keep_last=1, keep_every=10, archive_model_only=True), False
        )
    assert list(folder.committed()) == ["model-00000010.a1", "step-00000014.a1"]
    shutil.rmtree(checkpoint_store.folder)
    assert recover(CheckpointStore(checkpoint_store.folder), folder, Events()).name == "step-00000014.a1"


def test_an_address_that_nothing_reads_is_refused():
    with pytest.raises(UserError, match=r"checkpoint\.remote: nonsense://x: .*install its fsspec package"):
        RemoteCheckpoints("nonsense://x")


@pytest.mark.parametrize("text", ["bucket/x", "s3://", "://x"])
def test_an_address_that_is_none_is_refused_in_the_spec(text):
    with pytest.raises(ValueError, match="a URL such as s3://bucket/checkpoints"):
        CheckpointSpec(remote=text)


def test_the_spec_refuses_a_password():
    with pytest.raises(ValueError, match="set it in the environment"):
        CheckpointSpec(remote="sftp://me:secret@host/x")
    assert json.loads(CheckpointSpec(remote="s3://b/x@y").model_dump_json())["remote"] == "s3://b/x@y"
