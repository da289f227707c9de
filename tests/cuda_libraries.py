"""The kernels of flash-attn and torch that the CUDA path calls, as their documentation has them:
each checks what it may be given and computes in float64."""

import torch


def check_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    num_seqs: int,
) -> None:
    """What FlashAttention 2 demands of paged keys and values, whoever calls it."""
    assert k.shape[1] % 256 == 0
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape and k.dim() == 4
    num_pages, _, num_kv_heads, head_dim = k.shape
    assert head_dim <= 256 and head_dim % 8 == 0
    assert q.shape[-2] % num_kv_heads == 0 and q.shape[-1] == head_dim
    assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
    assert len(block_table) == num_seqs
    assert block_table.min() >= 0 and block_table.max() < num_pages


def check_sums(sums: torch.Tensor, num_seqs: int) -> list[int]:
    """Running sums of lengths; the lengths."""
    assert sums.dtype == torch.int32 and sums.is_contiguous()
    assert sums.shape == (num_seqs + 1,) and sums[0] == 0
    return sums.diff().tolist()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, context: int
) -> torch.Tensor:
    """Causal is aligned to the bottom right: the last row sees everything."""
    group = q.shape[-2] // k.shape[2]
    keys, values = (
        x[pages.long()].flatten(0, 1)[:context].double().repeat_interleave(group, dim=1)
        for x in (k, v)
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), context, dtype=torch.bool).triu(context - len(q) + 1)
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, values).to(q.dtype)


class RecordingFlash:
    """flash_attn 2's two functions. Signatures as in flash_attn_interface.py of 2.8."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append("varlen")
        assert causal and block_table is not None
        num_seqs = len(block_table)
        check_pages(q, k, v, block_table, num_seqs)
        q_lengths = check_sums(cu_seqlens_q, num_seqs)
        k_lengths = check_sums(cu_seqlens_k, num_seqs)
        assert cu_seqlens_q[-1] == len(q)
        assert max_seqlen_q == max(q_lengths) and max_seqlen_k == max(k_lengths)
        parts = [
            attend(rows, k, v, block_table[i], k_lengths[i])
            for i, rows in enumerate(q.split(q_lengths))
        ]
        return torch.cat(parts)

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        self.calls.append("kvcache")
        assert causal and block_table is not None and cache_seqlens is not None
        check_pages(q, k_cache, v_cache, block_table, len(q))
        assert q.dim() == 4
        assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (len(q),)
        contexts = cache_seqlens.tolist()
        parts = [
            attend(rows, k_cache, v_cache, block_table[i], contexts[i]) for i, rows in enumerate(q)
        ]
        return torch.stack(parts)


class RecordingVarlen:
    """torch.nn.attention.varlen.varlen_attn of 2.13 over pages.

    ``replacement`` is what current_flash_attention_impl() answers: None is the FlashAttention 2
    that torch ships, which takes the running sums of keys beside the lengths; FA3 and FA4 refuse
    them with a page table. Not strict, it takes any page size and float32, too: whole steps are
    tested on a CPU with it.
    """

    def __init__(self, replacement: str | None = None, *, is_strict: bool = True) -> None:
        self.num_calls = 0
        self._replacement, self._is_strict = replacement, is_strict

    def replacement(self) -> str | None:
        return self._replacement

    def varlen_attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        assert block_table is not None and seqused_k is not None
        assert window_size == (-1, 0), "that is what causal is called"
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert num_splits == 1, "splits over pages leave rows unwritten (pytorch 194167)"
        num_seqs = len(block_table)
        if self._is_strict:
            check_pages(query, key, value, block_table, num_seqs)
        lengths = check_sums(cu_seq_q, num_seqs)
        assert cu_seq_q[-1] == len(query)
        assert seqused_k.dtype == torch.int32 and seqused_k.shape == (num_seqs,)
        contexts = seqused_k.tolist()
        if self._replacement is None:
            assert cu_seq_k is not None, "both sums or none"
            assert check_sums(cu_seq_k, num_seqs) == contexts
        else:
            assert cu_seq_k is None, "sums of keys and a page table exclude each other"
        assert max_q == max(lengths) and max_k == max(contexts)
        parts = [
            attend(rows, key, value, block_table[i], contexts[i])
            for i, rows in enumerate(query.split(lengths))
        ]
        return torch.cat(parts)
