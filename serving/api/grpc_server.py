"""The front door over gRPC: ``evenflow.v1.Inference`` and ``Cluster``, health and reflection.

The same intake and the same gateway as HTTP: here is only the mapping to and from messages.
Streaming handlers write to their context, so that a cancelled call closes its generation at once.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as services
from serving.api import grpc_messages as wire
from serving.api.intake import Ask, Intake
from serving.api.settings import FrontSettings
from serving.auth import ApiKey, Keyring
from serving.errors import Overloaded, RequestFailed, Unauthenticated
from serving.gateway import Gateway

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
ServerTls = grpc.ServerCredentials
Context = grpc.aio.ServicerContext[Any, Any]

SERVICES = tuple(
    pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Inference", "Cluster")
)
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
KEY_NEEDED = "a valid API key is needed: metadata authorization, Bearer KEY"
MAX_METADATA_BYTES = 32 << 10
HEALTH_PERIOD_S = 0.5  # how often a watched health is looked at
WATCH_S = (0.1, 1.0)  # shortest and usual time between two answers of a watch
METADATA = ("x-evenflow-mode", "x-slo-ttft-ms", "x-slo-itl-ms", "x-evenflow-worker")


def server_tls(cert: Path, key: Path, client_ca: Path | None) -> ServerTls:
    """From PEM files. With ``client_ca`` only clients that it signed get past the handshake."""
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())],
        root_certificates=client_ca.read_bytes() if client_ca else None,
        require_client_auth=client_ca is not None,
    )


class GrpcServer:
    """Listens from ``start`` to ``stop``."""

    def __init__(
        self, gateway: Gateway, settings: FrontSettings, tls: ServerTls | None = None
    ) -> None:
        limit = settings.max_body_bytes
        self._tls = tls
        self._server = grpc.aio.server(
            interceptors=(_KeyCheck(settings.keys),),
            options=(
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", -1),
            ),
        )
        intake = Intake(gateway, settings)
        services.add_InferenceServicer_to_server(_Inference(intake), self._server)
        services.add_ClusterServicer_to_server(_Cluster(intake), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(gateway), self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*SERVICES, health, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """The port that was bound (``port`` may be 0). OSError when it is in use."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self._server.add_insecure_port(where)
            else:
                bound = self._server.add_secure_port(where, self._tls)
        except RuntimeError as error:
            raise OSError(f"{where} cannot be bound") from error
        await self._server.start()
        return bound

    async def stop(self, grace_s: float = 0.0) -> None:
        """Calls still running after ``grace_s`` are cancelled."""
        await self._server.stop(grace_s)


class _Inference(services.InferenceServicer):  # type: ignore[misc]  # generated, untyped
    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._created = int(time.time())

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with _answering(context):
            body = wire.completion_body(request)
            ask = await self._intake.completion(
                body,
                caller=_caller(context, self._intake.settings),
                headers=_metadata(context),
                request_id=request.options.request_id,
            )
            await self._stream(ask, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        async with _answering(context):
            body = wire.chat_body(request)
            ask = await self._intake.chat(
                body,
                caller=_caller(context, self._intake.settings),
                headers=_metadata(context),
                request_id=request.options.request_id,
            )
            await self._stream(ask, context)

    async def _stream(self, ask: Ask, context: Context) -> None:
        async with contextlib.aclosing(self._intake.answer(ask)) as deltas:
            async for delta in deltas:
                await context.write(wire.response(ask.generation.id, delta))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with _answering(context):
            ids = await self._intake.tokenize(wire.tokenize_body(request))
            max_model_len = self._intake.gateway.limits().max_model_len
            return pb.TokenizeResponse(token_ids=ids, max_model_len=max_model_len)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with _answering(context):
            body = {"model": request.model, "tokens": list(request.token_ids)}
            return pb.DetokenizeResponse(text=await self._intake.detokenize(body))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with _answering(context):
            max_model_len = self._intake.gateway.limits().max_model_len
            settings = self._intake.settings
            names = (settings.model, *sorted(settings.aliases))
            return pb.ListModelsResponse(
                models=[
                    pb.Model(id=name, created=self._created, max_model_len=max_model_len)
                    for name in names
                ]
            )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with _answering(context):
            self._intake.abort(request.request_id, _caller(context, self._intake.settings))
            return pb.AbortResponse()


class _Cluster(services.ClusterServicer):  # type: ignore[misc]  # generated, untyped
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:
        async with _answering(context):
            return self._status(context)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Context) -> None:
        async with _answering(context):
            least, usual = WATCH_S
            while True:  # until the client cancels
                await context.write(self._status(context))
                await asyncio.sleep(max(least, request.period_s) if request.period_s else usual)

    def _status(self, context: Context) -> pb.Status:
        caller = _caller(context, self._intake.settings)
        return wire.status(self._intake.gateway, caller.tenant)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        async with _answering(context):
            caller = _caller(context, self._intake.settings)
            found = await self._intake.explain(request.request_id, caller)
            return wire.explanation(found)

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:
        async with _answering(context):
            caller = _caller(context, self._intake.settings)
            await self._intake.set_role(request.worker, request.role, caller)
            return pb.SetRoleResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async with _answering(context):
            await self._intake.drain(request.worker, _caller(context, self._intake.settings))
            return pb.DrainResponse()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        async with _answering(context):
            caller = _caller(context, self._intake.settings)
            await self._intake.scale(request.pool, request.workers, caller)
            return pb.ScaleResponse()

    async def Move(self, request: pb.MoveRequest, context: Context) -> pb.MoveResponse:
        async with _answering(context):
            caller = _caller(context, self._intake.settings)
            self._intake.move(request.request_id, request.worker, caller)
            return pb.MoveResponse()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated, untyped
    """SERVING while the gateway can take requests; asked for, never pushed into it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", *SERVICES):
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._status(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last = None
        while True:  # until the client cancels
            status = self._status(request.service)
            if status != last:
                await context.write(status)
                last = status
            await asyncio.sleep(HEALTH_PERIOD_S)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if service not in ("", *SERVICES):
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._gateway.is_ready else kinds.NOT_SERVING)


class _KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Every method but the probes needs a key, those that do not exist included."""

    def __init__(self, keys: Keyring) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if (
            handler_call_details.method in OPEN_METHODS
            or self._keys.find(_authorization(handler_call_details.invocation_metadata)) is not None
        ):
            handler: Handler = _forgiving(await continuation(handler_call_details))
            return handler
        return grpc.unary_unary_rpc_method_handler(_refuse)


def _forgiving(handler: Any) -> Any:
    """Bytes that are no message are the client's fault: grpc itself would call them UNKNOWN, and
    log a traceback."""
    if handler is None or handler.request_streaming:
        return handler
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    inner, parse = getattr(handler, kind), handler.request_deserializer

    def parsed(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            return None

    async def call(request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no such message")
        return await inner(request, context)

    return handler._replace(request_deserializer=parsed, **{kind: call})


async def _refuse(request: bytes, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, KEY_NEEDED)


def _caller(context: Context, settings: FrontSettings) -> ApiKey:
    caller = settings.keys.find(_authorization(context.invocation_metadata()))
    if caller is None:  # never past _KeyCheck
        raise Unauthenticated(KEY_NEEDED)
    return caller


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The one value; none when there are several."""
    values = [value for name, value in metadata or () if name == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else ""


@contextlib.asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """One status for whatever goes wrong inside."""
    try:
        yield
    except RequestFailed as error:
        code = getattr(grpc.StatusCode, error.grpc)
        await context.abort(code, error.message, _retry_metadata(error))
    except Exception:
        logger.exception("unexpected error in a gRPC call")
        await context.abort(grpc.StatusCode.INTERNAL, "the server failed; its log says more")


def _retry_metadata(error: RequestFailed) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, Overloaded):
        return ()
    retry_ms = str(round(error.retry_after_s * 1000))
    return (("grpc-retry-pushback-ms", retry_ms), ("retry-after-ms", retry_ms))


def _all_metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _metadata(context: Context) -> dict[str, str]:
    found = _all_metadata(context)
    return {name: found[name] for name in METADATA if name in found}
