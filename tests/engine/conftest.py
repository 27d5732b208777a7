"""Engines over models that are made in the test: transformers' own tiny ones, and a much smaller one."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from labkit.engine import Engine, EngineConfig, ModelConfig, Weights, random_weights
from labkit.models import build_tiny
from labkit.models.tiny import FAMILIES

MINI = ModelConfig("qwen3", 97, 32, 48, 2, 4, 2, 16, 256, qk_norm=True, eos_token_ids=(96,))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices this small only lose to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model by its family."""
    root = tmp_path_factory.mktemp("tiny")
    return lambda name: build_tiny(root / name, name)


@pytest.fixture(scope="session")
def mini_weights() -> Weights:
    """Wide enough that no greedy token hangs on the last bit."""
    weights = random_weights(MINI, torch.float32, "cpu")
    layers = tuple(replace(x, **{k: v * 10 for k, v in vars(x).items() if v.ndim == 2}) for x in weights.layers)
    return replace(weights, embedding=weights.embedding * 20, layers=layers, head=weights.head * 20)


def moved(weights: Weights, device: str) -> Weights:
    """The weights on another device."""

    def there(x):
        return x if x is None else x.to(device)

    layers = tuple(replace(x, **{name: there(w) for name, w in vars(x).items()}) for x in weights.layers)
    return Weights(there(weights.embedding), layers, there(weights.norm), there(weights.head))


@pytest.fixture(scope="session")
def mini(mini_weights):
    """A function that makes an engine over the mini model. options: fields of EngineConfig.

    Our kernels run on the GPU where there is one, and then one step after another unless `overlap` is given.
    """

    def make(policy=None, **options) -> Engine:
        options = {"max_model_len": 64, "block_size": 4, **options}
        if options.get("kernels") != "triton" or not torch.cuda.is_available():
            return Engine(MINI, mini_weights, EngineConfig(**options), policy)
        options = {"device": "cuda", "overlap": False, **options}
        return Engine(MINI, moved(mini_weights, "cuda"), EngineConfig(**options), policy)

    return make


@pytest.fixture
def assert_whole():
    """A function that fails unless the engine's pool has all its blocks, and each has no owner."""

    def check(engine: Engine) -> None:
        pool = engine.blocks.pool
        owned = [b for b in range(pool.num_blocks) if pool.ref_count(b)]
        assert not owned and pool.num_free == pool.num_blocks, f"blocks {owned} still have an owner"
        assert engine.counters.blocks_used == 0 and engine.counters.wasted_slots == 0
        assert not engine.busy

    return check
