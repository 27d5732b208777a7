"""Run by a test in a process of its own: what real vLLM says to the tokens of some prompts.

    python vllm_logprobs.py GIVEN.json OUT.json

given: for each checkpoint folder, its prompts, lists of token ids. Writes for each folder the linear method that vLLM
chose and, for each prompt, the log-probability of each token after its first, and after the last of all tokens.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def main(given: dict[str, list[list[int]]]) -> dict[str, dict]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    said = {}
    for folder, prompts in given.items():
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        vocab_size = config["vocab_size"]
        llm = LLM(
            model=folder,
            dtype="float16",
            max_model_len=min(128, config["max_position_embeddings"]),
            max_num_seqs=4,
            max_logprobs=vocab_size,
            enforce_eager=True,
            kv_cache_memory_bytes=16 << 20,
        )
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, logprobs=vocab_size, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker.worker.model_runner.model
        method = model.model.layers[0].self_attn.qkv_proj.quant_method
        said[folder] = {
            "method": type(method).__name__,
            "prompts": [
                [one[token].logprob for token, one in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
                for tokens, output in zip(prompts, outputs, strict=True)
            ],
            "next": [[output.outputs[0].logprobs[0][t].logprob for t in range(vocab_size)] for output in outputs],
        }
        core.shutdown()
        del llm, core, model, method, outputs
        gc.collect()
        destroy_model_parallel()
        destroy_distributed_environment()
    return said


if __name__ == "__main__":
    # Before vllm is imported. In one process, with one thread: 20 s less to start, and no spinning for two cores.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_INT4_W4A8": "0",  # else a CPU with AMX rounds activations to int8 too, without a word
    }
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(main(asked)), encoding="utf-8")
