"""OpenAI's HTTP interface on FastAPI, the only file that knows it. Checks and text live elsewhere.

Every answer that needs tokens is a ``TokenResponse``: it watches the socket while it works, so a
client that leaves ends its request, streamed or not.
"""

import asyncio
import importlib.metadata
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from serving import metrics as prometheus
from serving.api import render
from serving.api.fields import Fields
from serving.api.intake import Ask, Intake, check_admin
from serving.api.settings import FrontSettings
from serving.auth import ANYBODY, ApiKey, Keyring
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    HeadTooLarge,
    Internal,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestFailed,
    Unauthenticated,
    Unavailable,
)
from serving.gateway import Gateway
from serving.generation import Delta

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/-/healthz", "/-/routes"})
PROBES = ["GET", "HEAD"]  # load balancers use either
ROUTES = {"/": "evenflow"}  # what KubeRay's probes want to read
CALLER = "evenflow.caller"  # in a request's scope: whose key it came with
KEY_NEEDED = "a valid API key is needed: Authorization: Bearer KEY"
MAX_HEADERS, MAX_HEAD_BYTES = 100, 32 << 10
MAX_JSON_NODES, MAX_JSON_ITEMS = 50_000, 1_000_000  # parsed JSON takes far more room than its text
MAX_SMALL_BYTES = 4096
BODY_S = 30.0  # to receive a body
DECISIONS = 12  # shown with the status
DECISION = ("request_id", "mode", "reason", "outcome")
PAGE = (Path(__file__).parents[1] / "page" / "index.html").read_text(encoding="utf-8")
PAGE_POLICY = (  # it loads nothing, and asks this server only
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = (
    "x-evenflow-mode",
    "x-slo-ttft-ms",
    "x-slo-itl-ms",
    "x-evenflow-worker",
    "traceparent",
)


def build_app(gateway: Gateway, settings: FrontSettings) -> FastAPI:
    """The HTTP front door of one gateway. Serve it with uvicorn."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    intake = Intake(gateway, settings)
    _add_inference(app, intake)
    _add_tokens(app, intake)
    _add_models(app, intake)
    _add_probes(app, gateway)
    _add_evenflow(app, intake)
    if settings.debug:
        _add_debug(app, gateway)
    app.add_exception_handler(RequestFailed, _on_failure)
    app.add_exception_handler(HTTPException, _on_framework_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(KeyCheck, keys=settings.keys)
    app.add_middleware(HeadLimit)
    return app


# ---------------------------------------------------------------------------- routes


def _add_inference(app: FastAPI, intake: Intake) -> None:
    async def take(request: Request, check: Callable[..., Awaitable[Ask]]) -> Response:
        body = await _json_body(request, intake.settings.max_body_bytes)
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        ask = await check(
            body,
            caller=request.scope[CALLER],
            headers=headers,
            request_id=request.headers.get("x-request-id", ""),
        )
        return TokenResponse(intake, ask)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await take(request, intake.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await take(request, intake.chat)


def _add_tokens(app: FastAPI, intake: Intake) -> None:
    limit = intake.settings.max_body_bytes

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        ids = await intake.tokenize(await _json_body(request, limit))
        max_model_len = intake.gateway.limits().max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": max_model_len, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse({"prompt": await intake.detokenize(await _json_body(request, limit))})


def _add_models(app: FastAPI, intake: Intake) -> None:
    gateway, settings = intake.gateway, intake.settings
    created = int(time.time())

    def model(name: str) -> dict[str, Any]:
        max_model_len = gateway.limits().max_model_len if gateway.is_ready else None
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "evenflow",
            "root": settings.model,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = [settings.model, *sorted(settings.aliases)]
        return JSONResponse({"object": "list", "data": [model(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if not name:
            raise NotFound("there is no /v1/models/: its name is missing, or use /v1/models")
        intake.check_model(name)
        return JSONResponse(model(name))


def _add_probes(app: FastAPI, gateway: Gateway) -> None:
    @app.api_route("/health", methods=PROBES)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.api_route("/ready", methods=PROBES)
    async def ready() -> Response:
        if not gateway.is_ready:
            raise Unavailable("no worker is attached yet, or this server is shutting down")
        return JSONResponse({"status": "ready", "workers": len(gateway.pools.workers())})

    @app.api_route("/version", methods=PROBES)
    async def version() -> Response:
        try:
            return JSONResponse({"version": importlib.metadata.version("evenflow")})
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            return JSONResponse({"version": "unknown"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type=prometheus.CONTENT_TYPE)

    @app.api_route("/-/healthz", methods=PROBES)
    async def serve_health() -> Response:
        return Response("success", media_type="text/plain")

    @app.api_route("/-/routes", methods=PROBES)
    async def serve_routes() -> Response:
        return JSONResponse(ROUTES)


def _add_evenflow(app: FastAPI, intake: Intake) -> None:
    gateway = intake.gateway

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})

    @app.get("/v1/evenflow/status")
    async def status(request: Request) -> Response:
        workers = [asdict(view) for view in gateway.pools.workers()]
        recent = gateway.recent(request.scope[CALLER].tenant)[:DECISIONS]
        decisions = [{name: call[name] for name in DECISION} for call in recent]
        calls = {"model": gateway.model, "num_calls": gateway.num_calls}
        peers = {"gateways": gateway.peers.all()}
        return JSONResponse(
            {
                **calls,
                **peers,
                "ready": gateway.is_ready,
                "workers": workers,
                "decisions": decisions,
                "scaling": None if gateway.scaler is None else gateway.scaler.status(),
            }
        )

    @app.get("/v1/evenflow/requests/{request_id:path}")
    async def explain(request: Request, request_id: str) -> Response:
        return JSONResponse(await intake.explain(request_id, request.scope[CALLER]))

    @app.post("/v1/evenflow/workers/{worker}/role")
    async def set_role(request: Request, worker: str) -> Response:
        role = await _field(request, "role")
        await intake.set_role(worker, role, request.scope[CALLER])
        return JSONResponse({"worker": worker, "role": role})

    @app.post("/v1/evenflow/workers/{worker}/drain")
    async def drain(request: Request, worker: str) -> Response:
        await intake.drain(worker, request.scope[CALLER])
        return JSONResponse({"worker": worker, "is_leaving": True})

    @app.post("/v1/evenflow/pools/{pool}/scale")
    async def scale(request: Request, pool: str) -> Response:
        body = Fields(await _small(request))
        workers = body.optional_integer("workers", 0, 1024)
        if workers is None:
            raise BadRequest("workers is missing", "workers")
        await intake.scale(pool, workers, request.scope[CALLER])
        return JSONResponse({"pool": pool, "workers": workers})

    @app.post("/v1/evenflow/requests/{request_id}/move")
    async def move(request: Request, request_id: str) -> Response:
        worker = await _field(request, "worker")
        intake.move(request_id, worker, request.scope[CALLER])
        return JSONResponse({"request_id": request_id, "worker": worker})


def _add_debug(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/debug/kv")
    async def page_ledgers(request: Request) -> Response:
        """Who holds each page of each worker, now."""
        check_admin(request.scope[CALLER])
        names = [view.id for view in gateway.pools.workers()]
        ledgers = await asyncio.gather(*(gateway.pools.ledger(name) for name in names))
        return JSONResponse(
            {name: asdict(ledger) for name, ledger in zip(names, ledgers, strict=True)}
        )


# ---------------------------------------------------------------------------- answers


class TokenResponse(Response):
    """Runs one generation and answers, as a stream or as one object."""

    def __init__(self, intake: Intake, ask: Ask) -> None:
        super().__init__()
        self._intake, self._ask, self._model = intake, ask, intake.settings.model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whichever comes first: the answer is sent, or the client has left."""
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        error = None if work.cancelled() else work.exception()
        if error is not None and not isinstance(error, OSError):  # OSError: the socket went away
            raise error

    async def _work(self, send: Send) -> None:
        async with aclosing(self._intake.answer(self._ask)) as deltas:
            if self._ask.streaming:
                await self._send_stream(deltas, send)
            else:
                await self._send_whole(deltas, send)

    async def _send_whole(self, deltas: Any, send: Send) -> None:
        try:
            collected: list[Delta] = [delta async for delta in deltas]
        except RequestFailed as error:
            await self._send_error(error, send)
            return
        body = render.answer(self._ask, collected, self._model)
        final = collected[-1].final
        headers = self._reply_headers(final.trace.mode if final else "")
        await _send_response(send, 200, headers, render.dumps(body).encode())

    async def _send_stream(self, deltas: Any, send: Send) -> None:
        """Headers go out with the first delta, so that an early error is a plain answer."""
        stream = render.Stream(self._ask, self._model)
        started = False
        try:
            async for delta in deltas:
                if not started:
                    await _start_stream(send, self._reply_headers(self._mode()))
                    started = True
                await _send_body(send, stream.events(delta), more=True)
        except RequestFailed as error:
            if not started:
                await self._send_error(error, send)
                return
            await _send_body(send, render.event(render.error_body(error)), more=False)
            return
        await _send_body(send, render.DONE, more=False)

    async def _send_error(self, error: RequestFailed, send: Send) -> None:
        headers = {**self._reply_headers(self._mode()), **_error_headers(error)}
        await _send_response(
            send, error.status, headers, render.dumps(render.error_body(error)).encode()
        )

    def _mode(self) -> str:
        generation = self._ask.generation
        return self._intake.gateway.mode(generation.id, generation.tenant)

    def _reply_headers(self, mode: str) -> dict[str, str]:
        headers = {"x-request-id": self._ask.generation.id}
        return {**headers, "x-evenflow-mode": mode} if mode else headers


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start_stream(send: Send, headers: dict[str, str]) -> None:
    sse = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
    await _send_start(send, 200, {**sse, "x-accel-buffering": "no", **headers})


async def _send_response(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    plain = {"content-type": "application/json", "content-length": str(len(body))}
    await _send_start(send, status, {**plain, **headers})
    await _send_body(send, body, more=False)


async def _send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


# ---------------------------------------------------------------------------- requests in


async def _json_body(request: Request, max_bytes: int) -> Any:
    """The parsed body; reading stops at the limits, whatever Content-Length says."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {max_bytes} are read")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {BODY_S:g} s") from None
    num_nodes = body.count(b"[") + body.count(b"{")
    if num_nodes > MAX_JSON_NODES or body.count(b",") > MAX_JSON_ITEMS:
        raise BadRequest("the body holds too many values")
    try:
        return json.loads(bytes(body), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        what = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise BadRequest(f"the body {what}") from error


async def _field(request: Request, name: str) -> str:
    """The one field of a small body."""
    value = (await _small(request)).get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} is missing, or is not a text", name)
    return value


async def _small(request: Request) -> dict[str, Any]:
    body = await _json_body(request, MAX_SMALL_BYTES)
    return body if isinstance(body, dict) else {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class KeyCheck:
    """Everything but the probes needs a key: what is not listed as open is closed."""

    def __init__(self, app: App, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and scope["path"] in OPEN_PATHS
        caller = ANYBODY if scope["type"] == "lifespan" or is_open else self._caller(scope)
        if caller is not None:
            scope[CALLER] = caller
            await self._app(scope, receive, send)
            return
        response = _error_response(Unauthenticated(KEY_NEEDED))
        if scope.get("method") == "GET":
            response.headers["www-authenticate"] = 'Basic realm="Evenflow", charset="UTF-8"'
        await response(scope, receive, send)

    def _caller(self, scope: Scope) -> ApiKey | None:
        """A browser may ask a person for the key, but only to look: a page elsewhere could make
        it send more."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) > 1:
            return None
        is_look = scope.get("method") in ("GET", "HEAD")
        return self._keys.find(b"".join(given).decode("latin-1"), basic=is_look)


class HeadLimit:
    """Many or long headers end here. What is still arriving, the server itself limits."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if len(headers) <= MAX_HEADERS and num_bytes <= MAX_HEAD_BYTES:
            await self._app(scope, receive, send)
            return
        error = HeadTooLarge(
            f"at most {MAX_HEADERS} headers with {MAX_HEAD_BYTES} bytes together are read"
        )
        await _error_response(error)(scope, receive, send)


# ---------------------------------------------------------------------------- errors out


def _error_headers(error: RequestFailed) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(math.ceil(error.retry_after_s))}
    return {}


def _error_response(error: RequestFailed) -> JSONResponse:
    return JSONResponse(render.error_body(error), error.status, _error_headers(error))


async def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailed)
    return _error_response(error)


async def _on_framework_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the framework itself, in the same shape as ours."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == 404:
        return _error_response(NotFound(f"there is no {path}"))
    if error.status_code == 405:
        response = _error_response(MethodNotAllowed(f"{request.method} is not offered on {path}"))
        response.headers.update(error.headers or {})
        return response
    return _error_response(BadRequest(str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("unexpected error in %s", request.url.path, exc_info=error)
    return _error_response(Internal("the server failed; its log says more"))
