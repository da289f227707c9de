"""A whole front door over FakePools, spoken to in process, and readers for what it says."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from serving.api.openai import build_app
from serving.api.settings import FrontSettings
from serving.auth import ApiKey, Keyring, digest
from serving.gateway import Gateway
from tests.fakes import FakePools, Script, scripted
from tests.tokenizers import plain_tokenizer

MODEL = "tiny"
TOKENIZER = plain_tokenizer()
DISAGGREGATED = {"mode": "disaggregated"}


@dataclass(slots=True)
class Front:
    pools: FakePools
    gateway: Gateway
    http: httpx.AsyncClient

    async def complete(self, prompt: Any = "Hello there", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **body})

    async def chat(self, content: Any = "Hello there", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, **body}
        return await self.http.post("/v1/chat/completions", json=body)

    async def metric(self, name: str) -> float:
        """The sum over all label values."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.split("{")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def front(pools: FakePools | None = None, *, max_queue: int = 256, **settings: Any) -> Front:
    pools = pools or FakePools()
    gateway = Gateway(pools, TOKENIZER, model=MODEL, max_queue=max_queue)
    app = build_app(gateway, FrontSettings(MODEL, **{"debug": True, **settings}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return Front(pools, gateway, httpx.AsyncClient(transport=transport, base_url="http://front"))


def keyring(*keys: str) -> Keyring:
    """Each key is its own name and tenant, without limits."""
    return Keyring(ApiKey(key, digest(key), key) for key in keys)


def says(text: str) -> Script:
    """Workers answer with these characters and then end the answer."""
    return scripted([*TOKENIZER.encode(text), 2])


def events(response: httpx.Response) -> list[Any]:
    """The JSON events of a stream; [DONE] as a string."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    found = events(response)
    assert found.pop() == "[DONE]"
    return found


def deltas(response: httpx.Response, index: int = 0) -> list[str]:
    """The texts of one choice, in order, without empty ones."""
    texts = []
    for chunk in chunks(response):
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                texts.append(text)
    return [text for text in texts if text]
