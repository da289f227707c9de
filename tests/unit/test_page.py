"""The status page: one file, offline, and what its script makes of our answers."""

import json
import re
import shutil
import subprocess

import pytest

from serving.api.openai import PAGE
from tests.fakes import FakePools, worker
from tests.front import front, keyring

SCRIPT = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)
# As much of a browser as the script uses: elements that keep what they are told.
BROWSER = """
class Node { constructor() { this.children = []; this.style = {}; this.textContent = ""; }
  append(...c) { this.children.push(...c); } replaceChildren(...c) { this.children = c; }
  setAttribute(name, value) { this[name] = value; }
  get text() { return this.textContent + this.children.map(c => c.text).join("|"); } }
const nodes = {};
const document = { createElement: () => new Node(),
  getElementById: id => nodes[id] ??= new Node() };
const answers = JSON.parse(require("fs").readFileSync(0));
let looks = 0;
const fetch = async path => ({ ok: true, json: async () => answers.status[looks],
  text: async () => answers.metrics[looks] });
const setTimeout = next => { if (++looks < answers.status.length) next(); else
  console.log(JSON.stringify(Object.fromEntries(Object.entries(nodes).map(
    ([id, node]) => [id, node.points ?? node.text])))); };
"""


async def test_the_page_is_one_file_that_loads_nothing() -> None:
    answer = await front().http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", answer.text)
    assert ".innerHTML" not in answer.text, "what clients name is text, never markup"


async def test_a_browser_is_asked_for_the_key() -> None:
    door = front(keys=keyring("secret"))
    answer = await door.http.get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert (await door.http.get("/", auth=("me", "secret"))).status_code == 200
    assert (await door.http.post("/tokenize", auth=("me", "secret"), json={})).status_code == 401


async def test_the_script_shows_workers_gaps_and_decisions() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    door = front(FakePools(worker("prefill-0"), worker("decode-0"), delay_s=0.01))
    status, metrics = [], []
    for _ in range(2):
        status.append((await door.http.get("/v1/evenflow/status")).json())
        metrics.append((await door.http.get("/metrics")).text)
        await door.complete("Hi", max_tokens=20, evenflow={"mode": "disaggregated"})
    status.append((await door.http.get("/v1/evenflow/status")).json())
    metrics.append((await door.http.get("/metrics")).text)
    assert SCRIPT is not None
    ran = subprocess.run(
        [node, "-e", BROWSER + SCRIPT[1]],
        input=json.dumps({"status": status, "metrics": metrics}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout)
    assert shown["model"] == "tiny" and shown["state"] == "ready"
    assert "prefill-0" in shown["pools"] and "decode-0" in shown["pools"]
    assert "disaggregated" in shown["decisions"] and "length" in shown["decisions"]
    assert re.fullmatch(r"\d+ ms|[\d.]+ s", shown["gap"]) and shown["gap"] != "0 ms"
    assert len(shown["line"].split()) == 2
