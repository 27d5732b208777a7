import pytest
import torch

from kernels import reference
from kernels.flash_attention_paged import paged_prefill
from labkit.checks import compare


def make(chunks, lens, device, dtype, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seed=0, joint=False):
    """Random inputs whose blocks are scattered; unused table entries and unused slots hold what must not be read."""
    random = torch.Generator().manual_seed(seed)
    used = [-(-n // block_size) for n in lens]
    num_blocks = sum(used) + 2
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=random)
    block_table = torch.full((len(lens), max([*used, 1]) + 1), 2**30, dtype=torch.int32)
    scattered = iter(torch.randperm(num_blocks, generator=random).tolist())
    for s, count in enumerate(used):
        block_table[s, :count] = torch.tensor([next(scattered) for _ in range(count)], dtype=torch.int32)
        if lens[s] % block_size:
            caches[:, block_table[s, count - 1], lens[s] % block_size :] = float("nan")
    q = torch.randn(sum(chunks), num_heads, head_dim, generator=random).to(device, dtype)
    caches = caches.to(device, dtype)
    k_cache, v_cache = caches.transpose(0, 1).contiguous().unbind(1) if joint else caches.unbind(0)
    ends = torch.tensor([0, *chunks]).cumsum(0).to(device, torch.int32)
    return q, k_cache, v_cache, block_table.to(device), torch.tensor(lens, dtype=torch.int32, device=device), ends


def check(args, variant=None, **options):
    q = args[0]
    out = compare.poison(torch.empty_like(q))
    lse = compare.poison(torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device))
    assert paged_prefill(*args, out=out, lse=lse, variant=variant, **options) is out
    exact, exact_lse = reference.paged_prefill(*args, **options)
    peer, _ = reference.paged_prefill(*args, dtype=q.dtype, **options)
    if q.dtype == torch.float32 and q.is_cuda:
        # PTX's ex2.approx, which exp2 compiles to, is right to 2**-22 only: more than all of a torch reference's error.
        peer = exact.float() + 2**-22 * args[2].nan_to_num().abs().max()
    compare.close(out, exact, peer, "out")
    _, peer_lse = reference.paged_prefill(*args, dtype=torch.float32, **options)
    compare.close(lse, exact_lse, peer_lse + 2**-22, "lse")  # to base 2 and back


def test_whole_prompts(device, dtype):
    check(make([40, 1, 150], [40, 1, 150], device, dtype))


def test_chunks_after_a_cached_prefix_and_decode_steps_in_one_batch(device, dtype):
    check(make([1, 30, 0, 17, 1], [200, 130, 40, 17, 1], device, dtype))


@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (4, 1), (6, 2), (5, 1)])
def test_grouped_queries_read_their_own_kv_head(device, num_heads, num_kv_heads):
    check(make([20, 3], [50, 3], device, torch.float16, num_heads, num_kv_heads))


@pytest.mark.parametrize("block_size", [1, 8, 48, 64, 128])
def test_every_block_size_also_one_that_is_no_power_of_two(device, block_size):
    check(make([70, 5], [130, 200], device, torch.float16, 2, 1, block_size=block_size))


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_every_head_dim(device, head_dim):
    check(make([70, 1], [100, 90], device, torch.float16, 1, 1, head_dim))


def test_a_joint_cache_passes_as_a_view(device):
    check(make([30, 7], [60, 7], device, torch.float16, joint=True))


def test_the_scale_is_used(device):
    check(make([30], [60], device, torch.float16), scale=0.3)


def test_no_tokens_at_all(device):
    args = make([0, 0], [5, 9], device, torch.float16)
    assert paged_prefill(*args).shape == (0, 4, 64)


WRONG = {
    "q": (0, lambda x: x[0], r"q: expected \[num_tokens, num_heads, head_dim\]"),
    "heads": (0, lambda x: x[:, :3], r"q: num_heads \(3\) must be a multiple"),
    "head_dim": (0, lambda x: x[..., :48], "q: head_dim must be a power of two"),
    "cache": (2, lambda x: x[:-1], "v_cache: .* differs from k_cache"),
    "table": (3, lambda x: x[:1], "block_table: expected"),
    "seq_lens": (4, lambda x: x[None], "seq_lens: expected"),
    "cu_seqlens_q": (5, lambda x: x[1:], "cu_seqlens_q: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_before_anything_runs(device, name):
    place, spoil, message = WRONG[name]
    args = list(make([30, 7], [60, 7], device, torch.float16))
    args[place] = spoil(args[place])
    with pytest.raises(ValueError, match=message):
        paged_prefill(*args)
