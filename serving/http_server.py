"""uvicorn, the only file that knows it: the HTTP server on a socket of ours, and what it refuses.

A client that sends its request's head slowly, or without end, is cut off here, before there is a
request that anybody could answer.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from serving.config import TlsConfig

HEAD_S = 10.0  # to send a request's head, from its first byte or the connection's start
MAX_PARTIAL_HEAD_BYTES = 64 << 10
CLOSE_S = 2  # for answers that are being sent when the server stops


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at run time
    """One connection, with limits on a head that is not complete yet."""

    head_s = HEAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._has_request:
            self._stop_waiting()
            return
        self._wait()
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_PARTIAL_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        self._num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self._has_request:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves one ASGI app on sockets that it is given. Leaves signals to its process."""

    def __init__(self, app: Callable[..., Any], tls: TlsConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Impatient,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=CLOSE_S,
                ssl_certfile=tls.cert or None,
                ssl_keyfile=tls.key or None,
                ssl_ca_certs=tls.client_ca or None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
