"""Train the arithmetic model anew: `python -m labkit.models.train_arithmetic [FOLDER]`, under 5 minutes on one core.

Writes arithmetic.safetensors (fp16, 3 MB) and arithmetic.json (checksum, recipe, score) to FOLDER, by default the one
that ships. The seed fixes data and start, and one thread the order of sums: on one machine the file comes out the same.
Another processor may round in another order and so give another checksum; the score is then what to look at.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from labkit.models.arithmetic import DATA, new_arithmetic
from labkit.models.sums import ANSWER_LENGTH, PROMPT_LENGTH, exact_match, make_sums

STEPS, BATCH, WARM_UP, PEAK_RATE, SEED = 1300, 128, 120, 2e-3, 0
HELD_OUT, HELD_OUT_SEED = 10_000, 10**9  # no training batch has this seed: those are 0 to STEPS - 1


@contextmanager
def one_thread() -> Iterator[None]:
    """One order of summation; the matrices are too small for more threads to pay."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(steps: int = STEPS, batch: int = BATCH, progress: bool = True) -> torch.nn.Module:
    """A trained model in fp32. Only the answer's digits and the newline count; the exercise itself is noise."""
    model = new_arithmetic(SEED).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    bar = tqdm(range(steps), desc="training", mininterval=1, disable=not progress)
    with one_thread():
        for step in bar:
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * cosine)
            tokens = make_sums(batch, seed=step).tokens
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_LENGTH:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0:
                bar.set_postfix(loss=f"{loss.item():.4f}")
    return model.eval()


def main(folder: Path) -> None:
    """Train, measure what the fp16 weights score on exercises drawn anew, and write both files."""
    from safetensors.torch import save_file

    start, start_cpu = time.perf_counter(), time.process_time()
    model = train()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    weights = {name: weight.half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    right = exact_match(model, make_sums(HELD_OUT, HELD_OUT_SEED))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "arithmetic.safetensors"
    save_file(weights, path)
    made = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "exact_match": right.float().mean().item(),
        "held_out": HELD_OUT,
        "held_out_seed": HELD_OUT_SEED,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": STEPS,
        "tokens": STEPS * BATCH * (PROMPT_LENGTH + ANSWER_LENGTH + 1),
        "seconds": round(seconds),
        "cpu_seconds": round(cpu_seconds),
        "torch": torch.__version__,
    }
    (folder / "arithmetic.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
