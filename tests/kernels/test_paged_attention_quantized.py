import pytest
import torch

from kernels import kv_cache_quantized, paged_attention, reference
from kernels import paged_attention_quantized as module
from kernels.kv_cache_quantized import QuantizedCache, write_kv_quantized
from kernels.paged_attention import Plan
from kernels.paged_attention_quantized import allocate_workspace, paged_attention_quantized
from labkit.checks import compare

MIXED = [1, 17, 0, 70]
KINDS = ("fp8", "int8", "int4")


def make(kind, lens, device, dtype=torch.float16, num_heads=4, num_kv_heads=1, head_dim=64, block_size=16, shift=0.3):
    """(arguments of the kernel; K and V; slots). Scales of slots that no token has are NaN."""
    random = torch.Generator().manual_seed(0)
    used = [-(-n // block_size) for n in lens]
    cache = QuantizedCache.allocate(kind, sum(used) + 2, block_size, num_kv_heads, head_dim, device)
    scattered = torch.randperm(sum(used) + 2, generator=random).tolist()
    table = torch.full((len(lens), max([*used, 1]) + 1), 2**30, dtype=torch.int32)
    slots = []
    for s, count in enumerate(used):
        blocks = [scattered.pop() for _ in range(count)]
        table[s, :count] = torch.tensor(blocks, dtype=torch.int32)
        slots += [blocks[t // block_size] * block_size + t % block_size for t in range(lens[s])]
    for scales in (cache.k_scales, cache.v_scales):
        scales.fill_(-1 if kind == "int4" else float("nan"))
    k, v = (torch.randn(2, len(slots), num_kv_heads, head_dim, generator=random) + shift).to(device, dtype)
    places = torch.tensor(slots, dtype=torch.int64, device=device)
    write_kv_quantized(k, v, cache, places)
    q = torch.randn(len(lens), num_heads, head_dim, generator=random).to(device, dtype)
    return (q, cache, table.to(device), torch.tensor(lens, dtype=torch.int32, device=device)), (k, v), places


def dequantized(cache, places):
    """K and V as the cache has them; zero where no token is."""
    found = []
    for codes, scales in ((cache.k, cache.k_scales), (cache.v, cache.v_scales)):
        values = reference.dequantize_kv(codes, scales, cache.kind)
        live = torch.zeros(values.shape[:2], dtype=torch.bool, device=values.device)
        live.view(-1)[places] = True
        found.append(torch.where(live[:, :, None, None], values, 0.0))
    return found


def check(made, plan=None, **options):
    """Output and log-sum-exp against attention in float64 over what the cache stands for; outputs are poisoned."""
    (q, cache, table, lens), _, places = made
    out = compare.poison(torch.empty_like(q))
    lse = compare.poison(torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
    if plan is None:
        assert paged_attention_quantized(q, cache, table, lens, out=out, lse=lse, **options) is out
    else:
        paged_attention.launch(q, cache.k, cache.v, table, lens, None, out, lse, None, plan, cache)
    k, v = dequantized(cache, places)
    exact, exact_lse = reference.paged_attention(q, k, v, table, lens)
    lowest = torch.float16 if q.dtype == torch.float32 else q.dtype  # codes times weights may be in 16 bits
    peer, peer_lse = reference.paged_attention(q.to(lowest), k, v, table, lens, dtype=lowest)
    compare.close(out, exact, peer.to(q.dtype), "out")
    compare.close(lse, exact_lse, peer_lse.float(), "lse")
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_of_all_kinds_in_one_batch(kind, device, dtype):
    check(make(kind, MIXED, device, dtype))


@pytest.mark.parametrize("kind, num_heads, num_kv_heads", [("fp8", 6, 2), ("int4", 6, 2), ("int4", 16, 1)])
def test_grouped_queries_read_their_own_kv_head(kind, device, num_heads, num_kv_heads):
    check(make(kind, [20, 3], device, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [32, 256])
def test_every_head_dim(kind, device, head_dim):
    check(make(kind, [20, 0], device, head_dim=head_dim))


@pytest.mark.parametrize("kind, block_size", [("fp8", 48), ("int8", 1), ("int4", 1), ("int4", 48)])
def test_every_block_size(kind, device, block_size):
    check(make(kind, [block_size, block_size + 1], device, block_size=block_size))


@pytest.mark.parametrize("kind, warps", [("fp8", 2), ("int8", 4), ("int4", 2)])
def test_threads_get_neighbouring_bytes_whatever_the_number_of_warps(kind, device, warps):
    check(make(kind, [40], device, head_dim=128), Plan(block_n=32, num_warps=warps, num_stages=3, ctas_per_sm=2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_sequence_is_split_and_a_workspace_kept(kind, device):
    made = make(kind, [140, 5], device)
    workspace = allocate_workspace(kind, 4, 1, 64, torch.float16, device)
    first = check(made, workspace=workspace)
    assert not workspace.arrivals.any(), "an arrival counter was not set back to zero"
    again = paged_attention_quantized(*made[0], workspace=workspace)
    compare.equal(again, first, "the second call's output")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_small_and_large_values_keep_their_precision(kind, device, size):
    (q, cache, table, lens), (k, v), places = make(kind, [30], device, torch.float32, shift=0.0)
    write_kv_quantized(k, v * size, cache, places)
    check(((q.half(), cache, table, lens), (k, v), places))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_the_references_to_one_rounding(kind, device, dtype):
    (_, cache, *_), pair, places = make(kind, [21, 2], device, dtype)
    for x, codes, scales in zip(pair, (cache.k, cache.v), (cache.k_scales, cache.v_scales), strict=True):
        got, factors, offsets = (t.flatten(0, 1)[places] for t in reference.quantized_codes(codes, scales, kind))
        want, want_factors, want_offsets = reference.quantize_kv(x, kind)
        step = (want.abs().clamp(min=2**-6).log2().floor() - 3).exp2() if kind == "fp8" else 1.0
        error = (got - want).abs()
        if kind == "fp8" and device == "cpu":  # Triton's interpreter loses the carry of rounding up to a power of two
            error = torch.where(want.abs().log2() % 1 == 0, 0.0, error)
        assert (error <= step).all(), f"a code of {kind} is further from the reference's than rounding explains"
        assert (error > 0).float().mean() < 0.01, f"too many codes of {kind} differ from the reference's"
        torch.testing.assert_close(factors, want_factors, rtol=2e-3, atol=0)
        torch.testing.assert_close(offsets, want_offsets, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_zeros_and_one_of_equal_values_stay_what_they_are(kind, device):
    cache = QuantizedCache.allocate(kind, 1, 4, 1, 32, device)
    x = torch.stack([torch.zeros(1, 32), torch.full((1, 32), 1.5)]).to(device)
    write_kv_quantized(x, x, cache, torch.tensor([0, 1], device=device))
    k, v = dequantized(cache, torch.tensor([0, 1], device=device))
    torch.testing.assert_close(k[0, :2], x, rtol=1e-6, atol=0)
    torch.testing.assert_close(v[0, :2], x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_slot_writes_nothing(kind, device):
    cache = QuantizedCache.allocate(kind, 2, 4, 1, 32, device)
    before = cache.k.view(torch.uint8).clone()
    x = torch.randn(2, 1, 32, device=device)
    write_kv_quantized(x, x, cache, torch.tensor([-1, -5], device=device))
    compare.equal(cache.k.view(torch.uint8), before, "the codes")


@pytest.mark.parametrize("kind, share", [("fp8", 132 / 256), ("int8", 132 / 256), ("int4", 68 / 256)])
def test_bytes_are_those_of_codes_and_scales(kind, share, device):
    cache = QuantizedCache.allocate(kind, 3, 16, 2, 128, device)
    assert cache.bytes == 2 * 3 * 16 * 2 * 128 * 2 * share, "bytes beside the same cache's in 16 bits"


def test_what_is_wrong_with_a_cache_is_said_by_name(device, monkeypatch):
    with pytest.raises(ValueError, match="kind: expected fp8, int8, int4, got 'int2'"):
        QuantizedCache.allocate("int2", 1, 16, 1, 64, device)
    with pytest.raises(ValueError, match="head_dim: int4"):
        QuantizedCache.allocate("int4", 1, 16, 1, 16, device)
    (q, cache, *rest), *_ = make("int8", [3], device)
    with pytest.raises(TypeError, match="cache: expected a QuantizedCache"):
        paged_attention_quantized(q, cache.k, *rest)
    with pytest.raises(ValueError, match="q: expected a head_dim of 64"):
        paged_attention_quantized(q[:, :, :32], cache, *rest)
    with pytest.raises(ValueError, match="v: expected"):
        write_kv_quantized(q[:, :1], q[:0, :1], cache, torch.zeros(1, dtype=torch.int64, device=device))
    monkeypatch.setattr(kv_cache_quantized, "_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"kind: fp8 needs a GPU of compute capability 8\.9"):
        QuantizedCache.allocate("fp8", 1, 16, 1, 64, device)
    QuantizedCache.allocate("int8", 1, 16, 1, 64, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter runs no inline assembly")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_inline_assembly_has_the_bits_of_its_plain_twin(kind, device, monkeypatch):
    made = make(kind, MIXED, device, head_dim=128)
    fast = check(made)
    monkeypatch.setattr(paged_attention, "JITFunction", type("Never", (), {}))
    compare.equal(check(made), fast, "the twin's output")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_captured_graph_follows_lengths_that_change(device):
    (q, cache, table, lens), _, places = make("fp8", [60, 33], device)
    workspace = module.allocate_workspace("fp8", 4, 1, 64, q.dtype, device)
    out = paged_attention_quantized(q, cache, table, lens, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention_quantized(q, cache, table, lens, out=out, workspace=workspace)
    lens.copy_(torch.tensor([7, 20], dtype=torch.int32))
    graph.replay()
    k, v = dequantized(cache, places)
    exact, _ = reference.paged_attention(q, k, v, table, lens)
    peer, _ = reference.paged_attention(q, k, v, table, lens, dtype=q.dtype)
    compare.close(out, exact, peer, "out")
