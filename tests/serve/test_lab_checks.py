"""What lab 5's checks take for right is what vLLM does, and what our own code finds."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from labkit.checks.lab5_vllm_serving import graphs as checks
from labkit.serve import graphs


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its dispatcher cannot be asked")
@pytest.mark.parametrize("mode", checks.MODES)
def test_the_dispatcher_that_the_check_expects_is_vllms(mode):
    for sizes in ([1, 2, 4, 8, 16], [1, 3, 6, 24], [5]):
        for max_num_seqs in (5, 6, 16, 40):
            real = graphs.Dispatcher(mode, sizes, max_num_seqs=max_num_seqs)
            for tokens in range(1, 28):
                for decode in (True, False):
                    want = real.dispatch(tokens, decode=decode)
                    got = checks.expected(mode, sizes, max_num_seqs, tokens, decode)
                    assert got == (want.mode, want.padded), (sizes, max_num_seqs, tokens, decode)


def test_the_fewest_rows_of_the_check_are_those_of_the_shipped_fitter():
    rng = random.Random(9)
    for _ in range(10):
        steps = {batch: rng.randint(1, 50) for batch in rng.sample(range(1, 128), 30)}
        for most in (1, 4, 9, 30):
            sizes = graphs.fit(steps, graphs.Budget(most)).sizes
            assert checks.rows_computed(steps, list(sizes)) == checks.best_rows(steps, most)
