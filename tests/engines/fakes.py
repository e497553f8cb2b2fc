"""Servers that answer as vLLM 0.30 and SGLang 0.5.23 do, without a model.

The replies are built in the shapes of fixtures/, which test_wire.py decodes; tokens and routes are a function of
prompt, seed and weights, so that a test can compute what must arrive. A test breaks a reply with `spoil`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

FIXTURES = Path(__file__).parent / "fixtures"
VLLM = json.loads((FIXTURES / "vllm_0_30.json").read_text())
ADMIN = {"/abort_request", "/pause_generation", "/continue_generation", "/flush_cache"}
ADMIN |= {"/update_weights_from_disk", "/update_weight_version"}
SGLANG = json.loads((FIXTURES / "sglang_0_5_23.json").read_text())


class Drawn:
    """What the fake model answers: `ids`, `logprobs`, `routes [T - 1, layers, K]`."""

    def __init__(
        self, prompt: list[int], count: int, seed: int, weights: str, shape: tuple[int, int, int, int]
    ) -> None:
        layers, top_k, experts, vocab = shape
        rng = np.random.default_rng([*prompt, seed, *weights.encode()])
        self.ids = rng.integers(0, vocab, count).tolist()
        self.logprobs = (-rng.uniform(0.05, 1.0, count)).astype(np.float32)
        scores = rng.random((len(prompt) + count - 1, layers, experts))
        self.routes = np.argsort(scores, axis=-1)[..., :top_k]


class FakeServer:
    """An HTTP server on a thread. Subclasses give the routes.

    Attributes:
        spoil: changes a reply before it is sent; gets the prompt and the body.
        hold: while set, generation waits; an abort ends it, `let_go` goes on.
        cut: path to how many of its coming answers end in mid-body, with the connection.
        full: path to how many of its coming requests are not taken, 503.
        late: seconds on the way before a request that will be held is known here.
        drifts: weights that are loaded again are not the same, as in a broken reload.
        release_text: its version, when it is another than the one whose replies were recorded.
        absent: paths that do not exist, as without a flag.
        admin_key: the only one that SGLang's admin routes take; None when `key` does.
        raw_logprobs: vLLM's default, and an option of SGLang: logprobs before filters and temperature.
        extended: vLLM's workers have our methods.
        model_path: what it was started with.
        loads_from: the directory that vLLM made of it, a hub id with HF_HUB_OFFLINE=1.
        seen: (path, body, headers) of all requests.
        peak: the most requests that generated at once.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int] = (2, 2, 8, 96),
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.shape, self.key, self.tls = shape, key, tls
        self.spoil: Callable[[list[int], Any], Any] = lambda prompt, body: body
        self.hold = self.drifts = self.refuse_flush = self.fail_update = False
        self.late = 0.0
        self.cut: Counter[str] = Counter()
        self.full: Counter[str] = Counter()
        self.release_text = ""
        self.admin_key: str | None = None
        self.absent: set[str] = set()
        self.raw_logprobs, self.extended, self.paused = False, True, False
        self.seen: list[tuple[str, Any, Any]] = []
        self.version, self.weights, self.loads = "default", "start", 0
        self.running = self.peak = 0
        self.model_path = self.loads_from = ""
        self.held: dict[str, asyncio.Event] = {}
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        """As a killed process: connections break. `start` brings it back on the same port."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def forget(self) -> None:
        """As a process that was started again: the weights of its command line."""
        self.version, self.weights, self.loads = "default", "start", 0

    @property
    def generated(self) -> list[str]:
        """Paths of the requests that generated."""
        return [path for path, *_ in self.seen if path.endswith(("generate", "completions"))]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        key = self.admin_key if self.admin_key and request.path in ADMIN else self.key
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        self.seen.append((request.path, body, request.headers))
        handler = self.routes().get(f"{request.method} {request.path}")
        if handler is None or request.path in self.absent:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.full[request.path]:
            self.full[request.path] -= 1
            return web.json_response(SGLANG["errors"]["503"], status=503)
        answer = handler(body, request)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        answer = answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        if self.cut[request.path]:
            self.cut[request.path] -= 1
            return await half(answer, request)
        return answer

    def routes(self) -> dict[str, Any]:
        raise NotImplementedError

    def load(self, path: str) -> None:
        self.loads += 1
        self.weights = "start" if path == (self.loads_from or self.model_path) else path
        self.weights += str(self.loads) if self.drifts else ""

    async def draw(self, prompt: list[int], count: int, seed: int, request_id: str) -> tuple[Drawn, str]:
        """The answer, cut to three tokens when it was aborted."""
        self.running += 1
        self.peak = max(self.peak, self.running)
        finish = "length"
        if self.hold:
            await asyncio.sleep(self.late)
            self.held[request_id] = asyncio.Event()
            await self.held[request_id].wait()
            if self.hold:
                count, finish = 3, "abort"
        else:
            await asyncio.sleep(0.002)
        self.running -= 1
        return Drawn(prompt, count, seed, self.weights, self.shape), finish

    def let_go(self, one: str | None = None) -> None:
        """Answer one that is held, or all and hold no more."""
        self.hold = self.hold and one is not None
        self._loop.call_soon_threadsafe(self.release, lambda request_id: one in (None, request_id))

    def release(self, matches: Callable[[str], bool]) -> None:
        for request_id, event in self.held.items():
            if matches(request_id):
                event.set()


def cool(drawn: Drawn, temperature: float) -> None:
    """So cold that one token is left to draw: its logprob is 0 behind the temperature."""
    if 0 < temperature < 1e-3:
        drawn.logprobs[:] = 0


async def half(answer: web.Response, request: web.Request) -> web.StreamResponse:
    """The first half of an answer, and the connection with it."""
    text = answer.text.encode()
    cut = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(text))})
    await cut.prepare(request)
    await cut.write(text[: len(text) // 2])
    request.transport.close()
    return cut


def sglang_body(drawn: Drawn, finish: str, rid: str, version: str) -> dict[str, Any]:
    """What SGLang answers, its server and its offline engine alike."""
    meta = {
        "id": rid,
        "finish_reason": {"type": finish, "length": len(drawn.ids)},
        "weight_version": version,
        "num_retractions": 0,
        "output_token_logprobs": [[float(p), t, None] for p, t in zip(drawn.logprobs, drawn.ids, strict=True)],
        "routed_experts": base64.b64encode(drawn.routes.astype("<i4").tobytes()).decode(),
    }
    return {"text": "", "output_ids": drawn.ids, "meta_info": meta}


class FakeSglang(FakeServer):
    """`facts` is what /server_info answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.facts = {"context_length": 256, "enable_deterministic_inference": True}
        super().__init__(*args, **kwargs)

    def routes(self) -> dict[str, Any]:
        return {
            "GET /server_info": lambda b, r: self.facts | {"version": self.release_text or "0.5.23"},
            "GET /model_info": lambda b, r: {"model_path": self.model_path, "weight_version": self.version},
            "POST /generate": self.generate,
            "POST /abort_request": lambda b, r: (self.release(lambda i: i.startswith(b["rid"])), web.Response())[1],
            "POST /pause_generation": lambda b, r: {"status": "ok"},
            "POST /continue_generation": lambda b, r: {"status": "ok"},
            "POST /flush_cache": lambda b, r: web.Response(text="Cache flushed.\n"),
            "POST /update_weight_version": self.set_version,
            "POST /update_weights_from_disk": self.update,
        }

    async def generate(self, body: Any, _: web.Request) -> Any:
        sampling = body["sampling_params"]
        prompt, rid = body["input_ids"], body["rid"]
        drawn, finish = await self.draw(prompt, sampling["max_new_tokens"], sampling["sampling_seed"], rid)
        drawn.routes = drawn.routes[body["routed_experts_start_len"] :]
        if not self.raw_logprobs:
            cool(drawn, sampling["temperature"])
        return self.spoil(prompt, sglang_body(drawn, finish, rid, self.version))

    def set_version(self, body: Any, _: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.version}

    def update(self, body: Any, _: Any) -> Any:
        if self.fail_update:
            return web.json_response({"success": False, "message": "shape mismatch"}, status=400)
        self.load(body["model_path"])
        if self.refuse_flush:
            return web.json_response(SGLANG["update_not_flushed_400"], status=400)
        self.version = body["weight_version"]
        return SGLANG["update_ok"]


class FakeVllm(FakeServer):
    def routes(self) -> dict[str, Any]:
        return {
            "GET /version": lambda b, r: {"version": self.release_text} if self.release_text else VLLM["version"],
            "GET /v1/models": lambda b, r: {"data": [VLLM["models"]["data"][0] | {"root": self.model_path}]},
            "GET /weight_info": lambda b, r: {"weight_version": self.version},
            "POST /inference/v1/generate": self.generate,
            "POST /v1/completions": self.completions,
            "POST /abort_requests": self.abort,
            "POST /pause": lambda b, r: self.set_paused(True),
            "POST /resume": lambda b, r: self.set_paused(False),
            "POST /reset_prefix_cache": lambda b, r: {"success": not self.refuse_flush},
            "POST /update_weight_version": self.set_version,
            "POST /collective_rpc": self.rpc,
        }

    async def generate(self, body: Any, _: web.Request) -> Any:
        rid, sampling = f"generate-tokens-{body['request_id']}", body["sampling_params"]
        drawn, finish = await self.draw(body["token_ids"], sampling["max_tokens"], sampling["seed"], rid)
        self.filter(drawn, sampling)
        content = [
            {"token": f"token_id:{t}", "logprob": float(p), "bytes": None}
            for p, t in zip(drawn.logprobs, drawn.ids, strict=True)
        ]
        choice = self.choice(drawn, finish) | {"logprobs": {"content": content}}
        return self.spoil(body["token_ids"], {"request_id": rid, "choices": [choice]})

    async def completions(self, body: Any, request: web.Request) -> Any:
        rid, (prompt,) = f"cmpl-{request.headers['X-Request-Id']}-0", body["prompt"]
        drawn, finish = await self.draw(prompt, body["max_tokens"], body["seed"], rid)
        self.filter(drawn, body)
        tokens = [f"token_id:{t}" for t in drawn.ids]
        logprobs = {"tokens": tokens, "token_logprobs": drawn.logprobs.tolist()}
        choice = self.choice(drawn, finish) | {"logprobs": logprobs, "prompt_token_ids": prompt}
        return self.spoil(prompt, {"id": rid, "choices": [choice]})

    def filter(self, drawn: Drawn, sampling: Any) -> None:
        """Rows from a start on; and one token to choose from has logprob 0 in the distribution it was sampled from."""
        drawn.routes = drawn.routes[sampling.get("routed_experts_prompt_start", 0) :]
        if sampling["top_k"] == 1 and not self.raw_logprobs:
            drawn.logprobs[:] = 0

    @staticmethod
    def choice(drawn: Drawn, finish: str) -> dict[str, Any]:
        file = io.BytesIO()
        np.lib.format.write_array(file, drawn.routes.astype(np.uint8))
        encoded = base64.b64encode(file.getvalue()).decode()
        return {"index": 0, "finish_reason": finish, "token_ids": drawn.ids, "routed_experts": encoded}

    def abort(self, body: Any, _: Any) -> Any:
        self.release(lambda i: i in body["request_ids"])
        return {"status": "aborted", "aborted": len(body["request_ids"])}

    def set_version(self, body: Any, _: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    def set_paused(self, paused: bool) -> Any:
        self.paused = paused
        return VLLM["pause" if paused else "resume"]

    def rpc(self, body: Any, _: Any) -> Any:
        if not self.extended or (self.fail_update and body["method"] == "load_checkpoint"):
            return web.json_response(VLLM["update_missing"], status=500)
        if body["method"] == "can_load":
            return {"results": [{"model": self.loads_from or self.model_path}]}
        path = body["kwargs"]["path"]
        if path != (self.loads_from or self.model_path) and not Path(path).is_dir():
            return web.json_response(VLLM["update_missing"], status=500)
        self.load(path)
        return VLLM["collective_rpc_update"]
