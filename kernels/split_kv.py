"""The parts that split-KV decode kernels are made of: the plan, the online softmax over paged tiles, the combine.

Log-sum-exps are in base 2 here, since exp2 is what the hardware has; `store_rows` gives natural logarithms.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def num_tiles(seq_len, BLOCK_N: tl.constexpr):
    """KV tiles of a sequence. An empty one has a tile too, wholly masked: some program has to write its zeros."""
    return tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1)


@triton.jit
def count_tiles(seq_lens_ptr, num_seqs, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """KV tiles of all sequences together, and of the longest."""
    total, longest = 0, 1
    for first in range(0, num_seqs, BLOCK_S):
        seq = first + tl.arange(0, BLOCK_S)
        seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)  # (BLOCK_S,)
        tiles = tl.where(seq < num_seqs, num_tiles(seq_len, BLOCK_N), 0)
        total += tl.sum(tiles)
        longest = tl.maximum(longest, tl.max(tiles))
    return total, longest


@triton.jit
def locate(seq_lens_ptr, num_seqs, tile, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sequence that `tile` belongs to, and the first tile of that sequence."""
    found, start, end = 0, 0, 0
    for first in range(0, num_seqs, BLOCK_S):
        seq = first + tl.arange(0, BLOCK_S)
        seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)  # (BLOCK_S,)
        tiles = tl.where(seq < num_seqs, num_tiles(seq_len, BLOCK_N), 0)
        ends = end + tl.cumsum(tiles, 0)  # (BLOCK_S,)
        before = (seq < num_seqs) & (ends <= tile)
        found += tl.sum(before.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0)))
        end += tl.sum(tiles)
    return found, start


@triton.jit
def chunk_of(tile, size, longer):
    """The chunk that holds `tile`: the first `longer` chunks have size + 1 tiles, the others `size`."""
    border = longer * (size + 1)
    return tl.where(tile < border, tile // (size + 1), longer + (tile - border) // size)


@triton.jit
def attend(
    q, k_ptr, v_ptr, table_ptr, begin, end, seq_len, qk_scale, stride_kb, stride_kt, stride_vb, stride_vt,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Online softmax of the queries of one KV head over the tokens begin..end of one sequence.

    Gives the normalised output (BLOCK_G, HEAD_DIM) and its log-sum-exp in base 2 (BLOCK_G,), -inf if no token counts.
    """
    dim = tl.arange(0, HEAD_DIM)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    token = begin + tl.arange(0, BLOCK_N)
    # One entry per token, not per block: neighbours hit L1, and any block size fits any tile.
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)  # (BLOCK_N,)
    for first in tl.range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        live = token < seq_len
        offset = token % BLOCK_SIZE
        k_row = block.to(tl.int64) * stride_kb + offset * stride_kt
        k = tl.load(k_ptr + k_row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, HEAD_DIM)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale  # (BLOCK_G, BLOCK_N)
        score = tl.where(live[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # With no live token yet, -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(p, 1)
        v_row = k_row
        if not SAME_STRIDES:
            v_row = block.to(tl.int64) * stride_vb + offset * stride_vt
        v = tl.load(v_ptr + v_row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, HEAD_DIM)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak
        token += BLOCK_N
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor))
    return acc / divisor[:, None], lse


@triton.jit
def combine(
    part_o_ptr, part_lse_ptr, first, last, head, num_heads,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Combine the partials of chunks first..last for the query heads head..head + GROUP, weighed by their sums."""
    row = tl.arange(0, BLOCK_P)
    dim = tl.arange(0, HEAD_DIM)
    peak = tl.full([BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    acc = tl.zeros([BLOCK_P, HEAD_DIM], tl.float32)
    for c in range(first, last + 1, BLOCK_C):
        chunk = c + tl.arange(0, BLOCK_C)
        slot = 2 * chunk + (chunk == first).to(tl.int32)
        place = slot[:, None] * num_heads + head + row[None, :]  # (BLOCK_C, BLOCK_P)
        live = (chunk <= last)[:, None] & (row < GROUP)[None, :]
        # .cg: other SMs wrote these a moment ago, and this SM's L1 must not answer for them.
        lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            part_o_ptr + place[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=live[:, :, None], other=0.0, cache_modifier=".cg",
        )  # (BLOCK_C, BLOCK_P, HEAD_DIM)  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows beyond the group stay empty
        weight = tl.exp2(lse - shift[None, :])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * o, 0)
        peak = new_peak
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor))
    return acc / divisor[:, None], lse


@triton.jit
def store_rows(o, lse, o_row, lse_ptr, lse_offset, stride_oh, stride_lh, GROUP: tl.constexpr):
    row = tl.arange(0, o.shape[0])
    dim = tl.arange(0, o.shape[1])
    place = o_row + row[:, None] * stride_oh + dim[None, :]
    tl.store(place, o.to(o_row.dtype.element_ty), mask=(row < GROUP)[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_offset + row * stride_lh, lse * LN_2, mask=row < GROUP)
