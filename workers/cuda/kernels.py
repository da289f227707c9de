"""The Triton kernels of the CUDA path, and the functions that launch them on tensors.

They compute what workers.layers and workers.attention compute, with the same roundings for norms
and SiLU, and without those in between for the rest. Under TRITON_INTERPRET=1 they run on a CPU.
"""

import torch
import triton
import triton.language as tl

MIN_DOT = 16  # tl.dot takes no smaller tiles
KEYS_PER_TILE = 64
MIN_SPLIT = 256  # tokens of context for which one more program pays
MAX_SPLITS = 64


@triton.jit
def _norm(x, residual, weight, out, eps, size, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    rounded = normed.to(value.dtype).to(tl.float32)
    tl.store(out + row + at, (rounded * scale).to(value.dtype), mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x, [rows, size] contiguous."""
    out = torch.empty_like(x)
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _norm[(rows,)](x, x, weight, out, eps, size, ADD=False, BLOCK=block)
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x to the residual, in place, and gives the RMS norm of the sum."""
    out = torch.empty_like(x)
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _norm[(rows,)](x, residual, weight, out, eps, size, ADD=True, BLOCK=block)
    return out


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * size + at, product.to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the left half of each row times the right half: [rows, 2 * size] to [rows, size]."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out


@triton.jit
def _head_norm(first, second, weight, at, inside, eps, HALF: tl.constexpr):
    """RMS norm of one head in two halves, rounded as the layer rounds."""
    dtype = weight.dtype.element_ty
    squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)
    left = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * left).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * right).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate_and_store(
    qkv, q_norm, k_norm, cos, sin, slots, rotated, keys, values, eps, angle_stride,
    page_stride, head_stride, token_stride, page_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One program per row and head: query heads, key heads, value heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    dtype = qkv.dtype.element_ty
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            if head < HEADS:
                first, second = _head_norm(first, second, q_norm, at, inside, eps, HALF)
            else:
                first, second = _head_norm(first, second, k_norm, at, inside, eps, HALF)
        c = tl.load(cos + row * angle_stride + at, mask=inside, other=0.0)
        s = tl.load(sin + row * angle_stride + at, mask=inside, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head < HEADS:
        target = rotated + (row * HEADS + head) * 2 * HALF
        tl.store(target + at, first.to(dtype), mask=inside)
        tl.store(target + HALF + at, second.to(dtype), mask=inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            place = (slot // page_size) * page_stride + (slot % page_size) * token_stride
            if head < HEADS + KV_HEADS:
                target = keys + place + (head - HEADS) * head_stride
                tl.store(target + at, first.to(dtype), mask=inside)
                tl.store(target + HALF + at, second.to(dtype), mask=inside)
            else:
                target = values + place + (head - HEADS - KV_HEADS) * head_stride
                tl.store(target + at, first.to(dtype), mask=inside)
                tl.store(target + HALF + at, second.to(dtype), mask=inside)


def rotate_and_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [rows, heads, head_dim]; rotated keys and the values go to their slots.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim] contiguous. norms: weights of the norms of query
    and key heads, and eps. angles: float32 cosines and sines [rows, head_dim / 2]. slots: int64
    [rows], page * page_size + offset, or -1 for a row that is not stored. keys and values: one
    layer's views [page, kv_head, page_size, head_dim].
    """
    _, kv_heads, page_size, head_dim = keys.shape
    rows, half = len(qkv), head_dim // 2
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    rotated = qkv.new_empty(rows, heads, head_dim)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    cos, sin = angles
    assert cos.stride() == sin.stride() and keys.stride() == values.stride()
    page_stride, head_stride, token_stride, _ = keys.stride()
    _rotate_and_store[(rows, heads + 2 * kv_heads)](
        qkv, q_norm, k_norm, cos, sin, slots, rotated, keys, values, eps, cos.stride(0),
        page_stride, head_stride, token_stride, page_size,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK=triton.next_power_of_2(half),
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip
    return rotated


@triton.jit
def _attend_split(
    q, keys, values, contexts, pages, part, part_max, part_sum, scale, split, q_stride,
    table_stride, page_stride, head_stride, token_stride, page_size,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's context, for the query heads of one key head."""
    seq, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + seq)
    start = index * split
    if start < context:
        stop = tl.minimum(start + split, context)
        row, dim, key = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, TILE)
        head = kv_head * GROUP + row
        is_head, is_dim = row < GROUP, dim < DIM
        query = tl.load(
            q + seq.to(tl.int64) * q_stride + head[:, None] * DIM + dim[None, :],
            mask=is_head[:, None] & is_dim[None, :],
            other=0.0,
        )
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, DIMS], tl.float32)
        for tile in range(start, stop, TILE):
            token = tile + key
            seen = token < stop
            page = tl.load(pages + seq * table_stride + token // page_size, mask=seen, other=0)
            place = page.to(tl.int64) * page_stride + (token % page_size) * token_stride
            place += kv_head * head_stride
            valid = seen[:, None] & is_dim[None, :]
            k = tl.load(keys + place[:, None] + dim[None, :], mask=valid, other=0.0)
            v = tl.load(values + place[:, None] + dim[None, :], mask=valid, other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            peak = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - peak[:, None])
            fade = tl.exp(highest - peak)
            total = total * fade + tl.sum(weights, 1)
            added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            sums = sums * fade[:, None] + added
            highest = peak
        # parts are [seq, head, split] and [seq, head, split, DIM]
        slot = (seq.to(tl.int64) * tl.num_programs(1) * GROUP + head) * tl.num_programs(2) + index
        tl.store(part_max + slot, highest, mask=is_head)
        tl.store(part_sum + slot, total, mask=is_head)
        valid = is_head[:, None] & is_dim[None, :]
        tl.store(part + slot[:, None] * DIM + dim[None, :], sums, mask=valid)


@triton.jit
def _join_splits(
    part, part_max, part_sum, contexts, out, split, num_splits, DIM: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """One query head's splits, in order: the same numbers whatever runs beside it."""
    seq, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    is_dim = dim < DIM
    row = seq.to(tl.int64) * tl.num_programs(1) + head
    highest = float("-inf")
    total = 0.0
    sums = tl.zeros([DIMS], tl.float32)
    for index in range(0, tl.cdiv(tl.load(contexts + seq), split)):
        slot = row * num_splits + index
        here = tl.load(part_max + slot)
        peak = tl.maximum(highest, here)
        fade, weight = tl.exp(highest - peak), tl.exp(here - peak)
        total = total * fade + tl.load(part_sum + slot) * weight
        sums = sums * fade + tl.load(part + slot * DIM + dim, mask=is_dim, other=0.0) * weight
        highest = peak
    tl.store(out + row * DIM + dim, (sums / total).to(out.dtype.element_ty), mask=is_dim)


def attend_decodes(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: torch.Tensor,
    pages: torch.Tensor,
    split: int,
) -> torch.Tensor:
    """Attention of one row per sequence to its pages, long contexts split across programs.

    q: [n, heads, head_dim]. keys and values: one layer's [page, kv_head, page_size, head_dim].
    contexts: int32 [n], at least 1. pages: int32 [n, width]. One program reads ``split`` tokens of
    a context whatever runs beside it, so a sequence's result does not depend on its neighbours;
    how many programs there are depends on the width of the table alone.
    """
    num_seqs, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    assert q.stride(2) == 1 and q.stride(1) == head_dim and keys.stride() == values.stride()
    num_splits = triton.cdiv(pages.shape[1] * page_size, split)
    parts = q.new_empty(num_seqs, heads, num_splits, head_dim, dtype=torch.float32)
    part_max = parts.new_empty(num_seqs, heads, num_splits)
    part_sum = torch.empty_like(part_max)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    dims = max(MIN_DOT, triton.next_power_of_2(head_dim))
    _attend_split[(num_seqs, kv_heads, num_splits)](
        q, keys, values, contexts, pages, parts, part_max, part_sum, head_dim**-0.5, split,
        q.stride(0), pages.stride(0), *keys.stride()[:3], page_size,
        GROUP=group, ROWS=max(MIN_DOT, triton.next_power_of_2(group)), DIM=head_dim, DIMS=dims,
        TILE=KEYS_PER_TILE,
    )  # fmt: skip
    _join_splits[(num_seqs, heads)](
        parts, part_max, part_sum, contexts, out, split, num_splits, DIM=head_dim, DIMS=dims
    )
    return out


def split_tokens(max_context: int) -> int:
    """How many tokens of a context one program should read."""
    least = -(-max_context // MAX_SPLITS)
    return max(MIN_SPLIT, -(-least // KEYS_PER_TILE) * KEYS_PER_TILE)
