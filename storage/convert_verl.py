"""verl: one padded batch, prompts left-padded, responses right-padded, ids int16 `[bs, S, L, K]`, zeros at padding.

The trainer derives where to replay from the attention mask: every token but the last of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from storage.convert_routes import (
    Routes,
    collapse_layers,
    complete_rows,
    expand_layers,
    fitting_dtype,
    refuse_zero_rows,
)
from storage.trace import RoutingSpec, Trace


def to_verl(
    traces: Sequence[Trace], spec: RoutingSpec, *, num_layers: int | None, pad_token_id: int = 0
) -> dict[str, np.ndarray]:
    """Arrays under verl's names, for P and R the longest prompt and response and S = P + R.

    prompts int64 `[bs, P]`, responses and response_mask int64 `[bs, R]`, rollout_log_probs float32 `[bs, R]`,
    input_ids, attention_mask and position_ids int64 `[bs, S]`, routed_experts int16 `[bs, S, L, K]`, and
    replay_mask bool `[bs, S]`. verl counts all decoder layers: give `num_layers`, or None for a MoE-only axis.

    Raises:
        ValueError: no traces, missing rows, ids beyond int16, or a layer beyond num_layers.
    """
    dtype = fitting_dtype(spec, ["int16"], target="verl")
    if not traces:
        raise ValueError("cannot export an empty list of traces")
    prompt, response = (
        max(map(len, part)) for part in zip(*((t.prompt_ids, t.completion_ids) for t in traces), strict=True)
    )
    shape = len(traces), prompt + response
    ids = np.full(shape, pad_token_id, np.int64)
    attention, replay = np.zeros(shape, np.int64), np.zeros(shape, bool)
    logprobs = np.zeros((len(traces), response), np.float32)
    routes = np.zeros((*shape, *spec.row_shape), dtype)
    for row, trace in enumerate(traces):
        tokens = slice(prompt - len(trace.prompt_ids), prompt + len(trace.completion_ids))
        routed = slice(tokens.start, tokens.stop - 1)
        ids[row, tokens] = trace.token_ids
        attention[row, tokens] = 1
        logprobs[row, : len(trace.completion_ids)] = trace.logprobs
        routes[row, routed] = complete_rows(trace, spec, target="verl")
        replay[row, routed] = True
    return {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": attention[:, prompt:],
        "rollout_log_probs": logprobs,
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "routed_experts": expand_layers(routes, spec, num_layers),
        "replay_mask": replay,
    }


def from_verl(batch: Mapping[str, np.ndarray], spec: RoutingSpec, *, num_layers: int | None) -> list[Routes]:
    """The routes of each sequence, read from `routed_experts` and `attention_mask`.

    Raises:
        ValueError: shapes or ids that do not fit, ids outside of a sequence, or a row of zeros inside of one.
    """
    mask = np.asarray(batch["attention_mask"]).astype(bool)
    ids = collapse_layers(batch["routed_experts"], spec, num_layers, name="verl routed_experts")
    if ids.shape[:2] != mask.shape:
        raise ValueError(f"routed_experts is {ids.shape[:2]} and attention_mask {mask.shape}; need the same [bs, S]")
    return [_sequence(row, *pair, spec) for row, pair in enumerate(zip(ids, mask, strict=True))]


def _sequence(row: int, ids: np.ndarray, mask: np.ndarray, spec: RoutingSpec) -> Routes:
    name = f"verl row {row}"
    tokens = np.flatnonzero(mask)
    if len(tokens) < 2 or tokens[-1] - tokens[0] != len(tokens) - 1:
        raise ValueError(f"{name}: attention_mask must cover one run of at least 2 tokens, got {len(tokens)}")
    routed = slice(tokens[0], tokens[-1])
    if ids[: routed.start].any() or ids[routed.stop :].any():
        raise ValueError(f"{name}: ids at padding or at the last token; do the routes belong to another batch?")
    return Routes(refuse_zero_rows(spec.check_routes(ids[routed], name=name), spec, name=name))
