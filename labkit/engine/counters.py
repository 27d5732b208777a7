"""Everything the engine counts. Counts are exact and the same on every machine, which times are not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counts since the engine was made.

    steps: forward passes; graph_steps and eager_steps add up to them. prefill_tokens, decode_tokens: tokens computed
    in chunks of more than one or of a prompt, and one at a time after it. captures, replays: of graphs. launches: what
    the host submitted, a replay being one; counted in eager steps only if the engine's count_launches is on.
    padded_rows: rows that graphs computed for nobody. blocks_used, blocks_peak: owned now, and at most.
    wasted_slots: token slots now in owned blocks that hold no token. preemptions: requests that lost their blocks.
    prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there. discarded_tokens: chosen for
    requests that had ended meanwhile. finished, cancelled, failed: requests.
    """

    steps: int = 0
    graph_steps: int = 0
    eager_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    captures: int = 0
    replays: int = 0
    launches: int = 0
    padded_rows: int = 0
    blocks_used: int = 0
    blocks_peak: int = 0
    wasted_slots: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    discarded_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
