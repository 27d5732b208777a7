"""The kernels between matrix products, against oracles in float64."""

import pytest
import torch

from kernels import fused, reference
from labkit.checks import compare

EPS = 1e-6


def split(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Float32 parts that add up to x, as a matrix product would leave them."""
    made = torch.randn(parts, *x.shape, device=x.device)
    made[-1] = x.float() - made[:-1].sum(0)
    return made


@pytest.mark.parametrize("hidden", [64, 96, 2560])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_norm_gives_the_normalised_sum_and_the_sum(device, dtype, hidden, parts):
    x, residual = torch.randn(2, 5, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    given = split(x, parts) if parts else x
    y, total = fused.add_rms_norm(given, residual, weight, EPS)
    exact_total = (given.double().sum(0) if parts else x.double()) + residual.double()
    compare.close(total, exact_total, exact_total.to(dtype), "the sum")
    exact = reference.rms_norm(total, weight, EPS)
    compare.close(y, exact, reference.rms_norm(total, weight, EPS, dtype=torch.float32).to(dtype), "y")


def test_a_norm_without_a_residual_gives_x_itself_as_the_sum(device, dtype):
    x, weight = torch.randn(3, 64, device=device).to(dtype), torch.ones(64, device=device).to(dtype)
    y, total = fused.add_rms_norm(x, None, weight, EPS)
    assert total is x
    peer = reference.rms_norm(x, weight, EPS, dtype=torch.float32).to(dtype)
    compare.close(y, reference.rms_norm(x, weight, EPS), peer, "y")
    _, total = fused.add_rms_norm(split(x, 2), None, weight, EPS)
    compare.close(total, x.double(), x, "the sum of parts")


def attention_inputs(device, dtype, heads=4, kv_heads=2, dim=64, rows=5):
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    caches = torch.randn(2, 6, 8, kv_heads, dim, device=device).to(dtype)
    table = torch.randn(2, 40, dim // 2, device=device).repeat(1, 1, 2).to(dtype)
    positions = torch.tensor([0, 39, 7, 7, 12][:rows], dtype=torch.int32, device=device)
    slots = torch.tensor([3, -1, 47, 0, 20][:rows], dtype=torch.int32, device=device)
    return qkv, *caches, table, positions, slots


def expected(qkv, k_cache, v_cache, table, positions, slots, heads, norms, dtype):
    """q and both caches, computed in `dtype`."""
    kv_heads, dim = k_cache.shape[2:]
    q, k, v = qkv.to(dtype).unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
    if norms:
        q, k = (reference.rms_norm(x, n, EPS, dtype=dtype) for x, n in zip((q, k), norms, strict=True))
    q, k = (reference.rotate(x, table, positions, dtype=dtype) for x in (q, k))
    wanted = k_cache.to(dtype), v_cache.to(dtype)
    reference.write_kv(k, v, *wanted, slots)
    return q, *wanted


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 64), (6, 1, 32), (2, 2, 128)])
def test_rope_turns_q_and_k_and_writes_k_and_v_to_their_slots(device, dtype, normed, parts, heads, kv_heads, dim):
    args = attention_inputs(device, dtype, heads, kv_heads, dim)
    norms = tuple(torch.randn(2, dim, device=device).to(dtype)) if normed else ()
    given = split(args[0], parts) if parts else args[0]
    summed = given.double().sum(0) if parts else args[0]
    exact = expected(summed, *args[1:], heads, norms, torch.float64)
    peer = [x.to(dtype) for x in expected(summed, *args[1:], heads, norms, torch.float32)]
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": EPS} if normed else {}
    q = fused.rope_write(given, *args[1:], heads, **options)
    for name, got, want, near in zip(("q", "k_cache", "v_cache"), (q, *args[1:3]), exact, peer, strict=True):
        compare.close(got, want, near, name)


def test_a_negative_slot_writes_nothing_and_a_joint_cache_passes_as_views(device):
    qkv, _, _, table, positions, slots = attention_inputs(device, torch.float16)
    joint = torch.randn(6, 2, 8, 2, 64, device=device).half()
    before = joint.clone()
    fused.rope_write(qkv, joint[:, 0], joint[:, 1], table, positions, torch.full_like(slots, -1), 4)
    compare.equal(joint, before, "the cache")
    fused.rope_write(qkv, joint[:, 0], joint[:, 1], table, positions, slots, 4)
    changed = (joint != before).any(-1).any(-1).flatten(0, 2)  # (block, K or V, offset) in a row
    assert changed.nonzero().flatten().tolist() == [0, 3, 8, 11, 36, 44, 87, 95]


@pytest.mark.parametrize("parts", [0, 2])
def test_silu_times_up(device, dtype, parts):
    x = torch.randn(3, 2 * 1100, device=device).to(dtype)
    given = split(x, parts) if parts else x
    exact = reference.silu_mul(given.double().sum(0) if parts else x)
    peer = reference.silu_mul(given.sum(0) if parts else x, dtype=torch.float32).to(dtype)
    compare.close(fused.silu_mul(given, dtype), exact, peer, "y")


@pytest.mark.parametrize("vocab", [1, 97, 2048, 5000])
def test_argmax_is_the_first_of_the_largest(device, dtype, vocab):
    logits = torch.randint(-9, 9, (4, vocab), device=device).to(dtype)  # many equal ones
    logits[3] = float("-inf")
    out = torch.full((4,), -1, dtype=torch.int32, device=device)
    fused.argmax(logits, out)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert out.tolist() == [*first[:3], 0]


def test_a_negative_token_stands_for_one_that_was_sampled_before(device, dtype):
    table = torch.randn(50, 24, device=device).to(dtype)
    tokens, sampled = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([4, -1, -3, 49, 0], [7, 8, 9]))
    compare.equal(fused.embed(tokens, sampled, table), table[[4, 7, 9, 49, 0]], "the embedding")


def test_no_row_gives_no_row(device):
    none = torch.empty(0, 64, device=device).half()
    index = torch.empty(0, dtype=torch.int32, device=device)
    cache = torch.zeros(2, 8, 1, 16, device=device).half()
    assert fused.add_rms_norm(none, none, none.new_ones(64), EPS)[0].shape == (0, 64)
    assert fused.silu_mul(none, none.dtype).shape == (0, 32)
    assert fused.embed(index, index, none.new_ones(3, 8)).shape == (0, 8)
    assert fused.rope_write(none, cache, cache, cache.new_ones(2, 4, 16), index, index, 2).shape == (0, 2, 16)
    fused.argmax(none, index)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: fused.add_rms_norm(x.t(), None, x[0], EPS), ValueError, "x: expected"),
        (lambda x: fused.add_rms_norm(x.float(), None, x[0], EPS), TypeError, "x: expected torch.float16"),
        (lambda x: fused.add_rms_norm(x, x[:1], x[0], EPS), ValueError, "residual: expected"),
        (lambda x: fused.silu_mul(x[:, :63].contiguous(), x.dtype), ValueError, "gate_up: expected as many"),
        (lambda x: fused.argmax(x, torch.zeros(2, device=x.device)), TypeError, "out: expected int32"),
        (lambda x: fused.embed(x.int()[0].long(), x.int()[0], x), TypeError, "tokens: expected int32"),
    ],
)
def test_bad_input_names_the_argument(device, call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(4, 64, dtype=torch.float16, device=device))


def test_rope_refuses_half_of_the_norms_and_wrong_indices(device):
    qkv, k_cache, v_cache, table, positions, slots = attention_inputs(device, torch.float16)
    norm = torch.ones(64, device=device).half()
    with pytest.raises(ValueError, match="q_norm: give q_norm and k_norm, or neither"):
        fused.rope_write(qkv, k_cache, v_cache, table, positions, slots, 4, q_norm=norm)
    with pytest.raises(ValueError, match=r"positions: expected \[5\]"):
        fused.rope_write(qkv, k_cache, v_cache, table, positions[:4], slots, 4)
    with pytest.raises(ValueError, match="qkv: expected"):
        fused.rope_write(qkv, k_cache, v_cache, table, positions, slots, 5)
