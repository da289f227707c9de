"""What workers tell each other about pages, over gRPC: the service ``Pages``, both ends of it.

No page passes through here. The server belongs to the worker's event loop, which is never made to
wait; the client is called from transfer threads, and each call has a deadline.
"""

import asyncio
import contextlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from kvtransfer.core.handle import KVHandle
from kvtransfer.deadline import Deadline
from kvtransfer.transport import TransferError
from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as rpc

MAX_RELEASES = 4  # at a time; one to a source that is frozen takes until its timeout
RELEASE_TIMEOUT_S = 1.0  # a lease that nobody could release expires by itself
TOKEN = "x-evenflow-token"
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Options: TypeAlias = Sequence[tuple[str, Any]]
CLUSTER_NAME = "evenflow"  # addresses change; what certificates are for does not
AS_CLUSTER = ("grpc.ssl_target_name_override", CLUSTER_NAME)
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata by which processes of one deployment know each other."""
    return ((TOKEN, token),)


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """PEM: one certificate, for the name CLUSTER_NAME, that every process of a deployment shows,
    and the authority by which they know it. Without it they speak plain text."""

    cert: bytes
    key: bytes
    ca: bytes

    def server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)], root_certificates=self.ca, require_client_auth=True
        )

    @property
    def _client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def channel(self, address: str, options: Options) -> grpc.Channel:
        return grpc.secure_channel(address, self._client, options=(*options, AS_CLUSTER))

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, self._client, options=(*options, AS_CLUSTER))


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Calls without the deployment's token end before any handler sees them."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN, "")
        value = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(value, self._token):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_deny)


async def _deny(request: bytes, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not of this deployment")
    raise AssertionError("abort raises")


class NoLease(TransferError):
    """Expired, released or never granted. Nothing was sent; the pair is as good as before."""


class NoPair(TransferError):
    """The source knows no such pair, or has closed it: open another generation."""


class Unanswered(TransferError):
    """The source may have heard, and may be sending to somebody who does not listen any more."""


REFUSED = grpc.StatusCode.FAILED_PRECONDITION
STATUS = {NoLease: grpc.StatusCode.NOT_FOUND, NoPair: grpc.StatusCode.ABORTED}
ERROR = {status: error for error, status in STATUS.items()} | {REFUSED: TransferError}


class Endpoint(Protocol):
    """The source's side of the service. No method blocks; errors are TransferErrors."""

    def open(self, request: pb.OpenRequest) -> Future[dict[str, bytes]]:
        """Returns what the source's half of the pair says to the receiver's."""
        ...

    def send(self, request: pb.SendRequest) -> Future[pb.SendResponse]: ...

    def ready(self, request: pb.ReadyRequest) -> Future[pb.ReadyResponse]:
        """Done once more pages of a promised request may be sent, or are being sent."""
        ...

    def renew(self, request_ids: Sequence[str], incarnation: str) -> list[str]:
        """Returns the ids whose lease has ended."""
        ...

    def release(self, request_id: str, incarnation: str) -> None: ...


class _Pages(rpc.PagesServicer):  # type: ignore[misc]  # generated, untyped
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        try:
            entries = await asyncio.wrap_future(self._endpoint.open(request))
        except TransferError as error:
            await _refuse(context, error)
        return pb.OpenResponse(entries=entries)

    async def Send(self, request: pb.SendRequest, context: Context) -> pb.SendResponse:
        try:
            return await asyncio.wrap_future(self._endpoint.send(request))
        except TransferError as error:
            await _refuse(context, error)

    async def Ready(self, request: pb.ReadyRequest, context: Context) -> pb.ReadyResponse:
        try:
            return await _in_time(self._endpoint.ready(request), request)
        except TransferError as error:
            await _refuse(context, error)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        return pb.RenewResponse(gone=self._endpoint.renew(request.request_ids, request.incarnation))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._endpoint.release(request.request_id, request.incarnation)
        return pb.ReleaseResponse()


async def _in_time(answer: Future[pb.ReadyResponse], request: pb.ReadyRequest) -> pb.ReadyResponse:
    """The answer, if it begins in time. One whose bytes are being sent already has to be told."""
    waiting = asyncio.wrap_future(answer)
    try:
        await asyncio.wait({waiting}, timeout=request.timeout_s)
    finally:
        is_late = answer.cancel()  # nothing will be sent
    if is_late:
        raise TransferError(f"{request.request_id} makes no progress")
    return await waiting


async def _refuse(context: Context, error: TransferError) -> NoReturn:
    status = STATUS.get(type(error), REFUSED)
    await context.abort(status, str(error))
    raise AssertionError("abort raises")


def add_pages_service(server: grpc.aio.Server, endpoint: Endpoint) -> None:
    rpc.add_PagesServicer_to_server(_Pages(endpoint), server)


class PagesClient:
    """Calls to any number of sources. The channels used least recently are closed."""

    def __init__(self, max_channels: int, token: str = "", tls: ClusterTls | None = None) -> None:
        self._metadata, self._tls = credentials(token), tls
        self._max_channels = max_channels
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self._releasers = ThreadPoolExecutor(MAX_RELEASES, "kv-release")

    def open(self, source: str, request: pb.OpenRequest, deadline: Deadline) -> pb.OpenResponse:
        return self._call(source, "Open", request, deadline)

    def send(self, source: str, request: pb.SendRequest, deadline: Deadline) -> pb.SendResponse:
        return self._call(source, "Send", request, deadline)

    def ready(self, source: str, request: pb.ReadyRequest, deadline: Deadline) -> pb.ReadyResponse:
        return self._call(source, "Ready", request, deadline)

    def renew(self, handle: KVHandle, deadline: Deadline) -> bool:
        request = pb.RenewRequest(request_ids=[handle.request_id], incarnation=handle.incarnation)
        return not self._call(handle.source, "Renew", request, deadline).gone

    def release(self, handle: KVHandle) -> None:
        """Waits for the source's word, but not long."""
        self._call(handle.source, "Release", _release(handle), Deadline.after(RELEASE_TIMEOUT_S))

    def release_soon(self, handle: KVHandle) -> None:
        """The same without waiting, nor for what grpc does before it lets go of a call: that is
        milliseconds in which the pages could be used."""
        with contextlib.suppress(RuntimeError):  # closed: its leases expire
            self._releasers.submit(self._release, handle)

    def _release(self, handle: KVHandle) -> None:
        with contextlib.suppress(TransferError):  # the lease went with its holder, or will expire
            self.release(handle)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels, self._channels = self._channels, OrderedDict()
        self._releasers.shutdown(wait=False, cancel_futures=True)
        for channel in channels.values():
            channel.close()

    def _call(self, source: str, method: str, request: object, deadline: Deadline) -> pb.Message:
        timeout_s = deadline.left_s(method)
        try:
            call = getattr(self._stub(source), method)
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            kind = ERROR.get(error.code(), Unanswered)
            raise kind(f"{source} {method}: {error.details()}") from None
        except ValueError as error:  # the channel was closed under the call
            raise TransferError(f"{source} {method}: {error}") from None

    def _stub(self, source: str) -> rpc.PagesStub:
        evicted = None
        with self._lock:
            if self._is_closed:
                raise TransferError("transport closed")
            channel = self._channels.get(source)
            if channel is None:
                channel = self._channels[source] = self._connect(source)
            self._channels.move_to_end(source)
            if len(self._channels) > self._max_channels:
                evicted = self._channels.popitem(last=False)[1]
        if evicted is not None:
            evicted.close()
        return rpc.PagesStub(channel)

    def _connect(self, source: str) -> grpc.Channel:
        if self._tls is not None:
            return self._tls.channel(source, CHANNEL_OPTIONS)
        return grpc.insecure_channel(source, options=CHANNEL_OPTIONS)


def _release(handle: KVHandle) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(request_id=handle.request_id, incarnation=handle.incarnation)
