import pytest
import torch

from kernels import reference
from kernels.kv_cache import write_kv
from labkit.checks import compare


def make(device, dtype, slots, num_kv_heads=3, head_dim=64, num_blocks=5, block_size=8):
    k, v = torch.randn(2, len(slots), num_kv_heads, head_dim, device=device).to(dtype)
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, device=device).to(dtype)
    return k, v, *caches, torch.tensor(slots, dtype=torch.int64, device=device)


def check(k, v, k_cache, v_cache, slots):
    want_k, want_v = k_cache.clone(), v_cache.clone()
    reference.write_kv(k, v, want_k, want_v, slots)
    write_kv(k, v, k_cache, v_cache, slots)
    compare.equal(k_cache, want_k, "k_cache")
    compare.equal(v_cache, want_v, "v_cache")


def test_tokens_go_to_their_slots_and_nothing_else_changes(device, dtype):
    check(*make(device, dtype, [0, 7, 8, 39, 20]))


def test_a_negative_slot_is_skipped_and_memory_before_the_cache_is_left_alone(device, dtype):
    k, v, k_cache, v_cache, slots = make(device, dtype, [-1, 12, -1, 3])
    before = k_cache[0].clone()
    check(k, v, k_cache[1:], v_cache[1:], slots)
    compare.equal(k_cache[0], before, "the block before the cache")


@pytest.mark.parametrize("head_dim, block_size", [(80, 8), (128, 48), (256, 1)])
def test_any_head_dim_and_block_size(device, head_dim, block_size):
    check(*make(device, torch.float16, [4, 2], head_dim=head_dim, block_size=block_size))


def test_slots_may_be_32_bit(device):
    *rest, slots = make(device, torch.float16, [5, 6])
    check(*rest, slots.int())


def test_strided_tokens_and_a_joint_cache_pass_as_views(device):
    qkv = torch.randn(4, 5, 64, device=device).half()
    k, v = qkv[:, 1:3], qkv[:, 3:5]
    joint = torch.zeros(6, 2, 16, 2, 64, device=device).half()
    check(k, v, joint[:, 0], joint[:, 1], torch.tensor([0, 95, 16, 33], device=device))


def test_no_token_writes_nothing(device):
    check(*make(device, torch.float16, []))


@pytest.mark.parametrize(
    "name, change, error",
    [
        ("k", lambda a: a | {"k": a["k"][0]}, ValueError),
        ("k", lambda a: a | {"k": a["k"].long()}, TypeError),
        ("v", lambda a: a | {"v": a["v"][:1]}, ValueError),
        ("v", lambda a: a | {"v": a["v"].float()}, TypeError),
        ("v", lambda a: a | {"v": a["v"].transpose(1, 2).contiguous().transpose(1, 2)}, ValueError),
        ("k_cache", lambda a: a | {"k_cache": a["k_cache"].float()}, TypeError),
        ("k_cache", lambda a: a | {n: a[n][:, :, :2] for n in ("k_cache", "v_cache")}, ValueError),
        ("v_cache", lambda a: a | {"v_cache": a["v_cache"][:, :4]}, ValueError),
        ("slot_mapping", lambda a: a | {"slot_mapping": a["slot_mapping"][:1]}, ValueError),
        ("slot_mapping", lambda a: a | {"slot_mapping": a["slot_mapping"].float()}, TypeError),
    ],
)
def test_a_bad_argument_is_named(device, name, change, error):
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
    with pytest.raises(error, match=f"^{name}: "):
        write_kv(**change(dict(zip(names, make(device, torch.float16, [3, 4]), strict=True))))
