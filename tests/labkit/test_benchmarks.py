import pytest
import torch

from labkit import benchmarks
from labkit.benchmarks import paged_attention, timing


def test_an_unknown_benchmark_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"no benchmark is called paged; there are: paged_attention"):
        benchmarks.run(["paged"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_gpu_nothing_is_measured_and_one_sentence_says_why():
    with pytest.raises(RuntimeError, match="no CUDA device") as error:
        benchmarks.run(["paged_attention"])
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="CUDA device"):
        timing.race({"a": [lambda: torch.zeros(1)]})


def test_every_case_has_a_name_of_its_own_and_counts_k_and_v_once():
    cases = [*paged_attention.grid(), *paged_attention.others()]
    assert len({case.name for case in cases}) == len(cases)
    assert paged_attention.Case("x", (3, 5), 8, 2, 64).kv_bytes == 2 * 8 * 2 * 64 * 2


def test_the_grid_is_every_batch_with_every_context():
    shapes = [(len(case.lens), case.lens[0]) for case in paged_attention.grid()]
    assert len(shapes) == len(set(shapes)) == 81
    assert (1, 512) in shapes and (256, 131072) in shapes
