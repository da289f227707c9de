"""Who may use the front door: API keys, kept as hashes, each with a tenant and its limits.

A key file is YAML that an operator writes with ``evenflow key NAME``:

    keys:
      - name: alice
        sha256: 5e88...          # of the key; the key itself is nowhere
        tenant: research         # shares cached prefixes with its own kind only; default: the name
        requests_per_minute: 60
        tokens_per_minute: 100000

Keys are random and long, so a plain SHA-256 keeps them: there is nothing to guess. It knows nothing
about HTTP or gRPC beyond the text of an Authorization value.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serving.config import ConfigError
from serving.core.quota import Quota
from serving.errors import RateLimited

PREFIX = "ef-"
MAX_HEADER_CHARS = 512  # of an Authorization value
FIELDS = ("name", "sha256", "tenant", "admin", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the key file."""

    name: str
    sha256: str
    tenant: str
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    admin: bool = False  # may change what workers do


ANYBODY = ApiKey("", "", "", admin=True)  # everybody, where no keys are asked for


class Keyring:
    """The keys that are known, and what each has used here. An empty one lets everybody in.

    Counts live in the gateway that admits: nothing shared has to be up for a limit to hold.
    """

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]
        self._quotas = {
            key.name: Quota(key.requests_per_minute, key.tokens_per_minute) for _, key in self._keys
        }

    @property
    def is_open(self) -> bool:
        return not self._keys

    def find(self, authorization: str, *, basic: bool = False) -> ApiKey | None:
        """Whose it is; None when it is nobody's. Takes the same time for every wrong key.

        ``authorization`` is the value of the header or metadata: ``Bearer KEY``. With ``basic`` the
        password of ``Basic`` does as well: that is how a browser asks a person.
        """
        if self.is_open:
            return ANYBODY
        given = hashlib.sha256(_presented(authorization, basic).encode()).digest()
        found = None
        for known, key in self._keys:
            if hmac.compare_digest(given, known):
                found = key
        return found

    def admit(self, key: ApiKey, num_tokens: int, now: float) -> None:
        """One request with so many tokens of prompt. Raises RateLimited."""
        quota = self._quotas.get(key.name)
        refused = quota.admit(num_tokens, now) if quota else None
        if refused is not None:
            raise RateLimited(f"this key's {refused.what} are used up", refused.retry_after_s)

    def charge(self, key: ApiKey, num_tokens: int, now: float) -> None:
        """Tokens that were generated for it."""
        quota = self._quotas.get(key.name)
        if quota is not None:
            quota.charge(num_tokens, now)


def _presented(authorization: str, basic: bool) -> str:
    """The key in a header, or text that is no key."""
    if len(authorization) > MAX_HEADER_CHARS:
        return ""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic" and basic:
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(path: Path) -> Keyring:
    """ConfigError names the file, the entry and the field."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"api_keys: {path} cannot be read: {type(error).__name__}") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"api_keys: {path} has no list named keys")
    keys = [_key(entry, f"api_keys: {path}: keys[{i}]") for i, entry in enumerate(entries)]
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise ConfigError(f"api_keys: {path}: two keys have the same {field}")
    return Keyring(keys)


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is not a mapping")
    if unknown := [str(name) for name in entry if name not in FIELDS]:
        raise ConfigError(f"{where}: {unknown[0]}: no such field; there are {', '.join(FIELDS)}")
    name, sha256 = _name(entry, "name", where), str(entry.get("sha256")).lower()
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ConfigError(f"{where}.sha256 is not 64 hexadecimal digits; `evenflow key` makes them")
    tenant = _name(entry, "tenant", where) if "tenant" in entry else name
    if not isinstance(admin := entry.get("admin", False), bool):
        raise ConfigError(f"{where}.admin must be true or false")
    requests, tokens = (_limit(entry, field, where) for field in FIELDS[4:])
    return ApiKey(name, sha256, tenant, requests, tokens, admin)


def _name(entry: Mapping[str, Any], field: str, where: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", value):
        raise ConfigError(f"{where}.{field} must have 1 to 64 letters, digits and ._@-")
    return value


def _limit(entry: Mapping[str, Any], field: str, where: str) -> float | None:
    value = entry.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{where}.{field} must be a number above 0")
    return float(value)
