"""vLLM in the engine benchmark, in a process of its own.

python -m labkit.benchmarks.engine_vllm FOLDER CASE EAGER ROUNDS
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main(folder: str, name: str, eager: bool, rounds: int) -> None:
    """Print {batch: measured} as the last line; {} where vLLM is not installed."""
    os.environ.update(QUIET)
    try:
        import vllm
        from vllm.inputs import TokensPrompt
    except ImportError:
        print("{}")
        return
    from labkit.benchmarks import engine as benchmark

    shape, batches = benchmark.CASES[name]
    options: dict[str, Any] = {} if eager else {"compilation_config": {"cudagraph_capture_sizes": list(batches)}}
    llm = vllm.LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=eager,
        enable_prefix_caching=False, max_model_len=benchmark.LENGTH, max_num_seqs=max(batches),
        max_num_batched_tokens=benchmark.BUDGET, block_size=benchmark.BLOCK,
        num_gpu_blocks_override=benchmark.num_blocks(batches), **options,
    )  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int) -> None:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        assert all(len(request.outputs[0].token_ids) == tokens for request in made), "vLLM ended a request early"

    found = {b: benchmark.measure(generate, b, shape.vocab_size, rounds) for b in batches}
    print(json.dumps({batch: dataclasses.asdict(m) for batch, m in found.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
