"""The put that commits a step in an object store: its condition on the wire, and what follows without an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from storage import StepExistsError, TraceDataset, TraceWriter, UnknownCommitError, repair_dataset
from storage.joint_writer import JointWriter
from storage.object_store import ObjectStore
from storage.store import open_store
from tests.storage.builders import SPEC, make_trace, make_traces

obstore_store = pytest.importorskip("obstore.store")
from obstore.exceptions import AlreadyExistsError, GenericError  # noqa: E402

URL = "memory://traces"
STEP = "step-000000000"


class Unanswered(obstore_store.MemoryStore):
    """The next put of a step's manifest is kept back, or carried out, and is not answered in either case."""

    def setup(self) -> Unanswered:
        self.kept: Callable[[], Any] | None = None
        self.next: str = ""
        self.down = False
        return self

    def get(self, path: str, **options: Any) -> Any:
        self.answer()
        return super().get(path, **options)

    def head(self, path: str) -> Any:
        self.answer()
        return super().head(path)

    def list(self, *arguments: Any, **options: Any) -> Any:
        self.answer()
        return super().list(*arguments, **options)

    def answer(self) -> None:
        if self.down:
            raise GenericError("Generic S3 error: connection refused")

    def put(self, path: str, file: Any, **options: Any) -> Any:
        how, self.next = (self.next, "") if path == f"{STEP}/_manifest.json" else ("", self.next)
        real = super().put
        self.down = self.down or how in ("outage", "retry into outage")
        if how == "outage":
            raise GenericError("Generic S3 error: operation timed out")
        if how == "keep":
            self.kept = lambda: real(path, file, **options)
            raise GenericError("Generic S3 error: operation timed out")
        answer = real(path, file, **options)
        if how.startswith("retry"):  # the client sent it again after a lost answer, and met its own first put
            raise AlreadyExistsError("412 Precondition Failed")
        return answer


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Unanswered:
    client = Unanswered().setup()
    monkeypatch.setattr("obstore.store.from_url", lambda url: client)
    return client


def write_unanswered(client: Unanswered, writer: TraceWriter) -> None:
    writer.write(make_traces(0), step=0)
    client.next = "keep"
    with pytest.raises(UnknownCommitError, match=r"step-000000000 was committed is not known.*timed out.*repair_data"):
        writer.commit(0)
    assert TraceDataset(URL).steps == []


def test_a_put_that_is_carried_out_later_commits_a_whole_step(client: Unanswered) -> None:
    with TraceWriter(URL, SPEC) as writer:
        write_unanswered(client, writer)
        assert client.kept is not None
        client.kept()
        with pytest.raises(StepExistsError, match="step 0 is committed"):
            writer.write(make_traces(0), step=0)
    assert list(TraceDataset(URL)) == make_traces(0)
    assert TraceDataset(URL).verify() == []


def test_one_that_is_never_carried_out_leaves_litter_and_a_free_step(
    client: Unanswered, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TraceWriter(URL, SPEC) as writer:
        write_unanswered(client, writer)
        (litter,) = open_store(URL).names(STEP)
        writer.write(make_traces(0, 3), step=0)
        writer.commit(0)
        assert client.kept is not None
        with pytest.raises(AlreadyExistsError):
            client.kept()
    monkeypatch.setattr("storage.verify.LITTER_AGE_S", -10.0)
    assert repair_dataset(URL) == [open_store(URL).url(f"{STEP}/{litter}")]
    assert (list(TraceDataset(URL)), TraceDataset(URL).verify()) == (make_traces(0, 3), [])


def test_a_helper_leaves_its_parts_to_a_put_that_may_be_carried_out(client: Unanswered) -> None:
    with JointWriter(URL, SPEC) as first, JointWriter(URL, SPEC) as helper:
        helper.write([make_trace(0, 7)], step=0)
        parts = helper.hand_over(0)
        assert parts is not None
        first.take_over([parts], step=0)
        write_unanswered(client, first)
        helper.abandon(0)
    assert client.kept is not None
    client.kept()
    assert list(TraceDataset(URL)) == [make_trace(0, 7), *make_traces(0)]
    assert TraceDataset(URL).verify() == []


def test_a_writer_that_meets_its_own_manifest_has_committed(client: Unanswered) -> None:
    with TraceWriter(URL, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        client.next = "retry"
        writer.commit(0)
    assert list(TraceDataset(URL)) == make_traces(0)


@pytest.mark.parametrize(
    ("how", "why"),
    [("outage", r"sent and not answered \(.*timed out"), ("retry into outage", r"could not be read \(.*refused")],
)
def test_a_store_that_is_down_does_not_hide_that_the_commit_is_unknown(
    client: Unanswered, caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    """Nothing answers from the put on: neither what is asked to clean up, nor what is asked when the writer closes."""
    with pytest.raises(UnknownCommitError, match=why), JointWriter(URL, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        client.next = how
        writer.commit(0)
    assert "leaving 1 parts in memory://traces/step-000000000: they may be committed" in caplog.text
    assert "the index was not renewed: Generic S3 error: connection refused" in caplog.text
    client.down = False
    assert TraceDataset(URL).steps == ([] if how == "outage" else [0])
    assert len([name for name in open_store(URL).names(STEP) if name.endswith(".parquet")]) == 1


def test_a_helper_abandons_all_it_has_while_the_store_is_down(
    client: Unanswered, caplog: pytest.LogCaptureFixture
) -> None:
    with JointWriter(URL, SPEC) as helper:
        helper.write(make_traces(0), step=0)
        helper.hand_over(0)
        helper.write(make_traces(1), step=1)
        client.down = True
    assert "leaving 1 parts in memory://traces/step-000000000: they could not be removed (Generic" in caplog.text
    assert "leaving 1 parts in memory://traces/step-000000001: they could not be removed (Generic" in caplog.text


def test_a_step_that_was_abandoned_before_its_put_leaves_nothing(client: Unanswered) -> None:
    with TraceWriter(URL, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        writer.abandon(0)
    assert open_store(URL).names(STEP) == []


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, str | None]]]:
    """Requests that an S3 server got: method, path and condition. Its objects exist from the second put on."""
    seen: list[tuple[str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            again = any(path == self.path for _, path, _ in seen)
            seen.append((self.command, self.path, self.headers["If-None-Match"]))
            self.send_response(412 if again and self.headers["If-None-Match"] == "*" else 200)
            self.send_header("ETag", '"0"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        }  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield seen
        server.shutdown()


def test_the_condition_is_on_the_wire(wire: list[tuple[str, str, str | None]]) -> None:
    store = ObjectStore.from_url("s3://bucket/traces")
    store.create(f"{STEP}/_manifest.json", b"first")
    with pytest.raises(FileExistsError, match="already there"):
        store.create(f"{STEP}/_manifest.json", b"second")
    store.replace("_retention.json", b"x")
    path = f"/bucket/traces/{STEP}/_manifest.json"
    assert wire == [("PUT", path, "*"), ("PUT", path, "*"), ("PUT", "/bucket/traces/_retention.json", None)]
