import pytest
import torch

from kernels import flash_attention as module
from kernels import reference
from kernels.flash_attention import flash_attention
from labkit.checks import compare


def make(device, dtype, q_len=150, k_len=150, batch=2, num_heads=2, num_kv_heads=1, head_dim=64, seed=0):
    """Random q, k, v, [batch, length, heads, head_dim]."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((q_len, num_heads), (k_len, num_kv_heads), (k_len, num_kv_heads))
    return [torch.randn(batch, n, h, head_dim, generator=random).to(device, dtype) for n, h in shapes]


def pack(device, dtype, q_lens, k_lens, num_heads=2, num_kv_heads=1, head_dim=64):
    """Random packed q, k, v and their cu_seqlens."""
    sizes = {"batch": 1, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    q, k, v = (x[0] for x in make(device, dtype, sum(q_lens), sum(k_lens), **sizes))
    ends = [torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32) for lens in (q_lens, k_lens)]
    return q, k, v, *ends


def same(got, oracle, args, **options):
    """Output and log-sum-exp against the oracle: as wrong as twice a same-precision reference, at most."""
    (out, lse), (exact, exact_lse) = got, oracle(*args, **options)
    peer, _ = oracle(*args, dtype=out.dtype, **options)
    if out.dtype == torch.float32 and out.is_cuda:
        # PTX's ex2.approx, which exp2 compiles to, is right to 2**-22 only: more than all of a torch reference's error.
        peer = exact.float() + 2**-22 * args[2].nan_to_num().abs().max()
    compare.close(out, exact, peer, "out")
    _, peer_lse = oracle(*args, dtype=torch.float32, **options)
    assert torch.equal(lse.isinf(), exact_lse.isinf()), (
        "a query without keys has an lse of -inf, any other a finite one"
    )
    seen = exact_lse.isfinite()
    peer_lse = peer_lse + 2**-22  # to base 2 and back
    compare.close(lse[seen], exact_lse[seen], peer_lse[seen], "lse")


def check(q, k, v, variant="tl", **options):
    out = compare.poison(torch.empty(q.shape, dtype=q.dtype, device=q.device))
    got = flash_attention(q, k, v, out=out, return_lse=True, variant=variant, **options)
    assert got[0] is out
    same(got, reference.flash_attention, (q, k, v), **options)


def check_packed(q, k, v, cu_q, cu_k, **options):
    out = compare.poison(torch.empty_like(q))
    got = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, out=out, return_lse=True, **options)
    same(got, reference.packed_flash_attention, (q, k, v, cu_q, cu_k), **options)


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_of_equal_lengths(device, dtype, causal):
    check(*make(device, dtype), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_every_head_dim_also_those_that_are_no_power_of_two(device, head_dim, causal):
    check(*make(device, torch.float16, 130, 130, 1, 1, head_dim=head_dim), causal=causal)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (4, 1), (6, 2)])
def test_grouped_queries_read_their_own_kv_head(device, dtype, num_heads, num_kv_heads):
    check(*make(device, dtype, 40, 70, 1, num_heads, num_kv_heads), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len, k_len", [(1, 1), (1, 200), (17, 150), (128, 129), (200, 64), (140, 1), (256, 256)])
def test_the_causal_diagonal_ends_in_the_bottom_right_corner(device, q_len, k_len, causal):
    check(*make(device, torch.float16, q_len, k_len, 1, 1), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_different_lengths_do_not_see_each_other(device, dtype, causal):
    check_packed(*pack(device, dtype, [1, 130, 0, 15, 64], [1, 130, 3, 40, 64]), causal=causal)


def test_many_short_sequences(device):
    lens = [1, 2, 3, 5, 8, 13, 21, 0, 0, 34, 1, 1]
    check_packed(*pack(device, torch.float16, lens, lens, num_heads=1), causal=True)


def test_packed_sequences_without_keys_give_zeros(device):
    check_packed(*pack(device, torch.float16, [3, 5], [0, 7], num_heads=1))


def test_what_lies_past_the_end_of_a_sequence_is_not_read_into_the_sum(device):
    q, k, v, cu_q, cu_k = pack(device, torch.float16, [5, 40], [5, 40], num_heads=1)
    k[5:], v[5:] = float("nan"), float("nan")
    out = flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert out[:5].isfinite().all(), "the second sequence's NaN reached the first: mask V as well as the scores"


def test_no_keys_at_all_give_zeros(device):
    q, k, v = make(device, torch.float16, 5, 0)
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert not out.any() and (lse == float("-inf")).all()


def test_an_empty_batch(device):
    assert flash_attention(*make(device, torch.float16, batch=0)).shape == (0, 150, 2, 64)


def test_heads_before_tokens_passes_as_a_view(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make(device, torch.float16, 70, 90))
    check(q, k, v, causal=True)


def test_q_k_and_v_may_be_views_of_one_tensor(device):
    qkv = torch.randn(2, 70, 3, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    check(*qkv.unbind(2))


def test_large_scores_do_not_overflow(device, dtype):
    q, k, v = make(device, dtype, 70, 70, 1, 1)
    check(40 * q, 40 * k, v)


def test_the_scale_is_used(device):
    check(*make(device, torch.float16, 40, 40, 1, 1), scale=0.3)


def test_without_return_lse_only_the_output_comes_back(device):
    args = make(device, torch.float16, 40, 40)
    assert torch.equal(flash_attention(*args), flash_attention(*args, return_lse=True)[0])


@pytest.mark.parametrize("block_m, block_n", [(64, 32), (32, 64), (128, 128)])
def test_any_plan_is_correct(device, monkeypatch, block_m, block_n):
    monkeypatch.setattr(module, "plan_for", lambda *_: module.Plan(block_m, block_n, num_warps=4, num_stages=2))
    check(*make(device, torch.float16, 150, 170, 1, 1), causal=True)


WRONG = {
    "q is flat": (lambda a: dict(a, q=a["q"][0]), r"q: expected \[batch, q_len, num_heads, head_dim\]"),
    "head_dim": (lambda a: {n: x[..., :40] for n, x in a.items()}, "q: head_dim must be one of"),
    "k's head_dim": (lambda a: dict(a, k=a["k"][..., :32]), "k: .* does not match q"),
    "v's length": (lambda a: dict(a, v=a["v"][:, :-1]), "v: .* differs from k"),
    "heads": (lambda a: dict(a, k=a["k"].repeat(1, 1, 3, 1), v=a["v"].repeat(1, 1, 3, 1)), "must divide q's num_heads"),
    "scale": (lambda a: dict(a, scale=-1.0), "scale: expected a positive number"),
    "one cu_seqlens": (lambda a: dict(a, cu_seqlens_q=torch.zeros(2).int().to(a["q"].device)), "give both or neither"),
    "out": (lambda a: dict(a, out=a["q"][:, :-1]), "out: expected"),
    "expanded": (lambda a: dict(a, q=a["q"][:, :1].expand_as(a["q"])), "q: strides must be positive multiples"),
    "variant": (lambda a: dict(a, variant="fast"), "variant: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_before_anything_runs(device, name):
    spoil, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        flash_attention(**spoil(dict(zip("qkv", make(device, torch.float16), strict=True))))


def test_wrong_types_are_named(device):
    q, k, v = make(device, torch.float16)
    with pytest.raises(TypeError, match=r"k: expected torch\.float16 like q, got torch\.float32"):
        flash_attention(q, k.float(), v)
    with pytest.raises(TypeError, match="q: expected float16, bfloat16 or float32"):
        flash_attention(q.double(), k.double(), v.double())
    ends = torch.tensor([0, 150], device=device)
    with pytest.raises(TypeError, match="cu_seqlens_q: expected int32"):
        flash_attention(q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends)
