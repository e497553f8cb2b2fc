"""A real S3 server process on loopback, for tests of datasets in an object store."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert server.poll() is None, "the S3 server ended"
        try:
            urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


@contextmanager
def s3_server() -> Iterator[str]:
    """`s3://traces`, with the environment that reaches it; skips the test where moto or boto3 is missing."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    url = f"http://127.0.0.1:{(port := free_port())}"
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (credentials | {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}).items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet) as server:
            try:
                wait_for(f"{url}/moto-api/", server)
                boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="traces")
                yield "s3://traces"
            finally:
                server.kill()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The server's bucket, for one file of tests."""
    with s3_server() as url:
        yield url


@pytest.fixture
def url(bucket: str) -> str:
    """A dataset of its own for each test."""
    return f"{bucket}/{uuid.uuid4().hex}"
