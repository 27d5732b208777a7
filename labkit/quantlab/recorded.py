"""What quantization did to SmolLM2, as it was measured and recorded in labkit/evidence."""

from __future__ import annotations

import json
from pathlib import Path

from labkit.texts import EVALUATION

FILE = Path(__file__).parents[1] / "evidence" / "quant_quality.cpu.json"


def recorded_unquantized() -> dict[str, float]:
    """Text that ships -> perplexity of the model that nobody quantized."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    found = {row["case"].rpartition(", ")[2]: row["peers"]["fp16"] for row in rows if ": perplexity, " in row["case"]}
    return {text: found[text] for text in EVALUATION}


def recorded_quality(measure: str = "perplexity") -> dict[str, dict[str, tuple[float, float, float]]]:
    """Case -> text that ships -> (value, low, high), the interval of 95 %.

    measure: "perplexity", "KL" or "top-1"; ValueError for another.
    """
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        case, _, rest = row["case"].rpartition(": ")
        named, _, text = rest.partition(", ")
        if named == measure and text in EVALUATION:
            found.setdefault(case, {})[text] = (row["ours"], *row["interval"])
    if not found:
        raise ValueError(f"measure must be one of perplexity, KL, top-1, and is {measure!r}")
    return found
