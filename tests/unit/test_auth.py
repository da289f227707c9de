"""Keys, their files and their limits."""

import base64
import random
from pathlib import Path

import pytest

from serving.auth import ANYBODY, ApiKey, Keyring, digest, load_keys, new_key
from serving.config import Config, ConfigError, load_config
from serving.core.quota import Quota
from serving.errors import RateLimited
from tests.fakes import FakePools, worker
from tests.front import front, keyring, says

HASH = digest("secret")


def test_a_key_is_found_by_its_text_and_kept_as_a_hash() -> None:
    keys = keyring("secret", "other")
    assert keys.find("Bearer secret").name == "secret"
    assert keys.find("bearer  other ").name == "other"
    assert "secret" not in repr([k.sha256 for _, k in keys._keys])
    assert len({new_key() for _ in range(100)}) == 100 and len(new_key()) > 40


@pytest.mark.parametrize(
    "value",
    ["", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "Bearer Secret",
     "Digest secret", "Bearer\tsecret", "Bearer " + "s" * 10_000, "Basic secret", "Basic ????"],
)  # fmt: skip
def test_what_is_not_a_key_finds_nobody(value: str) -> None:
    assert keyring("secret").find(value) is None
    assert Keyring().find(value) is ANYBODY


def test_a_browser_sends_the_key_as_a_password() -> None:
    value = "Basic " + base64.b64encode(b"me:secret").decode()
    assert keyring("secret").find(value, basic=True).name == "secret"
    assert keyring("secret").find(value) is None


def test_a_key_file_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n- {{name: a, sha256: {HASH}, tenant: t, requests_per_minute: 2}}\n"
        f"- {{name: b, sha256: {digest('b')}}}\n"
    )
    keys = load_keys(path)
    assert keys.find("Bearer secret") == ApiKey("a", HASH, "t", 2.0)
    assert keys.find("Bearer b").tenant == "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: []", "no list named keys"),
        ("[1]", "no list named keys"),
        ("keys: [1]", r"keys\[0\] is not a mapping"),
        (f"keys: [{{name: a, sha256: {HASH}, key: x}}]", "key: no such field"),
        ("keys: [{name: a, sha256: secret}]", "64 hexadecimal digits"),
        (f"keys: [{{name: 'a/b', sha256: {HASH}}}]", "letters, digits"),
        (f"keys: [{{name: a, sha256: {HASH}, tokens_per_minute: 0}}]", "above 0"),
        (f"keys: [{{name: a, sha256: {HASH}}}, {{name: b, sha256: {HASH}}}]", "the same sha256"),
        ("keys: [", "cannot be read"),
    ],
)
def test_a_bad_key_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_keys(path)
    assert "secret" not in str(error.value)


def test_no_minute_admits_more_than_its_burst_and_its_rate() -> None:
    """FAULTS 93: the limit is the gateway's own, so nothing can take it away."""
    rng, quota = random.Random(7), Quota(requests_per_minute=10)
    now, admitted = 0.0, []
    for _ in range(5000):
        now += rng.expovariate(2.0)
        if quota.admit(1, now) is None:
            admitted.append(now)
    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= 21
    assert len(admitted) - 10 == pytest.approx(now / 6, rel=0.02)


def test_tokens_are_charged_afterwards_and_debts_are_waited_for() -> None:
    quota = Quota(tokens_per_minute=60)
    assert quota.admit(20, 0.0) is None
    quota.charge(100, 0.0)
    refused = quota.admit(1, 0.0)
    assert refused is not None and refused.retry_after_s == pytest.approx(61.0)
    assert quota.admit(1, 61.0) is None
    assert Quota(tokens_per_minute=10).admit(500, 0.0) is None, "a full bucket takes any prompt"


def test_a_refused_request_costs_nothing() -> None:
    quota = Quota(requests_per_minute=1, tokens_per_minute=100)
    assert quota.admit(10, 0.0) is None
    for _ in range(50):
        assert quota.admit(50, 0.0) is not None
    assert quota.admit(50, 60.0) is None


def test_limits_are_per_key() -> None:
    keys = Keyring([ApiKey("a", digest("a"), "t", 1.0), ApiKey("b", digest("b"), "t")])
    a, b = keys.find("Bearer a"), keys.find("Bearer b")
    keys.admit(a, 1, 0.0)
    with pytest.raises(RateLimited) as error:
        keys.admit(a, 1, 0.0)
    assert 0 < error.value.retry_after_s <= 60
    keys.admit(b, 1, 0.0)
    keys.admit(ANYBODY, 1, 0.0)


# ---------------------------------------------------------------------------- at the door


async def test_a_spent_limit_is_429_with_retry_after_and_no_work() -> None:
    keys = Keyring([ApiKey("a", digest("a"), "a", tokens_per_minute=30.0)])
    door = front(FakePools(script=says("Good day to you, whoever you are.")), keys=keys)
    door.http.headers["authorization"] = "Bearer a"
    assert (await door.complete("Hi", max_tokens=100)).status_code == 200
    num_before = len(door.pools.submissions)
    answer = await door.complete("Hi")
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert len(door.pools.submissions) == num_before


async def test_tenants_share_neither_prefixes_nor_requests() -> None:
    door = front(FakePools(worker("mixed-0")), keys=keyring("a", "b"))

    async def complete(key: str, **body: object) -> str:
        headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
        answer = await door.http.post(
            "/v1/completions", json={"prompt": "Hi", **body}, headers=headers
        )
        return str(answer.status_code)

    assert await complete("a") == "200"
    assert await complete("b") == "200"
    assert await complete("b", cache_salt="a/") == "200"
    salts = {submission.request.cache_salt for _, submission in door.pools.submissions}
    assert salts == {"a/", "b/", "b/a/"}
    path = "/v1/evenflow/requests/mine"
    for key, status in (("a", 200), ("b", 200)):
        answer = await door.http.get(path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    other = front(keys=keyring("a", "b"))
    other.http.headers["authorization"] = "Bearer a"
    await other.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "x"})
    answer = await other.http.get(path[:-4] + "x", headers={"authorization": "Bearer b"})
    assert answer.status_code == 404


# ---------------------------------------------------------------------------- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.1.4", "gpu-box", "localhost.evil"])
def test_a_door_to_the_network_is_guarded_or_called_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"insecure: true \(--insecure\)"):
        Config(host=host)
    tls = {"tls.cert": "c", "tls.key": "k"}
    with pytest.raises(ConfigError, match="api_keys"):
        load_config(overrides={"host": host, **tls})
    load_config(overrides={"host": host, **tls, "api_keys": "keys.yaml"})
    load_config(overrides={"host": host, **tls, "tls.client_ca": "ca"})
    Config(host=host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_guard(host: str) -> None:
    assert Config(host=host).host == host


def test_half_of_tls_is_refused() -> None:
    for keys in ({"tls.cert": "c"}, {"tls.key": "k"}, {"tls.client_ca": "ca"}):
        with pytest.raises(ConfigError, match="tls"):
            load_config(overrides=keys)
