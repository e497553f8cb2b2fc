"""What a running rollout counts, once for all who show it: `client.stats()`, Ray's metrics, TensorBoard, W&B.

Names end in their unit. A `_total` only grows while its engine lives; the others say how it is now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Figures = dict[str, float]


class Figure(NamedTuple):
    """A name and what it counts."""

    name: str
    text: str

    @property
    def grows(self) -> bool:
        """Whether it is a counter; the others are gauges."""
        return self.name.endswith("_total")


ENGINE = (
    Figure("engines", "engines that answered; a group of ranks is one"),
    Figure("requests_waiting", "requests that wait for a place in the batch"),
    Figure("requests_running", "requests that are computed"),
    Figure("requests_ended_total", "requests that ended, for whatever reason"),
    Figure("steps_total", "forwards"),
    Figure("tokens_computed_total", "tokens that went through a forward, prompts' too"),
    Figure("tokens_sampled_total", "completion tokens"),
    Figure("tokens_cached_total", "prompt tokens taken from the prefix cache"),
    Figure("tokens_dropped_total", "tokens sampled for requests that had just stopped"),
    Figure("preemptions_total", "requests that gave up their slots and were computed again"),
    Figure("step_seconds_total", "time in which at least one step was under way"),
    Figure("wait_seconds_total", "time in which the host waited for a step's results"),
    Figure("schedule_seconds_total", "host time in choosing the next batch"),
    Figure("prepare_seconds_total", "host time in making a step's inputs"),
    Figure("model_seconds_total", "time in the model, with its hooks; on an accelerator that of queueing it"),
    Figure("sample_seconds_total", "time in sampling; on an accelerator that of queueing it"),
    Figure("capture_seconds_total", "host time in the routers' hooks and the snapshot of their rows"),
    Figure("finalize_seconds_total", "host time in handing rows and logprobs to their requests"),
    Figure("deliver_seconds_total", "host time in appending tokens, looking for stops, and ending requests"),
    Figure("kv_slots", "token slots of the key/value pool"),
    Figure("kv_slots_used", "slots that requests and the prefix cache hold"),
    Figure("kv_used_ratio", "kv_slots_used / kv_slots"),
    Figure("missing_route_rows_total", "rows of ended requests that were not recorded"),
    Figure("weight_version", "version of the weights that sample now; of several engines the lowest"),
)
CLIENT = (
    Figure("samples_resubmitted_total", "samples given to another engine because theirs died"),
    Figure("encode_seconds_total", "time in handing traces to the recorder, which encodes them or sends them away"),
    Figure("commits_total", "steps that were committed"),
    Figure("commit_seconds_total", "time from asking for a commit until it was durable"),
    Figure("commit_seconds", "the same of the last one"),
    Figure("last_step", "the step that ended last"),
)


def merge(engines: Iterable[Mapping[str, float]]) -> Figures:
    """Figures of several engines as if they were one: sums, but for the ratio and the weight version.

    >>> merge([{"steps_total": 4, "weight_version": 2}, {"steps_total": 6, "weight_version": 1}])
    {'steps_total': 10, 'weight_version': 1}
    """
    found = list(engines)
    merged: Figures = {}
    for name in (figure.name for figure in ENGINE):
        values = [figures[name] for figures in found if name in figures]
        if values:
            merged[name] = min(values) if name == "weight_version" else sum(values)
    if "kv_used_ratio" in merged:
        merged["kv_used_ratio"] = merged["kv_slots_used"] / max(merged["kv_slots"], 1)
    return merged
