"""What goes wrong in a simulated cluster, and how often. Rates far above natural ones are fine."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """None by default. Deaths happen only while requests still arrive, so that a run can end."""

    mean_life_s: float = 0.0  # of a worker; 0: for ever
    restart_s: float = 1.0  # until a worker under a new name takes the place of a dead one
    detect_s: float = 0.05  # until the gateway knows
    transfer_fails: float = 0.0  # part of the transfers that end in an error
    transfer_stalls: float = 0.0  # part of the transfers that end by their deadline
    max_delay_s: float = 0.0  # of every message between gateway and workers, in order per channel
    aborts: float = 0.0  # part of the requests whose client leaves
    max_patience_s: float = 5.0  # of such a client

    def delay_s(self, rng: random.Random) -> float:
        return rng.random() * self.max_delay_s if self.max_delay_s else 0.0

    def life_s(self, rng: random.Random) -> float:
        return rng.expovariate(1 / self.mean_life_s)


NO_FAULTS = Faults()
