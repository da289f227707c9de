"""Strangers at the doors: without a key, without a certificate, with too much or too slow."""

import asyncio
import itertools
import os
import pickle
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos import evenflow_pb2 as pb
from protos import evenflow_pb2_grpc as services
from serving.api.openai import OPEN_PATHS, build_app
from serving.api.settings import FrontSettings
from serving.auth import digest
from serving.config import Config, ConfigError, TlsConfig
from serving.front import FrontDoor
from serving.gateway import Gateway
from serving.http_server import HttpServer, Impatient
from tests.certificates import Authority, Pair
from tests.fakes import FakePools
from tests.front import MODEL, TOKENIZER
from tests.integration.conftest import Running

pytestmark = pytest.mark.cluster
LOCAL = "127.0.0.1"


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[FrontDoor]:
    """Both doors of a gateway that has no workers."""
    door = FrontDoor(Config(host=LOCAL, http_port=0, grpc_port=0, **settings), folder)
    await door.start()
    try:
        yield door
    finally:
        await door.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n- {{name: alice, sha256: {digest('secret')}}}\n")
    return str(path)


# ---------------------------------------------------------------------------- keys


def spellings(path: str) -> list[bytes]:
    """Ways to write a path in the hope that whoever checks it reads it otherwise."""
    raw = path.encode()
    return [
        raw,
        b"/" + raw,
        raw.upper(),
        raw + b"/",
        raw + b"//",
        b"/health/.." + raw,
        b"/./" + raw.lstrip(b"/"),
        b"/%2e" + raw,
        raw.replace(b"/", b"%2f", 1).join((b"/", b"")),
        raw + b";/health",
        raw + b"?/health",
        raw + b"%00/health",
        b"http://127.0.0.1" + raw,
    ]


async def raw_status(port: int, method: str, target: bytes, headers: bytes = b"") -> int:
    reader, writer = await asyncio.open_connection(LOCAL, port)
    try:
        head = method.encode() + b" " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(head + headers + b"content-length: 0\r\n\r\n")
        async with asyncio.timeout(5):
            line = await reader.readline()
        return int(line.split()[1])
    finally:
        writer.close()


async def test_no_spelling_of_any_route_passes_without_a_key(
    t0_with_tokenizer: Path, key_file: str
) -> None:
    """FAULTS 117: every route, in 13 spellings, with every method and three kinds of no key."""
    async with opened(t0_with_tokenizer, api_keys=key_file, debug=True) as door:
        app = build_app(door.gateway, FrontSettings("x", debug=True))
        paths = {route.path for route in app.routes} - OPEN_PATHS  # type: ignore[attr-defined]
        paths |= {"/", "/invocations", "/docs", "/openapi.json", "/debug/kv", "/v1"}
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        wrong = (b"", b"authorization: Bearer nope\r\n", b"authorization: Bearer\r\n")
        passed = []
        for path, no_key in itertools.product(sorted(paths), wrong):
            for target in spellings(
                path.replace("{name:path}", "m").replace("{request_id:path}", "r")
            ):
                for method in ("GET", "POST"):
                    status = await raw_status(door.http_port, method, target, no_key)
                    if status not in (400, 401):
                        passed.append((method, target, status))
        for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
            assert await raw_status(door.http_port, method, b"/v1/models") == 401
        assert await raw_status(door.http_port, "GET", b"/v1/models", upgrade) == 401
        two = b"authorization: Bearer secret\r\nauthorization: Bearer x\r\n"
        assert await raw_status(door.http_port, "GET", b"/v1/models", two) == 401
        assert passed == []
        for path in OPEN_PATHS - {"/ready"}:
            assert await raw_status(door.http_port, "GET", path.encode()) == 200
        key = b"authorization: Bearer secret\r\n"
        assert await raw_status(door.http_port, "GET", b"/v1/evenflow/status", key) == 200


async def test_no_method_answers_without_a_key(t0_with_tokenizer: Path, key_file: str) -> None:
    """FAULTS 117, over gRPC: those that do not exist included."""
    names = [
        *(
            f"/{service.full_name}/{method.name}"
            for service in pb.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/evenflow.v1.Inference/Nothing", "/evenflow.v1.inference/Generate", "//Generate",
        "/evenflow.v1.Worker/Attach", "/grpc.health.v1.Health/List",
    ]  # fmt: skip
    wrong: list[Any] = [
        (), (("authorization", "Bearer nope"),), (("authorization", "secret"),),
        (("authorization", "Bearer secret"), ("authorization", "Bearer secret")),
        (("authorization-bin", b"Bearer secret"),),
    ]  # fmt: skip
    async with opened(t0_with_tokenizer, api_keys=key_file) as door:
        channel = grpc.aio.insecure_channel(f"{LOCAL}:{door.grpc_port}")
        async with channel:
            for name, metadata in itertools.product(names, wrong):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    async for _ in channel.unary_stream(name)(b"", metadata=metadata, timeout=5):
                        pass
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, (name, metadata)
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
            await services.ClusterStub(channel).GetStatus(
                pb.GetStatusRequest(), metadata=(("authorization", "Bearer secret"),), timeout=5
            )


# ---------------------------------------------------------------------------- TLS


class Party:
    """Certificates of a server and of clients that it should and should not accept."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
        self.ca, self.other_ca = ours.pem, theirs.pem
        self.server, self.client = ours.sign("server"), ours.sign("client")
        self.stranger = theirs.sign("stranger")
        self.expired = ours.sign("expired", days=-1)

    def config(self, *, mutual: bool) -> TlsConfig:
        ca = str(self.ca) if mutual else ""
        return TlsConfig(str(self.server.cert), str(self.server.key), ca)

    async def get(self, port: int, ca: Path, pair: Pair | None = None, **options: Any) -> int:
        context = ssl.create_default_context(cafile=str(ca))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        if "maximum" in options:
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.maximum_version = options["maximum"]
        host = options.get("host", "localhost")
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            url = f"https://{LOCAL}:{port}/version"
            answer = await client.get(url, extensions={"sni_hostname": host}, timeout=5)
            return answer.status_code

    async def call(self, port: int, ca: Path | None, pair: Pair | None = None) -> None:
        where = f"localhost:{port}"
        if ca is None:
            channel = grpc.aio.insecure_channel(where)
        else:
            key, cert = (pair.key.read_bytes(), pair.cert.read_bytes()) if pair else (None, None)
            channel = grpc.aio.secure_channel(
                where, grpc.ssl_channel_credentials(ca.read_bytes(), key, cert)
            )
        async with channel:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=3)


async def test_tls_fails_closed_on_both_doors(t0_with_tokenizer: Path, tmp_path: Path) -> None:
    party = Party(tmp_path)
    async with opened(t0_with_tokenizer, tls=party.config(mutual=True)) as door:
        http, rpc = door.http_port, door.grpc_port
        assert await party.get(http, party.ca, party.client) == 200
        await party.call(rpc, party.ca, party.client)
        for pair in (None, party.stranger, party.expired):
            with pytest.raises(httpx.TransportError):
                await party.get(http, party.ca, pair)
            with pytest.raises(grpc.aio.AioRpcError):
                await party.call(rpc, party.ca, pair)
        with pytest.raises(httpx.TransportError):  # the client does not know the authority
            await party.get(http, party.other_ca, party.client)
        with pytest.raises(grpc.aio.AioRpcError):
            await party.call(rpc, party.other_ca, party.client)
        with pytest.raises(httpx.TransportError):  # the certificate is for somebody else
            await party.get(http, party.ca, party.client, host="elsewhere.example")
        with pytest.raises(httpx.TransportError):
            await party.get(http, party.ca, party.client, maximum=ssl.TLSVersion.TLSv1_1)
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as plain:
                await plain.get(f"http://{LOCAL}:{http}/version", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError):
            await party.call(rpc, None)
        assert await party.get(http, party.ca, party.client) == 200


async def test_tls_without_client_certificates(t0_with_tokenizer: Path, tmp_path: Path) -> None:
    party = Party(tmp_path)
    async with opened(t0_with_tokenizer, tls=party.config(mutual=False)) as door:
        assert await party.get(door.http_port, party.ca) == 200
        await party.call(door.grpc_port, party.ca)


def test_a_bad_certificate_is_refused_before_anything_listens(
    t0_with_tokenizer: Path, tmp_path: Path
) -> None:
    party = Party(tmp_path)
    bad = TlsConfig(str(party.server.cert), str(party.client.key))
    for tls in (bad, TlsConfig(str(tmp_path / "none"), str(party.server.key))):
        with pytest.raises(ConfigError, match="tls"):
            FrontDoor(Config(tls=tls), t0_with_tokenizer)


# ---------------------------------------------------------------------------- too much, too slow


@asynccontextmanager
async def http_port(**settings: Any) -> AsyncIterator[int]:
    gateway = Gateway(FakePools(), TOKENIZER, model=MODEL)
    server = HttpServer(build_app(gateway, FrontSettings(MODEL, **settings)), TlsConfig())
    with socket.create_server((LOCAL, 0)) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def send(port: int, *parts: bytes) -> bytes:
    """What comes back until the server closes, or has said something and waits."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(3):
            answer = await reader.read(1 << 16)
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def chunked(body: bytes) -> list[bytes]:
    pieces = [body[i : i + 65536] for i in range(0, len(body), 65536)]
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]


async def test_what_is_too_large_is_refused_cheaply() -> None:
    """FAULTS 123."""
    mib = 1 << 20
    hundred = b"[" * (100 * mib)
    cases = {
        "a header of 1 MB": [POST + b"x-big: " + b"a" * mib + b"\r\n\r\n"],
        "a header in small pieces": [POST + b"x-big: ", *[b"a" * 1000] * 1000, b"\r\n\r\n"],
        "5,000 headers": [POST + b"".join(b"x-%d: 1\r\n" % i for i in range(5000)) + b"\r\n"],
        "a long URL": [b"GET /" + b"a" * mib + b" HTTP/1.1\r\n\r\n"],
        "100 MB, honest": [POST + b"content-length: %d\r\n\r\n" % len(hundred), hundred],
        "100 MB, lying": [POST + b"content-length: 10\r\n\r\n", hundred],
        "100 MB, chunked": [POST + b"transfer-encoding: chunked\r\n\r\n", *chunked(hundred)],
    }
    async with http_port() as port:
        before = resident_bytes()
        for name, parts in cases.items():
            answer = await send(port, *parts)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), (name, answer[:200])
        del cases, hundred
        assert resident_bytes() - before < 100 * mib
        async with httpx.AsyncClient(base_url=f"http://{LOCAL}:{port}", trust_env=False) as client:
            for name, body in {
                "deep": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
                "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
                "a long prompt": b'{"prompt": [' + b"5," * 999_999 + b"5]}",
                "many prompts": b'{"prompt": [' + b'"x",' * 9_999 + b'"x"]}',
                "many lists": b'{"prompt": [' + b"[]," * 999_999 + b"[]]}",
                "many zeros": b'{"n": ' + b"1" * 100_000 + b"}",
            }.items():
                started = time.monotonic()
                answer = await client.post("/v1/completions", content=body)
                assert answer.status_code == 400, (name, answer.text[:200])
                assert len(answer.content) < 1000 and time.monotonic() - started < 5, name
            assert (await client.get("/health")).status_code == 200


async def test_slow_heads_are_cut_off_and_slow_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 123: 200 sockets that send a byte now and then."""
    monkeypatch.setattr(Impatient, "head_s", 0.5)
    async with http_port() as port:
        slow = [await asyncio.open_connection(LOCAL, port) for _ in range(200)]
        for _, writer in slow:
            writer.write(b"GET /hea")
        async with httpx.AsyncClient(base_url=f"http://{LOCAL}:{port}", trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            for _ in range(8):  # a byte does not buy time
                await asyncio.sleep(0.1)
                for _, writer in slow:
                    writer.write(b"l")
            async with asyncio.timeout(5):
                closed = await asyncio.gather(
                    *(reader.read() for reader, _ in slow), return_exceptions=True
                )
            assert all(r == b"" or isinstance(r, ConnectionError) for r in closed)
            assert (await client.get("/health")).status_code == 200
        for _, writer in slow:
            writer.close()


async def test_a_connection_may_be_used_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Impatient, "head_s", 0.2)
    async with http_port() as port:
        reader, writer = await asyncio.open_connection(LOCAL, port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(15)
            await asyncio.sleep(0.4)
        writer.write(b"GET /health")
        assert await reader.read() == b""
        writer.close()


# ---------------------------------------------------------------------------- bytes that bite


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Where these processes listen for TCP."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
            except OSError:
                continue
    found = set()
    lines = [
        line
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    for fields in map(str.split, lines):
        if fields[3] == "0A" and fields[9] in inodes:
            found.add((LOCAL, int(fields[1].split(":")[1], 16)))
    return found


def test_bytes_at_any_port_of_ours_run_nothing(evenflow: Running, tmp_path: Path) -> None:
    """FAULTS 115: a pickle bomb and random bytes at the gateway and at each worker."""
    replicas = {
        pid
        for pid in evenflow.descendants()
        if b"ServeReplica" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    ports = listening(replicas)
    assert len(replicas) == 3 and len(ports) >= 4
    rng, mark = random.Random(3), tmp_path / "executed"
    blobs = [pickle.dumps(Bomb(mark), protocol) for protocol in range(6)]
    blobs += [rng.randbytes(rng.randint(1, 4096)) for _ in range(1000 // len(ports))]
    blobs += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + blob for blob in blobs[:60]]
    for where, blob in itertools.product(sorted(ports), blobs):
        try:
            with socket.create_connection(where, 2) as sock:
                sock.sendall(blob)
        except OSError:
            continue
    assert not mark.exists()
    alive = {
        pid
        for pid in evenflow.descendants()
        if b"ServeReplica" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    assert alive == replicas
    with evenflow.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
        assert answer.status_code == 200 and len(client.get("/v1/models").json()["data"]) == 1
