"""The checkpoint that lab 3's own solution lays out: the same as the library's, and served by real vLLM."""

import json
import math

import torch
from safetensors.torch import load_file

from grading.labrun import solution_cells
from labkit.cells import run_cell
from labkit.models import load_arithmetic, make_sums
from labkit.models.sums import PROMPT_LENGTH
from labkit.quant import Scheme, quantize_rtn, write_awq
from labkit.quantlab.experiments import write_checkpoint
from tests.quant.test_checkpoints import furthest, served

LAB = "lab3_int4_quantization"


def solved_layout():
    """awq_layout and pack_awq as the solution has them."""
    names: dict = {}
    exec("import torch\nfrom collections.abc import Callable", names)
    for cell in solution_cells(LAB):
        if cell.id in ("awq_order", "pack_awq", "awq_layout"):
            run_cell(cell.source, names, cell.id)
    return names["awq_layout"], names["pack_awq"]


def test_the_labs_checkpoint_is_the_librarys_and_vllm_serves_it(tmp_path):
    lab = write_checkpoint(*solved_layout()).folder
    model = load_arithmetic()
    made = quantize_rtn(model, Scheme(4, 128, scale_dtype=torch.float16))
    library = write_awq(model, made, tmp_path / "library")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (lab, library))
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    assert not different, f"the lab lays out other numbers in {different[0]}"
    settings = [json.loads((folder / "config.json").read_text()) for folder in (lab, library)]
    assert settings[0] == settings[1], "the two configurations differ"
    sums = make_sums(24, seed=10**9)
    [said] = served({lab: sums.tokens[:, :-1].tolist()}, tmp_path)
    assert "AWQ" in said["method"], "vLLM took the checkpoint for something else"
    off = furthest(said, model.half(), sums.tokens[:, :-1].tolist(), -3)
    assert off < 0.03, f"vLLM is {off:.3f} nat off the dequantized copy"
    answers = torch.tensor(said["prompts"])[:, PROMPT_LENGTH - 1 :]
    assert (answers > math.log(0.5)).all(1).float().mean() > 0.9, "vLLM's answers are wrong"
