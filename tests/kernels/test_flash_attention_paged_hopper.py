"""Hopper's paged kernel: its arithmetic of the last block in Python, and on a Hopper GPU its results."""

import pytest
import torch

from kernels import flash_attention_paged_hopper as hopper
from kernels.flash_attention_paged import paged_prefill
from tests.kernels.test_flash_attention_hopper import on_hopper
from tests.kernels.test_flash_attention_paged import check, make


@pytest.mark.parametrize("block_size, box", [(8, 8), (16, 16), (128, 128), (256, 128), (256, 64)])
def test_every_key_of_a_tile_has_one_column_and_the_rest_are_zeros_that_the_mask_hides(block_size, box):
    """As `_load_blocks` places its boxes, and as `softmax` turns columns into keys with `tail`."""
    block_n = 128
    for seq_len in range(1, 2 * block_size + 10):
        tail = (seq_len - 1) // box * box
        shift = tail + box - seq_len
        for first in range(0, seq_len, block_n):
            columns = []  # what lies where: a key, or None for zeros
            for key in range(first, first + block_n, box):
                start = key % block_size + min(max(seq_len - key, 0) - box, 0)
                block = key // block_size if key < seq_len else None
                slots = range(start, start + box)
                columns += [block * block_size + s if block is not None and s >= 0 else None for s in slots]
            said = [first + c if first + c < tail else first + c - shift for c in range(block_n)]
            seen = [k for c, k in enumerate(said) if k < seq_len and not (first + c >= tail and k < tail)]
            assert seen == list(range(first, min(first + block_n, seq_len))), f"length {seq_len}: keys {seen}"
            for c, k in enumerate(said):
                live = k < seq_len and not (first + c >= tail and k < tail)
                assert not live or columns[c] == k, f"length {seq_len}: column {c} has {columns[c]}, the mask says {k}"
                stale = columns[c] is not None and columns[c] >= seq_len
                assert not stale, f"length {seq_len}: column {c} holds slot {columns[c]}, which no token has written"


def test_no_gpu_is_a_reason_and_a_demand_for_it_is_refused(device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    args = make([30, 7], [60, 7], device, torch.float16)
    assert "Hopper" in hopper.unsupported(*args[:3])
    with pytest.raises(ValueError, match=r"variant: 'hopper' cannot run here: it needs a Hopper GPU"):
        paged_prefill(*args, variant="hopper")
    with pytest.raises(ValueError, match=r"variant: expected \"tl\", \"hopper\" or None, got 'fast'"):
        paged_prefill(*args, variant="fast")


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_decode_steps_and_an_empty_chunk_in_one_batch(device, dtype, head_dim):
    args = make([1, 300, 0, 17, 1, 129], [2000, 1300, 40, 17, 1, 1000], device, dtype, 8, 2, head_dim)
    check(args, variant="hopper")


@on_hopper
@pytest.mark.parametrize("block_size", [8, 32, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 8, 16])
def test_every_block_size_and_group(device, block_size, group):
    args = make([200, 5, 64], [900, 200, 64], device, torch.bfloat16, 2 * group, 2, 128, block_size, joint=group == 2)
    check(args, variant="hopper")


@on_hopper
def test_what_it_cannot_do_is_said(device):
    for args, reason in (
        (make([30], [60], device, torch.float16, 6, 2), "query heads to a KV head, not 3"),
        (make([30], [60], device, torch.float16, block_size=48), "powers of two from 8 on, not 48"),
        (make([30], [60], device, torch.float32), "not float32"),
    ):
        with pytest.raises(ValueError, match=reason):
            paged_prefill(*args, variant="hopper")
