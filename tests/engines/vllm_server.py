"""A real vLLM server on loopback, in processes of its own that end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "k"
READY_SECONDS = 240
FLAGS = (
    "--enforce-eager --enable-return-routed-experts --enable-scale-out --logprobs-mode processed_logprobs "
    "--worker-extension-cls rollout.vllm_extension.LoadExtension --worker-cls rollout.vllm_cpu_worker.SeededCpuWorker "
    f"--skip-tokenizer-init --api-key {KEY}"
).split()


class VllmServer:
    """`start` returns when it answers; `kill` ends it as a crash would, and `start` brings it back on the same port."""

    def __init__(self, model: Path, log: Path, **options: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        named = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *FLAGS, *named]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PYTHONPATH": str(ROOT),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"vLLM did not start: {self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def kill(self) -> None:
        """End all its processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
