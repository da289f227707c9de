"""Traces and published step times are read as what they say."""

import itertools
import json
import random
from pathlib import Path

import pytest

from bench.sim.layers import llmservingsim
from bench.sim.profiles import Line, distserve, llama3_8b, sarathi_yi34b, splitwise
from bench.sim.validate import sarathi_rows
from bench.sim.workload import (
    Arrival,
    TraceError,
    Workload,
    gamma,
    load,
    load_lengths,
    load_mooncake,
    poisson,
)
from workers.core.plan import BatchShape

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    {"timestamp": 3000, "input_length": 512, "output_length": 5, "hash_ids": [7]},
]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in lines))
    return path


def test_mooncake_prompts_agree_as_far_as_their_hash_ids(tmp_path: Path) -> None:
    workload = load(write(tmp_path / "trace.jsonl", *MOONCAKE))
    first, second, third = (workload.prompt(arrival) for arrival in workload.arrivals)
    assert {len(first), len(second)} == {1000, 600} and len(third) == 512
    assert first[:512] == second[:512] == third and first[512] != second[512]


def test_bucketed_times_are_spread_within_their_buckets_and_say_so(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *MOONCAKE)
    spread, same, raw = load_mooncake(path), load_mooncake(path), load_mooncake(path, spread=False)
    assert [a.at_s for a in raw.arrivals] == [0, 0, 3] and "buckets" in raw.how
    times = [a.at_s for a in spread.arrivals]
    assert times == sorted(times) and 0 < times[0] < times[1] < 3 <= times[2] < 6
    assert spread == same and "spread uniformly" in spread.how


def test_azure_times_are_kept(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    first, second = load(write(tmp_path / "azure.csv", head, *rows)).arrivals
    assert first == Arrival(0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579) and second.num_prompt == 396


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    row = {"at_s": 12.5, "prompt_tokens": 33, "output_tokens": 4, "blocks": ["ff", "1f"]}
    workload = load(write(tmp_path / "recorded.jsonl", {**row, "block_size": 16}))
    assert workload.block_size == 16 and len(workload.prompt(workload.arrivals[0])) == 33
    assert workload.arrivals[0] == Arrival(0.0, 33, 4, (255, 31))


def test_those_that_got_no_answer_wanted_one(tmp_path: Path) -> None:
    rows = [{"at_s": at, "prompt_tokens": 9, "output_tokens": n} for at, n in enumerate((4, 0, 6))]
    workload = load(write(tmp_path / "recorded.jsonl", *rows))
    assert [arrival.num_output for arrival in workload.arrivals] == [4, 5, 6]


def test_qwen_traces_share_blocks_of_sixteen_tokens(tmp_path: Path) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text", "output_length": 7}
    rows = [
        {**row, "timestamp": 0.5, "input_length": 40, "hash_ids": [1, 2, 3]},
        {**row, "timestamp": 2.5, "input_length": 20, "hash_ids": [1, 4]},
    ]
    workload = load(write(tmp_path / "qwen.jsonl", *rows))
    first, second = (workload.prompt(arrival) for arrival in workload.arrivals)
    assert (len(first), len(second)) == (40, 20)
    assert first[:16] == second[:16] and first[16] != second[16]


def test_burstgpt_seconds_are_spread_within_themselves(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [f"{at},ChatGPT,{n},{n and 9},{n + 9},Conversation log" for at, n in
            ((5, 472), (5, 1087), (45, 417), (118, 0))]  # fmt: skip
    workload = load(write(tmp_path / "burst.csv", head, *rows))
    assert sorted(arrival.num_prompt for arrival in workload.arrivals) == [417, 472, 1087]
    times = [arrival.at_s for arrival in workload.arrivals]
    assert times[0] < times[1] < 1 and 40 <= times[2] < 41 and "second" in workload.how


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "lengths.csv", "prompt,output", "1,2", "x,3")
    with pytest.raises(TraceError, match="row 2"):
        load_lengths(path, 1.0)
    with pytest.raises(TraceError, match="no such file"):
        load(tmp_path / "absent")


def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for() -> None:
    for process in (poisson(4.0, random.Random(0)), gamma(4.0, 3.0, random.Random(0))):
        times = [next(process) for _ in range(4000)]
        assert 4000 / times[-1] == pytest.approx(4.0, rel=0.1)
    burst = gamma(4.0, 3.0, random.Random(0))
    times = [0.0, *(next(burst) for _ in range(4000))]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    cv = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean
    assert cv == pytest.approx(3.0, rel=0.15)


def test_another_rate_stretches_time_and_nothing_else() -> None:
    workload = Workload("x", tuple(Arrival(5.0 + i, 10, 1) for i in range(11)))
    faster = workload.at_rate(10.0)
    assert faster.rate == pytest.approx(10.0) and faster.span_s == pytest.approx(1.0)
    assert [a.num_prompt for a in faster.arrivals] == [10] * 11


def test_a_curve_goes_on_as_steep_as_it_ends() -> None:
    line = Line([(2, 4.0), (1, 2.0), (4, 12.0)])
    assert [line(x) for x in (0, 1, 1.5, 3, 5)] == [0.0, 2.0, 3.0, 8.0, 16.0]


def test_published_step_times_are_those_of_their_files() -> None:
    whole = BatchShape(1000, 1000 * 1000, 0, 0)
    a, b, c = 14.742973695171262, 0.06857720739764, 2.4495727400243586e-06
    expected = (a + b * 1000 + c * 1e6) / 1000
    assert distserve("facebook/opt-13b", 2).step_s(whole) == pytest.approx(expected)
    assert llama3_8b("h100").step_s(BatchShape(2048, 2048**2, 0, 0)) == pytest.approx(0.0397)
    decodes = BatchShape(0, 0, 64, 64 * 2048)
    assert llama3_8b("h100").step_s(decodes) == pytest.approx(0.01204, rel=0.1)
    assert splitwise("llama2-70b", "h100-80gb", 8).step_s(BatchShape(0, 0, 16, 0)) == 0.03417
    assert sarathi_yi34b().step_s(BatchShape(0, 0, 64, 0)) == pytest.approx(0.1278, rel=1e-3)


def test_chunking_overhead_is_that_of_sarathis_table() -> None:
    """Figure 9 from the curves of figure 2: fifteen of sixteen cells within 10 %."""
    rows = list(sarathi_rows())
    assert len(rows) == 16 and sum(row.is_within for row in rows) >= 15
    assert max(abs(row.off) for row in rows) < 0.105


def test_a_layer_profile_is_summed_over_the_model(tmp_path: Path) -> None:
    names = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    everything = (*names, "embedding", "final_layernorm")
    dense = [f"{name},{n},{n}" for name in everything for n in (1, 9)]
    write(tmp_path / "x_dense.csv", "layer,tokens,time_us", *dense)
    write(tmp_path / "x_per_sequence.csv", "layer,s,t", "lm_head,1,5", "sampler,1,2")
    grid = ["0,0,1,16,10", "0,0,1,32,20", "16,0,0,0,100", "16,0,1,16,110", "0,0,0,0,0"]
    write(tmp_path / "x_attention.csv", "a,b,c,d,e", *grid)
    model = llmservingsim(tmp_path, "x", num_layers=2)
    one_decode = 2 * 8 * 1 + 2 * 1 + 7 + 2 * 15
    assert model.step_s(BatchShape(0, 0, 1, 24)) == pytest.approx(one_decode / 1e6)
