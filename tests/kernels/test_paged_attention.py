import pytest
import torch

from kernels import paged_attention as module
from kernels import reference
from kernels.paged_attention import Workspace, paged_attention
from labkit.checks import compare

MIXED = [1, 15, 16, 17, 0, 300, 64]


def make(lens, device, dtype, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seed=0, layout="blocks"):
    """Random inputs whose blocks are scattered; unused table entries and unused slots hold what must not be read."""
    random = torch.Generator().manual_seed(seed)
    used = [-(-n // block_size) for n in lens]
    num_blocks = sum(used) + 2
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    caches = torch.randn(2, *shape, generator=random)
    block_table = torch.full((len(lens), max([*used, 1]) + 1), 2**30, dtype=torch.int32)
    scattered = iter(torch.randperm(num_blocks, generator=random).tolist())
    for s, count in enumerate(used):
        block_table[s, :count] = torch.tensor([next(scattered) for _ in range(count)], dtype=torch.int32)
        if lens[s] % block_size:
            for cache in caches:
                cache[block_table[s, count - 1], lens[s] % block_size :] = float("nan")
    q = torch.randn(len(lens), num_heads, head_dim, generator=random)
    k_cache, v_cache = placed(caches.to(device, dtype), layout)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return q.to(device, dtype), k_cache, v_cache, block_table.to(device), seq_lens


def placed(caches, layout):
    """The caches [2, num_blocks, block_size, num_kv_heads, head_dim], laid out in memory as an engine may do."""
    if layout == "joint":  # K and V of a block side by side
        return caches.transpose(0, 1).contiguous().unbind(1)
    if layout == "heads first":
        return caches.transpose(2, 3).contiguous().transpose(2, 3).unbind(0)
    return caches.unbind(0)


def check(args, **options):
    """The output and log-sum-exp of the kernel against the oracles; outputs are poisoned before."""
    q = args[0]
    out = compare.poison(torch.empty_like(q))
    lse = compare.poison(torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
    assert paged_attention(*args, out=out, lse=lse, **options) is out
    scale = options.get("scale")
    exact, exact_lse = reference.paged_attention(*args, scale=scale)
    peer, _ = reference.paged_attention(*args, scale=scale, dtype=q.dtype)
    if q.dtype == torch.float32 and q.is_cuda:
        # PTX's ex2.approx, which exp2 compiles to, is right to 2**-22 only: more than all of a torch reference's error.
        peer = exact.float() + 2**-22 * args[2].nan_to_num().abs().max()
    compare.close(out, exact, peer, "out")
    _, peer_lse = reference.paged_attention(*args, scale=scale, dtype=torch.float32)
    compare.close(lse, exact_lse, peer_lse, "lse")
    return out


def test_lengths_of_all_kinds_in_one_batch(device, dtype):
    check(make(MIXED, device, dtype))


@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (4, 1), (6, 2), (8, 1), (40, 2)])
def test_grouped_queries_read_their_own_kv_head(device, dtype, num_heads, num_kv_heads):
    check(make([40, 3], device, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_every_head_dim(device, dtype, head_dim):
    check(make([150, 1, 0], device, dtype, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128, 48])
def test_every_block_size_also_one_that_is_no_power_of_two(device, dtype, block_size):
    check(make([block_size - 1, block_size, block_size + 1, 200], device, dtype, block_size=block_size))


@pytest.mark.parametrize("layout", ["joint", "heads first"])
def test_a_cache_in_another_layout_passes_as_a_view(device, layout):
    args = make(MIXED, device, torch.float16, layout=layout)
    assert not args[1].is_contiguous(), "the layout under test became contiguous on the way to the device"
    check(args)


def test_keys_and_values_may_be_laid_out_differently(device):
    q, k_cache, v_cache, *rest = make(MIXED, device, torch.float16)
    check((q, k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2), *rest))


def test_one_long_sequence_beside_short_ones_is_split_over_several_programs(device, monkeypatch):
    arrived = []
    monkeypatch.setattr(Workspace, "allocate", recording(Workspace.allocate, arrived))
    check(make([2000, 5, 9, 0, 30], device, torch.float16))
    (workspace,) = arrived
    assert workspace.part_lse.isfinite().any(), "no partial result was stored: the long sequence was not split"
    assert not workspace.arrivals.any(), "an arrival counter was not set back to zero"


def recording(allocate, made):
    def call(*args, **kwargs):
        workspace = allocate(*args, **kwargs)
        workspace.part_lse.fill_(float("nan"))
        made.append(workspace)
        return workspace

    return call


def test_a_kept_workspace_serves_calls_of_any_batch_and_length(device):
    workspace = Workspace.allocate(4, 2, 64, torch.float16, device)
    for seed, lens in enumerate([[700], MIXED, [1] * 9, [90, 800]]):
        check(make(lens, device, torch.float16, seed=seed), workspace=workspace)


def test_more_sequences_than_one_planning_tile_holds(device, monkeypatch):
    monkeypatch.setattr(module, "MAX_PLANNED", 8)
    check(make([3, 0, 70, 1, 130] * 4, device, torch.float16))


def test_no_sequence_at_all_gives_an_empty_output(device, dtype):
    q, k_cache, v_cache, _, _ = make([5], device, dtype)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert paged_attention(q[:0], k_cache, v_cache, none.view(0, 4), none).shape == (0, 4, 64)


def test_scores_too_large_for_exp_do_not_overflow(device):
    q, *rest = make([100, 300], device, torch.float32)
    check((q * 100, *rest))


def test_a_given_scale_replaces_the_default(device):
    check(make([100], device, torch.float16), scale=0.5)


def test_an_output_in_another_layout_is_written_in_place(device):
    args = make(MIXED, device, torch.float16)
    wide = torch.zeros(len(MIXED), 4, 128, dtype=torch.float16, device=device)
    assert paged_attention(*args, out=wide[:, :, 64:]).data_ptr() == wide[:, :, 64:].data_ptr()
    exact, _ = reference.paged_attention(*args)
    peer, _ = reference.paged_attention(*args, dtype=torch.float16)
    compare.close(wide[:, :, 64:], exact, peer)
    assert not wide[:, :, :64].any(), "memory beside the output was written"


@pytest.mark.parametrize(
    "name, change, error",
    [
        ("q", lambda a: a | {"q": a["q"][0]}, ValueError),
        ("q", lambda a: a | {"q": a["q"].double()}, TypeError),
        ("q", lambda a: a | {"q": [1.0]}, TypeError),
        ("q", lambda a: a | {"q": a["q"][:, :3]}, ValueError),
        ("q", lambda a: a | {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)}, ValueError),
        ("q: head_dim", lambda a: {k: v[..., :24] if v.ndim > 2 else v for k, v in a.items()}, ValueError),
        ("k_cache", lambda a: a | {"k_cache": a["k_cache"][..., :32]}, ValueError),
        ("k_cache", lambda a: a | {"k_cache": a["k_cache"].float()}, TypeError),
        ("v_cache", lambda a: a | {"v_cache": a["v_cache"][1:]}, ValueError),
        ("block_table", lambda a: a | {"block_table": a["block_table"].long()}, TypeError),
        ("block_table", lambda a: a | {"block_table": a["block_table"][1:]}, ValueError),
        ("seq_lens", lambda a: a | {"seq_lens": a["seq_lens"][:1]}, ValueError),
        ("seq_lens", lambda a: a | {"seq_lens": a["seq_lens"].float()}, TypeError),
        ("out", lambda a: a | {"out": a["q"].float()}, ValueError),
        ("lse", lambda a: a | {"lse": a["q"][:, :, 0]}, ValueError),
        ("workspace", lambda a: a | {"workspace": Workspace.allocate(8, 2, 64, torch.float16, "cpu")}, ValueError),
    ],
)
def test_a_bad_argument_is_named(device, name, change, error):
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    with pytest.raises(error, match=f"^{name}"):
        paged_attention(**change(dict(zip(names, make([20, 5], device, torch.float16), strict=True))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_a_captured_graph_follows_lengths_and_blocks_that_change():
    args = make([900, 40, 1, 0], "cuda", torch.bfloat16)
    other = make([0, 17, 333, 800], "cuda", torch.bfloat16, seed=1)
    width = max(args[3].shape[1], other[3].shape[1])
    args, other = ((*a[:3], torch.nn.functional.pad(a[3], (0, width - a[3].shape[1])), a[4]) for a in (args, other))
    pools = max(args[1].shape[0], other[1].shape[0])
    grown = [torch.zeros(pools, *args[1].shape[1:], dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    static = (args[0].clone(), *grown, args[3].clone(), args[4].clone())
    workspace = Workspace.allocate(4, 2, 64, torch.bfloat16, "cuda")
    paged_attention(*static, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*static, workspace=workspace)
    for inputs in (args, other, args):
        for held, new in zip(static, inputs, strict=True):
            held[: new.shape[0]].copy_(new)
        graph.replay()
        exact, _ = reference.paged_attention(*inputs)
        peer, _ = reference.paged_attention(*inputs, dtype=torch.bfloat16)
        compare.close(out, exact, peer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a cache of over 2**31 elements needs a GPU's memory")
def test_a_cache_beyond_32_bit_offsets_is_addressed_right():
    num_blocks = 2**31 // (16 * 8 * 128) + 64
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < (needed := 2 * num_blocks * 16 * 8 * 128 * 2 + 2**30):
        pytest.skip(f"{free / 1e9:.1f} GB of GPU memory are free, and the test needs {needed / 1e9:.1f} GB")
    caches = [torch.empty(num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
    last = torch.arange(num_blocks - 64, num_blocks, dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([1000], dtype=torch.int32, device="cuda")
    check((torch.randn(1, 32, 128, device="cuda").bfloat16(), *caches, last, lens))
