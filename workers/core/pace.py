"""How fast a worker is, as it tells those who choose among workers: numbers, nothing that learns.

A ``LatencyModel`` at one moment, together with the limits that its scheduler keeps to. It is small
enough to be sent every now and then, and predicts what the worker's own model predicts.
"""

from dataclasses import dataclass

from workers.core.latency import GUESS, LatencyModel, prompt_seconds, step_seconds
from workers.core.plan import BatchShape
from workers.core.policy import Limits


@dataclass(frozen=True, slots=True)
class Pace:
    """The defaults are a guess that nobody measured."""

    coefficients: tuple[float, ...] = GUESS  # as they hold now, with the machine as busy as it is
    spread: float = 0.1  # of the log of observed / predicted, over steps with prompts
    prompt_margin: float = 1.3  # nearly all steps with prompts stay below so many predictions
    decode_margin: float = 1.3  # and those without
    link_fixed_s: float = 1e-3  # of moving pages here from another worker
    link_byte_s: float = 1e-10
    token_bytes: int = 0  # of KV
    max_tokens: int = 2048  # of a step
    max_seqs: int = 256
    is_online: bool = True  # promised gaps bound the step, not max_tokens alone
    is_measured: bool = False

    def step_s(self, shape: BatchShape) -> float:
        """The expected duration of a step."""
        return step_seconds(self.coefficients, shape)

    def prompt_s(self, start: int, stop: int) -> float:
        """What computing tokens [start, stop) of a prompt adds to the steps that they ride in."""
        return prompt_seconds(self.coefficients, start, stop)

    def margin(self, with_prompts: bool) -> float:
        """The factor on ``step_s`` that nearly all steps of this kind stay below."""
        return self.prompt_margin if with_prompts else self.decode_margin

    def transfer_s(self, num_tokens: int) -> float:
        """The expected duration of fetching the KV of so many tokens, alone on the link."""
        return self.link_fixed_s + self.link_byte_s * self.token_bytes * num_tokens


def pace_of(latency: LatencyModel, limits: Limits, token_bytes: int) -> Pace:
    """What a worker with this model and these limits says of itself now."""
    fixed_s, byte_s = latency.link()
    return Pace(
        coefficients=latency.current(),
        spread=latency.spread,
        prompt_margin=latency.margin(True),
        decode_margin=latency.margin(False),
        link_fixed_s=fixed_s,
        link_byte_s=byte_s,
        token_bytes=token_bytes,
        max_tokens=limits.max_tokens,
        max_seqs=limits.max_seqs,
        is_online=limits.online,
        is_measured=latency.is_measured,
    )
