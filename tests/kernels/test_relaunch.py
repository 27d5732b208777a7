"""Relaunching a compiled kernel, with a stand-in for Triton's compiler; real kernels relaunch on a GPU."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kernels.relaunch import relaunch


class Compiled:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class StandIn(triton.JITFunction):
    """Takes (x, n, free, SIZE); n is specialized, free is not."""

    def __init__(self):
        self.compiled, self.relaunched = [], []
        self.given = [SimpleNamespace(is_constexpr=c, do_not_specialize=f) for c, f in ((0, 0), (0, 0), (0, 1), (1, 0))]

    @property
    def params(self):
        return self.given

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return Compiled(self.relaunched)

        return launch


@pytest.fixture
def kernel():
    return StandIn()


def test_the_second_launch_calls_what_the_first_compiled_with_its_own_arguments(kernel):
    x, y = torch.zeros(4), torch.zeros(4)
    relaunch(kernel, (2, 1, 1), (x, 3, 5), (64,), num_warps=4)
    relaunch(kernel, (7, 1, 1), (y, 3, 6), (64,), num_warps=4)
    assert kernel.compiled == [((2, 1, 1), (x, 3, 5, 64), {"num_warps": 4})]
    assert len(kernel.relaunched) == 1 and kernel.relaunched[0][0] == (7, 1, 1)
    assert kernel.relaunched[0][1][0] is y and kernel.relaunched[0][1][1:] == (3, 6, 64)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(5)[1:]},  # not at a multiple of 16 bytes
        {"x": torch.zeros(4, dtype=torch.float16)},
        {"x": None},
        {"n": 16},
        {"n": 1},
        {"size": 128},
        {"num_warps": 8},
    ],
    ids=["alignment", "dtype", "no tensor", "divisible", "one", "constexpr", "option"],
)
def test_whatever_triton_specializes_on_is_compiled_anew(kernel, changed):
    plain = {"x": torch.zeros(4), "n": 3, "size": 64, "num_warps": 4}
    for given in (plain, plain | changed):
        arguments = (given["x"], given["n"], torch.zeros(1))
        relaunch(kernel, (1, 1, 1), arguments, (given["size"],), num_warps=given["num_warps"])
    assert len(kernel.compiled) == 2 and not kernel.relaunched


def test_in_the_interpreter_it_launches():
    @triton.jit
    def double(x_ptr, out_ptr, n, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    x, out = torch.arange(5.0), torch.zeros(5)
    for _ in range(2):
        relaunch(double, (1, 1, 1), (x, out, 4), (8,), num_warps=1)
    assert out.tolist() == [0, 2, 4, 6, 0]
