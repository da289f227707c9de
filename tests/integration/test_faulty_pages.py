"""Pages over a transport that drops, delays, repeats, reorders, truncates and flips: right tokens,
or computed again and said so."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from kvtransfer.collective import CollectiveTransport
from kvtransfer.faults import FaultySource
from kvtransfer.pair import is_intact, seal
from kvtransfer.staging import Memory, cut
from tests.processes import call, deployed

pytestmark = pytest.mark.cluster

FAULTS = "drop=0.05 delay=0.05 truncate=0.05 flip=0.05 duplicate=0.05 reorder=0.05 delay_s=1 seed=5"


async def test_no_wrong_token_whatever_happens_to_pages(t0_with_tokenizer: Path) -> None:
    """Done 3, FAULTS 49, 53, 61: 100 disaggregated requests, each fault at 5 %."""
    rng = random.Random(4)
    prompts = [
        tuple(rng.randrange(3, 49152) for _ in range(rng.randint(20, 300))) for _ in range(20)
    ]
    async with deployed(
        t0_with_tokenizer,
        {"p": "prefill", "d": "decode"},
        page_faults=FAULTS,
        transfer_timeout_s=1.0,
        lease_s=2.0,
        prefix_caching=False,
    ) as deployment:
        expected = []
        for i, prompt in enumerate(prompts):
            expected.append((await deployment.generate(call(f"m{i}", prompt, 12, "mixed"))).tokens)
        fallbacks = 0
        for round in range(5):
            calls = [call(f"d{round}-{i}", p, 12, "disaggregated") for i, p in enumerate(prompts)]
            answers = await asyncio.wait_for(
                asyncio.gather(*(deployment.generate(c) for c in calls)), 60
            )
            for answer, tokens in zip(answers, expected, strict=True):
                assert answer.tokens == tokens
                assert answer.final is not None
                fallbacks += bool(answer.final.trace.fallback)
        source = deployment.workers["p"]._engine._transport
        assert isinstance(source, CollectiveTransport)
        assert isinstance(source.endpoint, FaultySource) and source.endpoint.num_faults > 20
        print(f"{source.endpoint.num_faults} faults, {fallbacks} of 100 computed again")
        await deployment.until_clean(10.0)


def test_every_flipped_bit_is_noticed() -> None:
    """Done 3: 1,000 of 1,000, those of the checksums among them."""
    rng = random.Random(0)
    pieces = cut(Memory(torch.device("cpu")), 7, 4 << 20)
    assert [(p.first, p.stop) for p in pieces] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    for piece in pieces:
        piece.records.random_(0, 256)
        seal(piece)
    for number in range(1000):
        piece = pieces[number % len(pieces)]
        start = len(piece.records) if number % 10 == 0 else 0
        at, bit = rng.randrange(start, len(piece.wire)), 1 << rng.randrange(8)
        piece.wire[at] ^= bit
        assert not is_intact(piece)
        piece.wire[at] ^= bit
    assert all(map(is_intact, pieces))
