"""What an operator decides about the front door."""

from dataclasses import dataclass, field

from serving.auth import Keyring
from workers.core.request import SLO
from workers.grammar import Grammars


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The same for HTTP and gRPC."""

    model: str  # the name that clients use
    aliases: frozenset[str] = frozenset()
    max_body_bytes: int = 32 << 20
    max_n: int = 16
    slo: SLO = field(default_factory=SLO)
    debug: bool = False  # requests may pin their workers
    grammars: Grammars | None = None  # None: answers have no form
    keys: Keyring = field(default_factory=Keyring)  # an empty one: everybody may
