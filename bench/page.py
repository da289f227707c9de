"""A picture of the status page while Evenflow works: for the README, and to see it as others do.

    python -m bench.page        # needs Chromium: apt-get install chromium

Serves the demo model with a mixed, a prefill and a decode worker, plays chats for half a minute,
and writes ``bench/results/page.png``.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import websockets

from bench.client import open_client, stream
from bench.report import RESULTS
from bench.server import serving
from bench.workloads import prompt_of

SIZE = (1100, 1120)
MODES = ("auto", "mixed", "disaggregated")


async def play(url: str, stop: asyncio.Event) -> None:
    """Six chats at a time, a long prompt among them now and then."""
    async with open_client(url) as client:

        async def chat(i: int) -> None:
            num = 0
            while not stop.is_set():
                length = 900 if i == 0 and num % 3 == 2 else 40
                mode = {"mode": MODES[(i + num) % 3]}
                await stream(client, f"chat-{i}", prompt_of(length, 9 * num + i), 48, evenflow=mode)
                num += 1

        await asyncio.gather(*(chat(i) for i in range(6)))


@contextlib.asynccontextmanager
async def browser(url: str) -> Any:
    """A headless Chromium that shows ``url``; the address of its page for tools."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}",
            f"--window-size={SIZE[0]},{SIZE[1]}", url,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            told = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(60):
                while not told.exists() or "\n" not in told.read_text():
                    await asyncio.sleep(0.1)
            port = told.read_text().split()[0]
            async with open_client(f"http://127.0.0.1:{port}") as client:
                pages = (await client.get("/json/list")).json()
            yield next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
        finally:
            process.terminate()
            await process.wait()


async def take(url: str, seconds: float, path: Path) -> None:
    stop = asyncio.Event()
    load = asyncio.create_task(play(url, stop))
    async with browser(url) as page, websockets.connect(page, max_size=None) as socket:
        await asyncio.sleep(seconds)
        await socket.send(json.dumps({"id": 1, "method": "Page.captureScreenshot"}))
        while (answer := json.loads(await socket.recv())).get("id") != 1:
            pass
    path.write_bytes(base64.b64decode(answer["result"]["data"]))
    stop.set()
    await load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of load before the picture")
    parser.add_argument("--url", help="a running Evenflow instead of one of its own")
    args = parser.parse_args()
    path = RESULTS / "page.png"
    flags = ["--mixed", "1", "--prefill", "1", "--decode", "1", "--ray", "local"]
    with contextlib.nullcontext(args.url) if args.url else serving(*flags) as url:
        asyncio.run(take(url, args.seconds, path))
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
