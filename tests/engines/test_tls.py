"""TLS is verified: a certificate of an unknown authority is refused, and accepted when the authority is given."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rollout import RolloutClient, SamplingParams
from rollout.http_engine import HttpEngine
from tests.engines.conftest import ENGINES
from tests.engines.fakes import FakeServer

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


def self_signed(folder: Path, address: str) -> tuple[Path, Path]:
    """Certificate and key of a server at `address`, its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test server")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate = builder.add_extension(addresses, critical=False).sign(key, hashes.SHA256())
    paths = folder / f"{address}.pem", folder / f"{address}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(*forms))
    return paths


def serve(folder: Path, engine: str, address: str) -> FakeServer:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*self_signed(folder, address))
    return ENGINES[engine][0](tls=context)


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[FakeServer]:
    server = serve(tmp_path, engine, "127.0.0.1")
    yield server
    server.stop()


def connect(server: FakeServer, engine: str, model: Path, **options: object) -> RolloutClient:
    options = {**ENGINES[engine][1], **options}
    return RolloutClient.connect(server.url, backend=engine.partition("-")[0], model=model, **options)


def test_a_server_that_signed_for_itself_is_refused_before_a_key_is_sent(server, engine, model):
    with pytest.raises(Exception, match=r"TLS certificate is not trusted: .*pass its CA as ca_file="):
        connect(server, engine, model, api_key="secret")
    assert server.seen == []


def test_it_is_accepted_when_its_authority_is_given(server, engine, model, tmp_path):
    with connect(server, engine, model, ca_file=str(tmp_path / "127.0.0.1.pem")) as client:
        (trace,) = client.sample([[5, 7]], sampling_params=PARAMS)
    assert trace.error is None
    assert len(trace.completion_ids) == 4


def test_a_certificate_for_another_host_is_refused_although_its_authority_is_given(engine, model, tmp_path):
    other = serve(tmp_path, engine, "10.0.0.1")
    with pytest.raises(Exception, match=r"TLS certificate is not trusted: .*127\.0\.0\.1"):
        connect(other, engine, model, ca_file=str(tmp_path / "10.0.0.1.pem"))
    other.stop()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_file_that_is_none_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"ca_file is .*ca\.pem.*, need a PEM file with certificates"):
        HttpEngine("https://127.0.0.1:1", None, 1, 1.0, ca_file=str(file))
