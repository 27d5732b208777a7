"""`kernels.split_kv.attend` over a quantized cache: codes become floats on their way to the tensor cores.

Scales stay outside of the products: q · (scale * code + offset) = scale * (q · code) + offset * sum(q), and in the
output a token's scale multiplies its weight. Products are in float16 also of a bfloat16 q, since codes need few bits
and the GPU makes float16 of them most cheaply: a byte below the byte 0x64 is the float16 1024 + byte, whose 1024 is
taken off again where it costs nothing, in the sum that the product is added to. A float32 q is computed in float32.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def nibbles_asm():
    """PTX: of 4 bytes, operand 4, 1024 + the lower halves to operands 0 and 1, 1024 + 16 * the upper to 2 and 3."""
    lines = [".reg .b32 a, b, high;", "mov.b32 high, 0x64646464;"]
    lines += ["prmt.b32 a, $4, high, 0x5140;", "prmt.b32 b, $4, high, 0x7362;"]
    lines += ["and.b32 $0, a, 0xff0fff0f;", "and.b32 $1, b, 0xff0fff0f;"]
    lines += ["and.b32 $2, a, 0xfff0fff0;", "and.b32 $3, b, 0xfff0fff0;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def bytes_asm():
    """PTX: of 4 signed bytes, operand 2, 1152 + each in operands 0 and 1."""
    lines = [".reg .b32 a, high;", "mov.b32 high, 0x64646464;", "xor.b32 a, $2, 0x80808080;"]
    lines += ["prmt.b32 $0, a, high, 0x5140;", "prmt.b32 $1, a, high, 0x7362;"]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def nibbles(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """1024 + the lower halves of bytes, and 1024 + 16 * the upper halves."""
    if ASM and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            nibbles_asm(), "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return (codes & 15).to(DTYPE) + 1024, (codes & 240).to(DTYPE) + 1024


@triton.jit
def floats(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Codes of fp8 as they are, of int8 plus 1152."""
    if codes.dtype == tl.int8:
        if ASM and tl.float16 == DTYPE:
            plus = tl.inline_asm_elementwise(bytes_asm(), "=&r,=&r,r", [codes], dtype=tl.int16, is_pure=True, pack=4)
            return plus.to(DTYPE, bitcast=True)
        return codes.to(DTYPE) + 1152
    return codes.to(DTYPE)


@triton.jit
def scale_and_offset(words):
    """The float16 halves of int4's words, in float32."""
    scale = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, offset


@triton.jit
def spread(v, WARPS: tl.constexpr):
    """Columns reordered so that a thread of the product needs neighbouring bytes of a token: see `gathered`."""
    N: tl.constexpr = v.shape[0]
    EACH: tl.constexpr = v.shape[1] // (8 * WARPS)
    return tl.reshape(tl.permute(tl.reshape(v, (N, WARPS, 8, EACH)), (0, 3, 1, 2)), (N, v.shape[1]))


@triton.jit
def gathered(acc, WARPS: tl.constexpr):
    """The columns of a product with `spread` weights, in their order."""
    N: tl.constexpr = acc.shape[0]
    EACH: tl.constexpr = acc.shape[1] // (8 * WARPS)
    return tl.reshape(tl.permute(tl.reshape(acc, (N, EACH, WARPS, 8)), (0, 2, 3, 1)), (N, acc.shape[1]))


@triton.jit
def attend_quantized(
    q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, end, seq_len, qk_scale, stride_b, stride_t,
    stride_sb, KIND: tl.constexpr, ASM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """kernels.split_kv.attend. K and V share their strides, and so do their scales."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KIND == "int4" else HEAD_DIM
    DTYPE: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    # Weights times scales are multiplied by this, so that float16 has room for small ones and for large.
    LIFT: tl.constexpr = 64.0 if KIND == "fp8" else (16.0 if KIND == "int8" else 4.0)
    PLUS: tl.constexpr = 0.0 if KIND == "fp8" else (1152.0 if KIND == "int8" else 1024.0)  # in all codes
    if q.dtype == tl.bfloat16:  # to float16's range, by a power of two
        largest = tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0)
        power = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0.0, largest, 1.0))))
        q = q.to(tl.float32) / power
        qk_scale = qk_scale * power
    q = q.to(DTYPE)
    q_sum = tl.sum(q.to(tl.float32), 1)  # (BLOCK_G,)
    base = -PLUS * q_sum
    acc = tl.zeros([BLOCK_G, WIDTH], tl.float32)
    if KIND == "int4":
        q_low, q_high = tl.split(tl.permute(tl.reshape(q, (BLOCK_G, 2, WIDTH)), (0, 2, 1)))
        q_high = (q_high.to(tl.float32) / 16).to(DTYPE)  # the upper halves are 16 times the codes
        base = -PLUS * (tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1))
        acc_high = tl.zeros([BLOCK_G, WIDTH], tl.float32)
        shared = tl.zeros([BLOCK_G], tl.float32)  # what the offsets add to all dimensions alike
    dim = tl.arange(0, WIDTH)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    start = tl.zeros([BLOCK_G, BLOCK_N], tl.float32) + base[:, None]
    token = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)  # (BLOCK_N,)
    for first in tl.range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        live = token < seq_len
        offset = token % BLOCK_SIZE
        row = block.to(tl.int64) * stride_b + offset * stride_t
        place = block.to(tl.int64) * stride_sb + offset
        k = tl.load(k_ptr + row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, WIDTH)
        k_scale = tl.load(k_scales_ptr + place, mask=live, other=0)  # (BLOCK_N,)
        if KIND == "int4":
            k_low, k_high = nibbles(k, DTYPE, ASM)
            score = tl.dot(q_low, tl.trans(k_low), start, input_precision="ieee")  # (BLOCK_G, BLOCK_N)
            score = tl.dot(q_high, tl.trans(k_high), score, input_precision="ieee")
            k_scale, k_offset = scale_and_offset(k_scale)
            score = score * (qk_scale * k_scale)[None, :] + q_sum[:, None] * (qk_scale * k_offset)[None, :]
        else:
            score = tl.dot(q, tl.trans(floats(k, DTYPE, ASM)), start, input_precision="ieee")
            score = score * (qk_scale * k_scale)[None, :]
        score = tl.where(live[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # With no live token yet, -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(p, 1)
        v = tl.load(v_ptr + row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_N, WIDTH)
        v_scale = tl.load(v_scales_ptr + place, mask=live, other=0)  # (BLOCK_N,)
        v = spread(v, WARPS)
        if KIND == "int4":
            v_low, v_high = nibbles(v, DTYPE, ASM)
            v_scale, v_offset = scale_and_offset(v_scale)
            shared = shared * rescale + tl.sum(p * v_offset[None, :], 1)
        p = (p * (LIFT * v_scale)[None, :]).to(DTYPE)
        surplus = 0.0
        if PLUS > 0.0:
            surplus = (PLUS * tl.sum(p.to(tl.float32), 1))[:, None]
        if KIND == "int4":
            acc_high = tl.dot(p, v_high, acc_high * rescale[:, None] - surplus, input_precision="ieee")
            acc = tl.dot(p, v_low, acc * rescale[:, None] - surplus, input_precision="ieee")
        else:
            acc = tl.dot(p, floats(v, DTYPE, ASM), acc * rescale[:, None] - surplus, input_precision="ieee")
        peak = new_peak
        token += BLOCK_N
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
    acc = gathered(acc, WARPS) / LIFT
    if KIND == "int4":
        acc_high = gathered(acc_high, WARPS) / (16 * LIFT)
        both = tl.join(acc + shared[:, None], acc_high + shared[:, None])  # (BLOCK_G, WIDTH, 2)
        acc = tl.reshape(tl.permute(both, (0, 2, 1)), (BLOCK_G, HEAD_DIM))
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(divisor))
    return acc / divisor[:, None], lse
