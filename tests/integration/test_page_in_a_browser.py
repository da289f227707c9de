"""The status page in a real browser, headless: what a person would see."""

import asyncio
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from serving.api.openai import build_app
from serving.api.settings import FrontSettings
from serving.config import TlsConfig
from serving.gateway import Gateway
from serving.http_server import HttpServer
from tests.fakes import FakePools, worker
from tests.front import MODEL, TOKENIZER

pytestmark = pytest.mark.cluster
LOCAL = "127.0.0.1"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
async def test_a_browser_shows_the_workers_and_the_last_decisions(tmp_path: Path) -> None:
    pools = FakePools(worker("prefill-0"), worker("decode-0"), worker("mixed-0"))
    gateway = Gateway(pools, TOKENIZER, model=MODEL)
    server = HttpServer(build_app(gateway, FrontSettings(MODEL)), TlsConfig())
    with socket.create_server((LOCAL, 0)) as sock:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        url = f"http://{LOCAL}:{sock.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            body = {"prompt": "canary text", "max_tokens": 3}
            headers = {"x-request-id": "asked-by-somebody"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).is_success
        process = await asyncio.create_subprocess_exec(
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--virtual-time-budget=4000", f"--user-data-dir={tmp_path}", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                page = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            server.should_exit = True
            await task
    for shown in ("prefill-0", "decode-0", "mixed-0", "asked-by-somebody", MODEL):
        assert shown in page
    assert "canary" not in page
