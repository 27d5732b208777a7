"""Run by a test in a process of its own: what real vLLM says to the tokens of some prompts.

    python vllm_logprobs.py OUT.json CHECKPOINT ...

Writes, for each checkpoint, the linear method that vLLM chose for it and the log-probability of each token of each
prompt after its first, and of the whole vocabulary after the last. The prompts are those of `prompts`.
"""

from __future__ import annotations

import gc
import json
import os
import sys


def prompts(vocab_size: int) -> list[list[int]]:
    """Token ids that are the same here and in the test."""
    return [[5 + (i * 7 + j * 13) % (vocab_size - 5) for j in range(n)] for i, n in enumerate([40, 17, 33])]


def main(out: str, folders: list[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    said = {}
    for folder in folders:
        with open(f"{folder}/config.json", encoding="utf-8") as file:
            vocab_size = json.load(file)["vocab_size"]
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float16",
            max_model_len=128,
            max_num_seqs=4,
            max_logprobs=vocab_size,
            enforce_eager=True,
            kv_cache_memory_bytes=16 << 20,
        )
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, logprobs=vocab_size, detokenize=False)
        ids = prompts(vocab_size)
        outputs = llm.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker.worker.model_runner.model
        method = model.model.layers[0].self_attn.qkv_proj.quant_method
        said[folder] = {
            "method": type(method).__name__,
            "prompts": [
                [one[token].logprob for token, one in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
                for tokens, output in zip(ids, outputs, strict=True)
            ],
            "next": [[output.outputs[0].logprobs[0][t].logprob for t in range(vocab_size)] for output in outputs],
        }
        core.shutdown()
        del llm, core, model, method, outputs
        gc.collect()
        destroy_model_parallel()
        destroy_distributed_environment()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(said, file)


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
    main(sys.argv[1], sys.argv[2:])
