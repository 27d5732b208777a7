"""Run by a test with the Python of another environment: llm-compressor, AutoAWQ's maintained successor.

    python llm_compressor_child.py MODEL_FOLDER TOKENS.safetensors OUT_FOLDER

Writes a compressed-tensors checkpoint, AWQ, 4 bits in groups of 64, asymmetric. It wants other versions of transformers
and compressed-tensors than vLLM does, hence the environment of its own:

    python3 -m venv ENV && ENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    LLM_COMPRESSOR_PYTHON=ENV/bin/python pytest tests/quant/test_llm_compressor.py
"""

from __future__ import annotations

import sys


def main(folder: str, given: str, out: str) -> None:
    import llmcompressor.pipelines.cache as cache
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():  # it pins memory for a copy to the GPU, which fails where there is none
        cache.IntermediatesCache._pin_intermediate = lambda self, intermediate: None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = load_file(given)["tokens"]
    rows = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=64)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    oneshot(
        model=model,
        dataset=Dataset.from_dict(rows),
        recipe=[AWQModifier(), QuantizationModifier(ignore=["lm_head"], config_groups=groups)],
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
    )
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
