"""What a worker's load is, as far as its scheduler knows: one definition for every executor."""

from workers.core.output import Load
from workers.core.scheduler import Scheduler


def scheduler_load(scheduler: Scheduler, leased_pages: int) -> Load:
    """The part of a Load that follows from the sequences and the pages; counters are zero."""
    decodes, prefills = scheduler.decodes, scheduler.prefills
    return Load(
        waiting_seqs=scheduler.num_waiting,
        running_seqs=len(decodes) + len(prefills),
        decode_seqs=len(decodes),
        queued_tokens=scheduler.waiting_tokens + sum(seq.num_pending for seq in prefills),
        context_tokens=sum(seq.num_computed for seq in decodes),
        free_pages=scheduler.pool.num_free,
        num_pages=scheduler.pool.num_pages,
        leased_pages=leased_pages,
        num_preemptions=scheduler.num_preemptions,
        promised_itl_s=scheduler.promised_itl_s,
    )
