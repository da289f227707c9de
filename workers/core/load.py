"""What a worker's load is, as far as its scheduler knows: one definition for every executor."""

from workers.core.output import Load
from workers.core.scheduler import Scheduler


def scheduler_load(
    scheduler: Scheduler,
    leased_pages: int,
    *,
    step: int = 0,
    step_s: float = 0.0,
    prompt_tokens: int = 0,
    output_tokens: int = 0,
    cached_tokens: int = 0,
) -> Load:
    """What follows from the sequences and the pages, beside the counters of whoever runs them."""
    num_decodes, prefills = scheduler.num_decodes, scheduler.prefills
    return Load(
        waiting_seqs=scheduler.num_waiting,
        running_seqs=num_decodes + len(prefills),
        decode_seqs=num_decodes,
        queued_tokens=scheduler.waiting_tokens + sum(seq.num_pending for seq in prefills),
        context_tokens=scheduler.decode_context,
        free_pages=scheduler.pool.num_free,
        num_pages=scheduler.pool.num_pages,
        leased_pages=leased_pages,
        step=step,
        step_s=step_s,
        num_preemptions=scheduler.num_preemptions,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        promised_itl_s=scheduler.promised_itl_s,
    )
