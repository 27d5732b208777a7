"""Right answers of lab 3 in another style than the solution's, through the hidden checks too."""

from __future__ import annotations

from grading import labrun

LAB = "lab3_int4_quantization"
IN_FP64 = """
def affine_quantize(x, bits, symmetric=False):
    top, rows = 2**bits - 1, x.reshape(-1, x.shape[-1]).numpy().astype(np.float64)
    codes, scales, zeros = np.zeros(rows.shape, np.uint8), [], []
    for i, row in enumerate(rows):
        low, high = min(row.min(), 0), max(row.max(), 0)
        scale = max(-low, high) / (top / 2) if symmetric else (high - low) / top
        scale = scale if scale > 0 else 1.0
        zero = 2 ** (bits - 1) if symmetric else int(np.round(-low / scale))
        codes[i] = np.clip(np.round(row / scale) + zero, 0, top)
        scales.append(scale), zeros.append(zero)
    grids = (torch.tensor(made).reshape(x.shape[:-1]) for made in (scales, zeros))
    return torch.from_numpy(codes).reshape(x.shape), next(grids).float(), next(grids).to(torch.uint8)
"""
BY_THE_RECIPROCAL = """
def quantize_weight(weight, bits, group_size, symmetric=False):
    rows, n = weight.shape
    if group_size > 0 and n % group_size:
        raise ValueError(f"{group_size} does not divide {n}")
    groups = weight.reshape((1, 1, -1) if group_size == 0 else (rows, -1, n if group_size < 0 else group_size))
    top = 2**bits - 1
    _, scales, zeros = given.affine_quantize(groups, bits, symmetric)
    codes = ((groups * (1 / scales)[..., None]).round() + zeros[..., None]).clamp(0, top)
    return codes.to(torch.uint8).reshape(rows, n), scales, zeros
"""


def test_codes_half_way_between_two_steps_may_be_either():
    answers = {"affine_quantize": IN_FP64, "quantize_weight": BY_THE_RECIPROCAL}
    cells = labrun.with_sources(labrun.solution_cells(LAB), {name: text.strip() for name, text in answers.items()})
    for question, grade in labrun.grade(cells, list(answers)).items():
        assert grade.earned == grade.possible, f"{question}: a right answer is refused:\n{grade.said}"
