"""Between gateways and workers: certificates, both ways, and nobody gets in without one."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest

from kvtransfer.control import CHANNEL_OPTIONS, ClusterTls, credentials
from serving.certificates import read_cluster_tls
from serving.config import ClusterTlsConfig, Config, ConfigError
from serving.deployments.worker import WorkerProcess
from serving.front import FrontDoor
from tests.certificates import Authority, Pair

pytestmark = pytest.mark.cluster
LOCAL, TOKEN = "127.0.0.1", "t" * 32


@dataclass(frozen=True, slots=True)
class Party:
    """Certificates that a deployment shows, and others."""

    ours: ClusterTls
    config: ClusterTlsConfig
    expired: Pair
    misnamed: Pair
    stranger: Pair
    other_ca: Path


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> Party:
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    pair = ours.sign("cluster", host="evenflow")
    config = ClusterTlsConfig(str(pair.cert), str(pair.key), str(ours.pem))
    found = read_cluster_tls(config)
    assert found is not None
    return Party(
        found,
        config,
        expired=ours.sign("expired", days=-1, host="evenflow"),
        misnamed=ours.sign("misnamed", host="elsewhere"),
        stranger=theirs.sign("stranger", host="evenflow"),
        other_ca=theirs.pem,
    )


@contextlib.asynccontextmanager
async def deployed(folder: Path, party: Party) -> AsyncIterator[tuple[FrontDoor, list[str]]]:
    """A gateway, a prefill and a decode worker, in this process."""
    config = Config(
        mixed=0, prefill=1, decode=1, http_port=0, grpc_port=0, threads=1, num_pages=64,
        max_num_batched_tokens=64, dtype="float32", device="cpu", cluster_tls=party.config,
    )  # fmt: skip
    workers = [WorkerProcess(config, f"{r}-0", r, LOCAL, TOKEN) for r in ("prefill", "decode")]
    door = FrontDoor(config, folder, TOKEN)
    await door.start()
    try:
        for worker in workers:
            await worker.start(folder)
        door.update({worker.worker_id: worker.address for worker in workers})
        async with asyncio.timeout(30):
            while len(door.pools.workers()) < 2:
                await asyncio.sleep(0.05)
        yield door, [worker.address for worker in workers]
    finally:
        await door.stop()
        for worker in workers:
            await worker.stop()


async def call(channel: grpc.aio.Channel, token: str = TOKEN) -> grpc.StatusCode:
    """How the deployment's own call ends: a worker without debug denies it by name."""
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            ledger = channel.unary_unary("/evenflow.v1.Worker/GetKVLedger")
            await ledger(b"", metadata=credentials(token), timeout=3)
    return error.value.code()


async def test_pages_and_tokens_travel_and_eight_strangers_do_not_get_in(
    t0_with_tokenizer: Path, party: Party
) -> None:
    codes = grpc.StatusCode
    async with deployed(t0_with_tokenizer, party) as (door, addresses):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(
                f"http://{LOCAL}:{door.http_port}/v1/completions",
                json={
                    "prompt": "The sea " * 30,
                    "max_tokens": 4,
                    "evenflow": {"mode": "disaggregated"},
                },
            )
        assert answer.status_code == 200, answer.text
        assert answer.json()["evenflow"]["mode"] == "disaggregated"
        assert answer.json()["evenflow"]["fallback"] is None, "the pages came over TLS calls"
        ours, options = party.ours, CHANNEL_OPTIONS
        for address in addresses:
            assert await call(ours.aio_channel(address, options)) is codes.PERMISSION_DENIED
            strangers = {
                "another authority's": _with(ours, party.stranger),
                "expired": _with(ours, party.expired),
                "no certificate": None,
                "does not know ours": replace(ours, ca=party.other_ca.read_bytes()),
            }
            for name, tls in strangers.items():
                channel = (
                    grpc.aio.secure_channel(
                        address,
                        grpc.ssl_channel_credentials(ours.ca),
                        options=(("grpc.ssl_target_name_override", "evenflow"),),
                    )
                    if tls is None
                    else tls.aio_channel(address, options)
                )
                assert await call(channel) is codes.UNAVAILABLE, name
            plain = grpc.aio.insecure_channel(address)
            assert await call(plain) is codes.UNAVAILABLE
            by_address = grpc.aio.secure_channel(
                address, grpc.ssl_channel_credentials(ours.ca, ours.key, ours.cert)
            )
            assert await call(by_address) is codes.UNAVAILABLE, "it is for evenflow, not for this"
            wrong = call(ours.aio_channel(address, options), "another token")
            assert await wrong is codes.UNAUTHENTICATED
            assert not await asyncio.to_thread(_old_tls_passes, address, party)


def _with(tls: ClusterTls, pair: Pair) -> ClusterTls:
    return replace(tls, cert=pair.cert.read_bytes(), key=pair.key.read_bytes())


def _old_tls_passes(address: str, party: Party) -> bool:
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=party.config.ca)
    context.load_cert_chain(party.config.cert, party.config.key)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    try:
        with socket.create_connection((host, int(port)), 3) as sock:
            context.wrap_socket(sock, server_hostname="evenflow").close()
    except OSError:
        return False
    return True


async def test_a_gateway_trusts_no_worker_of_another_name(party: Party) -> None:
    """A server whose certificate is good, but for somebody else, gets nothing."""
    misnamed = _with(party.ours, party.misnamed)
    server = grpc.aio.server()
    port = server.add_secure_port(f"{LOCAL}:0", misnamed.server())
    await server.start()
    try:
        channel = party.ours.aio_channel(f"{LOCAL}:{port}", CHANNEL_OPTIONS)
        assert await call(channel) is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(None)


def test_bad_files_stop_the_start(t0_with_tokenizer: Path, party: Party, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        ClusterTlsConfig(cert=party.config.cert)
    for bad in (
        replace(party.config, key=str(party.stranger.key)),
        replace(party.config, ca=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError, match="cluster_tls"):
            FrontDoor(Config(cluster_tls=bad), t0_with_tokenizer)
        with pytest.raises(ConfigError, match="cluster_tls"):
            WorkerProcess(Config(cluster_tls=bad), "w", "mixed")
