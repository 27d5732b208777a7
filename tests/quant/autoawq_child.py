"""Run by tests in a process of its own: AutoAWQ 0.2.9 itself, from the source release that lies beside this file.

    python autoawq_child.py SOURCE pack IN.safetensors OUT.safetensors
    python autoawq_child.py SOURCE quantize MODEL_FOLDER TOKENS.safetensors OUT_FOLDER stock|patched

The project is archived, and has no wheel: it is not installed, since that would build it and bring in the packages that
it needs to fetch data sets and to spread models over devices. Two of them are imported on the way to what runs here,
without being used, and are replaced by empty modules.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
import textwrap
import types
import warnings


def import_awq(source: str) -> None:
    """Put AutoAWQ on the path, after transformers has looked for the packages that are replaced."""
    import transformers  # noqa: F401
    from transformers.models.bloom import modeling_bloom  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    empty = {"accelerate": [], "accelerate.big_modeling": ["init_empty_weights", "load_checkpoint_and_dispatch"]}
    empty |= {"datasets": ["load_dataset"]}
    for name, attributes in empty.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for attribute in attributes:
            setattr(module, attribute, None)
        sys.modules[name] = module
    sys.path.insert(0, source)
    with warnings.catch_warnings():  # it turns DeprecationWarnings on for everybody
        warnings.simplefilter("ignore")
        import awq.modules.linear.gemm as gemm

    gemm.TRITON_AVAILABLE = False  # its Triton kernels need a GPU, and are chosen wherever Triton is


def pack(source: str, given: str, out: str) -> None:
    """given: weight [out, in] on its grid, scales and zeros [groups, out]. Writes what WQLinear_GEMM makes of them."""
    import torch
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import load_file, save_file

    tensors = load_file(given)
    weight, scales, zeros = tensors["weight"], tensors["scales"], tensors["zeros"]
    group_size = weight.shape[1] // len(scales)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    packed = WQLinear_GEMM.from_linear(linear, 4, group_size, scales=scales, zeros=zeros)
    named = {name: getattr(packed, name).contiguous() for name in ("qweight", "qzeros", "scales")}
    read = dequantize_gemm(named["qweight"], named["qzeros"], named["scales"], 4, group_size)
    save_file(named | {"dequantized": read.T.contiguous()}, out)


def patch() -> None:
    """Let the search restore weights from a copy. On a CPU, `.cpu()` gives the very tensor that is then changed."""
    import awq.quantize.quantizer as quantizer

    body = textwrap.dedent(inspect.getsource(quantizer.AwqQuantizer._compute_best_scale))
    if body.count("v.cpu() for") != 1:
        raise RuntimeError("AutoAWQ's _compute_best_scale is not the one that the patch is for")
    names = vars(quantizer)
    exec(body.replace("v.cpu() for", "v.detach().clone() for"), names)
    quantizer.AwqQuantizer._compute_best_scale = names["_compute_best_scale"]


def quantize(source: str, folder: str, given: str, out: str, version: str) -> None:
    """given: tokens, int64 [sequences, length]. Writes an AutoAWQ checkpoint, 4 bits in groups of 64."""
    import torch
    from awq.models.llama import LlamaAWQForCausalLM
    from awq.models.qwen3 import Qwen3AWQForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if version == "patched":
        patch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kinds = {"llama": LlamaAWQForCausalLM, "qwen3": Qwen3AWQForCausalLM}
    kind = model.config.model_type
    wrapped = kinds[kind](model, kind, False, model.config, None, None)
    tokens = load_file(given)["tokens"]
    wrapped.quantize(
        AutoTokenizer.from_pretrained(folder),
        quant_config={"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
        calib_data=tokens.tolist(),
        max_calib_samples=len(tokens),
        max_calib_seq_len=tokens.shape[1],
    )
    wrapped.save_quantized(out)


if __name__ == "__main__":
    source, command, *arguments = sys.argv[1:]
    import_awq(source)
    {"pack": pack, "quantize": quantize}[command](source, *arguments)
