"""HTTP to an inference server: one pooled session on one event loop thread, errors with the server's own words."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

try:
    import aiohttp
except ImportError as error:
    raise ImportError("a running server needs aiohttp: pip install 'moe-rollout[vllm]' (or [sglang])") from error

from rollout.engine_reply import EngineDeadError, EngineError

BODY_CHARS = 300
BACKOFF_SECONDS = 0.1
KEEPALIVE_SECONDS = 2.0
"""Below the 5 s after which uvicorn closes an idle connection: a request on a closed one would fail for nothing."""


class HttpEngine:
    """Requests to one server. For use inside one event loop.

    >>> http = HttpEngine("http://gpu-node:30000", api_key="k", connections=512, timeout=600)
    >>> await http.call("GET", "/health")

    TLS certificates are verified, by the authority in the PEM file `ca_file` when it is given.
    Nothing that reached the server is sent twice, except GET: a connection that could
    not be made, and a server that says it is full (503), are tried again, `attempts` times in all.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        connections: int,
        timeout: float,
        attempts: int = 4,
        ca_file: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}, need http://host:port or https://host:port")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections, self._timeout, self._attempts = connections, timeout, attempts
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"ca_file is {ca_file!r}, need a PEM file with certificates: {error}") from error
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        accept: tuple[int, ...] = (),
    ) -> Any:
        """The decoded JSON answer, or the text when it is none; also with a status of `accept`.

        Raises:
            EngineDeadError: no connection, a broken one, or an error of the server's own (500, 502, 504).
            EngineError: no answer in time, a broken answer, or another error status, with the server's words.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._once(method, path, body, headers, accept)
            except _NotTakenError as error:
                if attempt == self._attempts:
                    raise error.kind(str(error)) from error.__cause__
                await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError("attempts is at least 1")

    async def _once(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None, accept: tuple[int, ...]
    ) -> Any:
        where = f"{method} {self.url}{path}"
        try:
            async with self._open().request(method, self.url + path, json=body, headers=headers) as reply:
                text = await reply.text()
        except aiohttp.ClientConnectorCertificateError as error:
            raise EngineError(
                f"{where}: the server's TLS certificate is not trusted: {error}; pass its CA as ca_file="
            ) from error
        except aiohttp.ClientConnectorError as error:
            text = f"{where}: cannot connect: {error}; is the server up, and the url right?"
            raise _NotTakenError(text, EngineDeadError) from error
        except aiohttp.ConnectionTimeoutError as error:
            text = f"{where}: nothing accepts the connection; is the url right, and no firewall between?"
            raise _NotTakenError(text, EngineDeadError) from error
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer within {self._timeout:g} s") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            text = f"{where}: the connection broke: {type(error).__name__}: {error}"
            raise (_NotTakenError(text, EngineDeadError) if method == "GET" else EngineDeadError(text)) from error
        if reply.status in accept:
            return _decoded(text, where)
        if reply.status == 503:
            raise _NotTakenError(f"{where}: 503: {error_text(text)}", EngineError)
        if reply.status >= 400:
            kind = EngineDeadError if reply.status >= 500 else EngineError
            raise kind(f"{where}: {reply.status}: {error_text(text)}{_hint(reply.status)}")
        return _decoded(text, where)

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineDeadError(f"{self.url}: this client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout, connect=None, sock_connect=10),
                connector=aiohttp.TCPConnector(
                    limit=self._connections, keepalive_timeout=KEEPALIVE_SECONDS, ssl=self._tls
                ),
            )
        return self._session

    async def close(self) -> None:
        """Close the connections, for good."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


class _NotTakenError(EngineError):
    """The request did not take effect; `kind` is what it is when no attempt is left."""

    def __init__(self, text: str, kind: type[EngineError]) -> None:
        super().__init__(text)
        self.kind = kind


def error_text(text: str) -> str:
    """The message inside an error body of vLLM or SGLang, whichever of their shapes it has.

    >>> error_text('{"error": "Unauthorized"}'), error_text('{"error": {"message": "too long"}}')
    ('Unauthorized', 'too long')
    >>> error_text('{"object": "error", "message": "queue full"}'), error_text('{"detail": "Not Found"}')
    ('queue full', 'Not Found')
    """
    try:
        body = json.loads(text)
    except ValueError:
        return text[:BODY_CHARS]
    if not isinstance(body, dict):
        return text[:BODY_CHARS]
    found = body.get("error", body)
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or text
    return str(found)[:BODY_CHARS]


def _hint(status: int) -> str:
    return "; pass the server's key as api_key=" if status in (401, 403) else ""


def _decoded(text: str, where: str) -> Any:
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(f"{where}: the answer is no JSON: {text[:BODY_CHARS]!r}") from error
