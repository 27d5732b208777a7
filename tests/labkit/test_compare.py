"""The derived tolerance, and what a wrong answer is told."""

import math

import numpy as np
import pytest
import torch

from labkit.checks import Failed
from labkit.checks.compare import allowed_error, close, equal, poison, unit_in_last_place


def references(dtype=torch.float16, shape=(3, 5)):
    exact = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact, exact.to(dtype)


def test_the_same_precision_reference_itself_passes_with_a_ratio_below_one():
    exact, peer = references()
    assert 0 < close(peer, exact, peer) < 1


def test_the_allowed_error_is_twice_the_references_plus_one_unit():
    exact, peer = torch.tensor([1.0, 4.0]).double(), torch.tensor([1.125, 4.0]).half()
    assert allowed_error(exact, peer, torch.float16) == 2 * 0.125 + 4 * 2**-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_unit_in_the_last_place_is_the_step_to_the_next_number(dtype):
    for value in (1.0, 0.9, 3.7, 1000.0):
        at = torch.tensor(value, dtype=dtype)
        following = torch.nextafter(at, torch.tensor(math.inf, dtype=dtype))
        assert unit_in_last_place(at.item(), dtype) == (following.double() - at.double()).item()


def test_an_error_just_above_what_is_allowed_fails_and_one_just_below_passes():
    exact = torch.zeros(4, dtype=torch.float64)
    exact[0] = 1.0
    peer = exact.float() + torch.tensor([0.0, 0.25, 0.0, 0.0])
    allowed = allowed_error(exact, peer, torch.float32)
    for factor in (0.99, 1.01):
        wrong = exact.float() + torch.tensor([0.0, 0.0, factor * allowed, 0.0])
        if factor < 1:
            assert close(wrong, exact, peer) == pytest.approx(0.99)
        else:
            with pytest.raises(Failed, match=r"o\[2\] is 0.505, 0 was expected; .* 1.01 times what is allowed"):
                close(wrong, exact, peer)


def test_the_message_says_what_to_look_at_where_and_by_how_much():
    exact, peer = references()
    wrong = peer.clone()
    wrong[1, 2], wrong[2, 0] = 7.0, 9.0
    with pytest.raises(Failed) as failed:
        close(wrong, exact, peer, what="lse", look_at="look at the rescaling")
    message = str(failed.value)
    assert message.startswith("look at the rescaling: lse[1, 2] is 7, "), message
    assert "2 of 15 elements" in message, message
    assert "\n" not in message, message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_element_that_was_never_written_is_found_by_its_poison(dtype):
    exact, peer = references(dtype)
    out = poison(torch.empty_like(peer))
    out[:, :3] = peer[:, :3]
    with pytest.raises(Failed, match=r"o\[0, 3\] was never written, 6 of 15 elements"):
        close(out, exact, peer)


def test_poison_fills_a_strided_view_and_leaves_its_neighbours_alone():
    whole = torch.zeros(4, 6)
    poison(whole[:, ::2])
    assert whole[:, ::2].isnan().all()
    assert (whole[:, 1::2] == 0).all()
    assert (poison(torch.zeros(3, dtype=torch.int32)) == -(2**31)).all()
    with pytest.raises(TypeError, match="bool"):
        poison(torch.zeros(2, dtype=torch.bool))


def test_a_computed_nan_is_not_taken_for_poison():
    exact, peer = references()
    wrong = peer.clone()
    wrong[0, 1] = math.nan
    with pytest.raises(Failed, match=r"o\[0, 1\] is NaN, 1 of 15 elements: look for 0/0"):
        close(wrong, exact, peer)


def test_infinities_must_stand_where_the_oracle_has_them():
    exact, peer = references()
    exact[0, 0] = peer[0, 0] = -math.inf
    assert close(peer, exact, peer) < 1
    for at, value in (((0, 0), 5.0), ((0, 1), math.inf), ((0, 0), math.inf)):
        wrong = peer.clone()
        wrong[at] = value
        with pytest.raises(Failed, match=rf"o\[{at[0]}, {at[1]}\] is {value:g}"):
            close(wrong, exact, peer)
    exact[1, 1] = peer[1, 1] = math.nan
    assert close(peer, exact, peer) < 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "o is of type NoneType, a tensor was expected"),
        (torch.zeros(3, 4).half(), r"o has shape \(3, 4\), \(3, 5\) was expected"),
        (torch.zeros(3, 5), "o has dtype float32, float16 was expected"),
    ],
)
def test_what_is_no_array_or_has_another_shape_or_dtype_is_named(answer, message):
    exact, peer = references()
    with pytest.raises(Failed, match=message):
        close(answer, exact, peer)


def test_numpy_arrays_and_empty_results_are_compared_too():
    exact, peer = references(torch.float32)
    assert close(peer.numpy(), exact.numpy(), peer.numpy()) < 1
    with pytest.raises(Failed, match=r"o\[0, 0\]"):
        close(np.full((3, 5), 9.0, np.float32), exact.numpy(), peer)
    assert close(np.array(1.0, np.float32), np.array(1.0), torch.tensor(1.0)) == 0.0
    empty = torch.empty(0, 8)
    assert close(empty, empty.double(), empty) == 0.0


def test_integers_are_compared_exactly_or_within_a_declared_step():
    want = torch.tensor([1, 2, 3], dtype=torch.int32)
    equal(want.clone(), want)
    equal(want + 1, want, within=1)
    with pytest.raises(Failed, match=r"the slots: slot\[0\] is 2, 1 was expected; 3 of 3 elements"):
        equal(want + 1, want, what="slot", look_at="the slots")
    with pytest.raises(TypeError, match="use equal"):
        close(want, want, want)


def test_a_reference_of_another_shape_is_the_authors_error():
    exact, peer = references()
    with pytest.raises(ValueError, match="oracle has shape"):
        close(peer, exact[:2], peer)
