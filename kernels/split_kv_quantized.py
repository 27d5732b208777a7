"""`kernels.split_kv.attend` over a quantized cache: codes become floats on their way to the tensor cores.

Products are transposed, K q.T and V.T p.T: the few queries of a KV head are then the right operand, which the tensor
cores take 8 columns at a time, where the left has no fewer than 16 rows. Scales stay outside of the products:
q · (scale * code + offset) = scale * (q · code) + offset * sum(q), and in the output a token's scale multiplies its
weight. Products are in float16 also of a bfloat16 q, since codes need few bits and the GPU makes float16 of them most
cheaply: a byte with a zero byte above it is the subnormal float16 byte * 2**-24, exactly. A float32 q is computed in
float32.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**-24)  # the least float16: what an integer code of 1 becomes


@triton.constexpr_function
def nibbles_asm():
    """PTX: of 4 bytes, operand 4, the lower halves to operands 0 and 1, 16 * the upper to 2 and 3, in UNITs."""
    lines = [".reg .b32 a, b;", "prmt.b32 a, $4, 0, 0x4140;", "prmt.b32 b, $4, 0, 0x4342;"]
    lines += ["and.b32 $0, a, 0x000f000f;", "and.b32 $1, b, 0x000f000f;"]
    lines += ["and.b32 $2, a, 0x00f000f0;", "and.b32 $3, b, 0x00f000f0;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def bytes_asm():
    """PTX: of 4 signed bytes, operand 2, each in UNITs in operands 0 and 1: 128 more, and less 128."""
    lines = [".reg .b32 a, b, c, minus;", "xor.b32 a, $2, 0x80808080;", "mov.b32 minus, 0x80808080;"]
    lines += ["prmt.b32 b, a, 0, 0x4140;", "prmt.b32 c, a, 0, 0x4342;"]
    lines += ["add.rn.f16x2 $0, b, minus;", "add.rn.f16x2 $1, c, minus;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def nibbles(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The lower halves of bytes, and 16 * the upper halves, in UNITs."""
    if ASM and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            nibbles_asm(), "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return ((codes & 15).to(tl.float32) * UNIT).to(DTYPE), ((codes & 240).to(tl.float32) * UNIT).to(DTYPE)


@triton.jit
def floats(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Codes of fp8 as they are, of int8 in UNITs."""
    if codes.dtype == tl.int8:
        if ASM and tl.float16 == DTYPE:
            made = tl.inline_asm_elementwise(bytes_asm(), "=&r,=&r,r", [codes], dtype=tl.int16, is_pure=True, pack=4)
            return made.to(DTYPE, bitcast=True)
        return (codes.to(tl.float32) * UNIT).to(DTYPE)
    return codes.to(DTYPE)


@triton.jit
def scale_and_offset(words):
    """The float16 halves of int4's words, in float32."""
    scale = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def spread(v, WARPS: tl.constexpr):
    """Columns reordered so that a thread of the product needs neighbouring bytes of a token: see `gathered`.

    Of each 16 rows of the left operand, here columns, a thread has i and i + 8, and warps take turns.
    """
    N: tl.constexpr = v.shape[0]
    EACH: tl.constexpr = v.shape[1] // (16 * WARPS)
    return tl.reshape(tl.permute(tl.reshape(v, (N, WARPS, 8, EACH, 2)), (0, 3, 1, 4, 2)), (N, v.shape[1]))


@triton.jit
def gathered(acc, WARPS: tl.constexpr):
    """The rows of a product with `spread` weights, in their order, transposed."""
    N: tl.constexpr = acc.shape[1]
    EACH: tl.constexpr = acc.shape[0] // (16 * WARPS)
    return tl.reshape(tl.permute(tl.reshape(acc, (EACH, WARPS, 2, 8, N)), (4, 1, 3, 0, 2)), (N, acc.shape[0]))


@triton.jit
def attend_quantized(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, end, seq_len, qk_scale, stride_b, stride_t,
    stride_sb, KIND: tl.constexpr, ASM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """kernels.split_kv.attend. K and V share their strides, and so do their scales."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KIND == "int4" else HEAD_DIM
    DTYPE: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    CODE: tl.constexpr = 1.0 if KIND == "fp8" else 2.0**24  # what products with codes are multiplied by
    # Weights times scales are multiplied by this, so that float16 has room for small ones and for large.
    LIFT: tl.constexpr = 64.0 if KIND == "fp8" else (16.0 if KIND == "int8" else 4.0)
    if q.dtype == tl.bfloat16:  # to float16's range, by a power of two
        largest = tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0)
        power = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0.0, largest, 1.0))))
        q = q.to(tl.float32) / power
        qk_scale = qk_scale * power
    q = q.to(DTYPE)
    acc = tl.zeros([WIDTH, BLOCK_G], tl.float32)
    if KIND == "int4":
        q_sum = tl.sum(q.to(tl.float32), 1)  # (BLOCK_G,)
        q_low, q_high = tl.split(tl.permute(tl.reshape(q, (BLOCK_G, 2, WIDTH)), (0, 2, 1)))
        q_low = tl.trans(q_low)  # (WIDTH, BLOCK_G)
        q_high = tl.trans((q_high.to(tl.float32) / 16).to(DTYPE))  # the upper halves are 16 times the codes
        acc_high = tl.zeros([WIDTH, BLOCK_G], tl.float32)
        shared = tl.zeros([BLOCK_G], tl.float32)  # what the offsets add to all dimensions alike
    else:
        q = tl.trans(q)  # (WIDTH, BLOCK_G)
    dim = tl.arange(0, WIDTH)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    token = (begin + tl.arange(0, BLOCK_N)).to(tl.uint32)  # unsigned, so that division by a block size is a shift
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)  # (BLOCK_N,)
    for first in tl.range(begin, end, BLOCK_N):
        token = (first + tl.arange(0, BLOCK_N)).to(tl.uint32)
        live = token < seq_len
        offset = token % BLOCK_SIZE
        row = block.to(tl.int64) * stride_b + offset * stride_t
        place = block.to(tl.int64) * stride_sb + offset
        k = tl.load(k_ptr + row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, WIDTH)
        k_scale = tl.load(k_scales_ptr + place, mask=live, other=0)  # (BLOCK_N,)
        # What is not live has the code and the scale 0, so that one multiplication and addition masks and scales.
        plus = tl.where(live, 0.0, float("-inf"))[:, None]
        if KIND == "int4":
            k_low, k_high = nibbles(k, DTYPE, ASM)
            score = tl.dot(k_low, q_low, input_precision="ieee")  # (BLOCK_N, BLOCK_G)
            score = tl.dot(k_high, q_high, score, input_precision="ieee")
            k_scale, k_offset = scale_and_offset(k_scale)
            plus += (qk_scale * k_offset)[:, None] * q_sum[None, :]
        else:
            score = tl.dot(floats(k, DTYPE, ASM), q, input_precision="ieee")
        score = score * (CODE * qk_scale * k_scale)[:, None] + plus
        new_peak = tl.maximum(peak, tl.max(score, 0))
        # With no live token yet, -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[None, :])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(p, 0)
        v = tl.load(v_ptr + row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, WIDTH)
        v_scale = tl.load(v_scales_ptr + place, mask=live, other=0)  # (BLOCK_N,)
        v = spread(v, WARPS)
        acc = acc * rescale[None, :]
        if KIND == "int4":
            v_low, v_high = nibbles(v, DTYPE, ASM)
            v_scale, v_offset = scale_and_offset(v_scale)
            shared = shared * rescale + tl.sum(p * v_offset[:, None], 0)
            p = (p * (LIFT * v_scale)[:, None]).to(DTYPE)
            acc = tl.dot(tl.trans(v_low), p, acc, input_precision="ieee")
            acc_high = tl.dot(tl.trans(v_high), p, acc_high * rescale[None, :], input_precision="ieee")
        else:
            p = (p * (LIFT * v_scale)[:, None]).to(DTYPE)
            acc = tl.dot(tl.trans(floats(v, DTYPE, ASM)), p, acc, input_precision="ieee")
        peak = new_peak
        token += BLOCK_N
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
    acc = gathered(acc, WARPS) * (CODE / LIFT)  # (BLOCK_G, WIDTH)
    if KIND == "int4":
        acc_high = gathered(acc_high, WARPS) * (CODE / (16 * LIFT))
        both = tl.join(acc + shared[:, None], acc_high + shared[:, None])  # (BLOCK_G, WIDTH, 2)
        acc = tl.reshape(tl.permute(both, (0, 2, 1)), (BLOCK_G, HEAD_DIM))
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor))
    return acc / divisor[:, None], lse
