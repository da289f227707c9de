"""What both ends of the stream between a gateway and a worker agree on.

    gateway loop                                worker loop              engine thread
    ChannelPools ── _Link ══ Worker.Attach ══ WorkerServer ── submit, abort ──► Engine
      submit() ◄─ one queue per request ◄══ one Event per step ◄─ call_soon_threadsafe ─ emit

Commands go one way, one report per step comes back.
"""

from dataclasses import dataclass

HEARTBEAT_S = 0.5  # a load report at least this often, and how fast the worker is
MAX_MESSAGE_BYTES = 256 << 20

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),  # a host that vanished is noticed within 10 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class Broken(Exception):
    """The stream is of no use any more; the message says why."""


@dataclass(slots=True)
class Count:
    """What one end has heard of a stream. gRPC keeps order and loses nothing; what stands between
    may not, and a message that is lost or repeated must not become a token that is."""

    heard: int = 0

    def is_next(self, number: int) -> bool:
        """False: heard before. Broken when one is missing."""
        if number > self.heard + 1:
            raise Broken(f"message {number} came after {self.heard}")
        is_new = number > self.heard
        self.heard = max(self.heard, number)
        return is_new


@dataclass(frozen=True, slots=True)
class Stance:
    """What a worker wants to do now. Both ends: the worker tells it with every report."""

    role: str
    is_leaving: bool = False
