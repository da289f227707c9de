"""A step's plan becomes the rows, positions and slots that it names."""

import torch

from tests.greedy import sequence
from workers.batch import build
from workers.core.plan import Chunk

CPU = torch.device("cpu")


def test_decodes_and_chunks_in_one_batch() -> None:
    decode = sequence("d", range(100, 105), [7, 3])
    decode.output = [900, 901]  # 7 tokens known, 6 computed
    chunk = sequence("c", range(200, 220), [1, 5, 2, 9, 4])
    batch = build((Chunk(decode, 6, 1), Chunk(chunk, 3, 6)), 4, CPU)
    assert batch.tokens.tolist() == [901, 203, 204, 205, 206, 207, 208]
    assert batch.positions.tolist() == [6, 3, 4, 5, 6, 7, 8]
    assert batch.sampled_rows.tolist() == [0]
    pages, offsets = batch.attention.slots
    assert pages.tolist() == [3, 1, 5, 5, 5, 5, 2]
    assert offsets.tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert batch.attention.cu_seqlens_q.tolist() == [0, 1, 7]
    assert batch.attention.seqused_k.tolist() == [7, 9]
    assert batch.attention.page_table.tolist() == [[7, 3, 7], [1, 5, 2]]
    assert batch.attention.num_decodes == 1


def test_fresh_pages_are_those_begun_and_not_filled() -> None:
    def fresh(start: int, length: int) -> list[int]:
        seq = sequence("a", range(40), [10, 11, 12, 13])
        return build((Chunk(seq, start, length),), 8, CPU).fresh_pages.tolist()

    assert fresh(0, 8) == []  # filled
    assert fresh(0, 9) == [11]
    assert fresh(8, 1) == [11]
    assert fresh(9, 1) == []  # begun earlier
    assert fresh(9, 8) == [12]
    assert fresh(9, 7) == []


def test_the_last_prompt_chunk_samples() -> None:
    seq = sequence("a", range(10), [0, 1])
    assert build((Chunk(seq, 0, 9),), 8, CPU).sampled_rows.tolist() == []
    assert build((Chunk(seq, 5, 5),), 8, CPU).sampled_rows.tolist() == [4]
