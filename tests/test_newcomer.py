"""What goes wrong first on a new machine: each error is one line with what to do next."""

from __future__ import annotations

import ast
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollout import RolloutClient
from rollout.__main__ import main
from rollout.tiny_moe import MODEL_PATH

ROOT = Path(__file__).parent.parent


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


OVER_RAY = """
import sys
from rollout import RolloutClient
try:
    RolloutClient.ray(sys.argv[1])
except ConnectionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "127.0.0.1:{port}",
            "nothing answers there: [Errno 111] Connection refused. Start Ray there (`ray start --head`)",
        ),
        ("ray://127.0.0.1:{port}", "nothing answers there"),
        ("http://127.0.0.1:{port}", "that is the dashboard"),
        ("nosuchhost.invalid:6379", "nothing answers there"),
        ("127.0.0.1:port", "nothing answers there"),
    ],
)
def test_an_address_without_ray_is_an_error_within_seconds(
    address: str, words: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.remote import check_answers

    address, begun = address.format(port=closed_port), time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        check_answers(address)
    assert f"RAY_ADDRESS is {address!r}" in str(caught.value)
    assert words in str(caught.value)
    assert time.monotonic() - begun < 30


def test_a_client_over_ray_says_so_before_ray_tries_for_minutes(closed_port: int) -> None:
    environment = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{closed_port}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OVER_RAY, str(MODEL_PATH)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.startswith(f"RAY_ADDRESS is '127.0.0.1:{closed_port}', and nothing answers there")
    assert out.endswith("or `unset RAY_ADDRESS` to use a local cluster\n")


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    from actors.remote import check_answers

    with socket.create_server(("127.0.0.1", 0)) as server:
        check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    check_answers("auto")


@pytest.mark.parametrize("package", ["storage", "rollout"])
def test_an_old_python_is_told_before_anything_else_fails(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / package / "__init__.py").read_text()
    ast.parse(source, feature_version=(3, 7))  # an old Python must get as far as to the check
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(ImportError, match=r"needs Python 3\.11 or newer.*next: python3\.11 -m venv"):
        runpy.run_path(str(ROOT / package / "__init__.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_on_a_machine_without(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ValueError, match=r"built without CUDA; use device='cpu', or .*pip install --force-reinstall torch"
    ):
        RolloutClient.local(MODEL_PATH, device="cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"finds no GPU; use device='cpu', or look with `nvidia-smi`"):
        RolloutClient.local(MODEL_PATH, device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES hides them; unset it, over Ray pass num_gpus=1"):
        RolloutClient.local(MODEL_PATH, device="cuda:0")


MASKED = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from rollout.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "command"),
    [
        pytest.param(
            "obstore",
            ["inspect", "s3://bucket/traces"],
            "pip install 'moe-rollout[objects]'",
            marks=pytest.mark.full,
        ),
        ("matplotlib", ["plot", "{traces}", "--out", "{traces}-plots"], "pip install 'moe-rollout[plot]'"),
        ("pyarrow", ["inspect", "{traces}"], "next, in a clone: pip install ."),
    ],
)
def test_what_is_not_installed_is_named_with_its_command(
    missing: str, arguments: list[str], command: str, tmp_path: Path
) -> None:
    from tests.storage.builders import commit

    commit(tmp_path / "t", 0)
    given = [argument.format(traces=tmp_path / "t") for argument in arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", MASKED, missing, *given], env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1), ran.stderr
    assert ran.stderr.startswith("error: ")
    assert command in ran.stderr


def test_a_server_that_does_not_run_is_named_with_how_to_start_it(closed_port: int) -> None:
    with pytest.raises(Exception, match=rf"127\.0\.0\.1:{closed_port}") as caught:
        RolloutClient.connect(f"http://127.0.0.1:{closed_port}", backend="vllm", model=MODEL_PATH)
    assert "Start it as: " in str(caught.value)


def test_prompts_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", f"echo 1+2= > {pipe}"])
    assert main(["sample", str(MODEL_PATH), "--prompts", str(pipe), "--max-tokens", "2"]) == 0
    assert writer.wait() == 0
    assert '"sample_id": "run/0/0-0/0"' in capsys.readouterr().out
