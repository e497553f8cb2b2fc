"""Routes found by token ids, in batches that were shuffled, split and padded elsewhere; micro-batches in flight."""

import dataclasses

import numpy as np
import pytest
import torch

from rollout import RouterReplay
from rollout.route_table import RouteTable
from storage import ReplayBatch, Trace
from tests.rollout.routes import load, random_routes

PROMPTS = {"a": [5, 6, 7], "b": [5, 6], "c": [5, 6, 7, 8], "d": [90]}
COMPLETIONS = {"a": [8, 9], "b": [7, 8, 9, 40], "c": [9, 9, 9], "d": [3]}  # a and c begin alike


@pytest.fixture
def qwen(checkpoint):
    return load(checkpoint("qwen3_moe"))


def make_traces(spec):
    traces = []
    for seed, name in enumerate(PROMPTS):
        rows = len(PROMPTS[name]) + len(COMPLETIONS[name]) - 1
        logprobs = [-1.0] * len(COMPLETIONS[name])
        ids = random_routes(spec, rows, seed)
        traces.append(Trace(f"run/0/{name}/0", 0, PROMPTS[name], COMPLETIONS[name], logprobs, ids, "length"))
    return traces


def pad(sequences, side, pad_token_id=0):
    width = max(len(tokens) for tokens in sequences) + 1
    ids, mask = np.full((len(sequences), width), pad_token_id), np.zeros((len(sequences), width), np.int64)
    for row, tokens in enumerate(sequences):
        columns = slice(0, len(tokens)) if side == "right" else slice(width - len(tokens), width)
        ids[row, columns], mask[row, columns] = tokens, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def executed(model, context, inputs):
    """Ids that the experts of each layer got, `[B, S, sites, K]`, by pre-hooks on the experts modules."""
    seen = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].numpy()))
        for layer in model.model.layers
    ]
    with context, torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return np.stack(seen, axis=1).reshape(*inputs["input_ids"].shape, len(seen), -1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_takes_the_routes_of_its_tokens_in_any_order_and_padding(qwen, side):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    order = [2, 0, 3, 1, 0]  # shuffled, and one twice
    inputs = pad([traces[i].token_ids for i in order], side)
    found = executed(qwen, replay.lookup(traces), inputs)
    for row, index in enumerate(order):
        columns = np.flatnonzero(inputs["attention_mask"][row].numpy())[:-1]
        np.testing.assert_array_equal(found[row, columns], traces[index].routed_experts)


def test_a_trainer_that_leaves_the_last_token_out_is_served_too(qwen):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    inputs = pad([trace.token_ids[:-1] for trace in traces], "right")
    table = RouteTable(replay.spec, without_last=True)
    table.add(traces)
    found = executed(qwen, replay.lookup(table), inputs)
    for row, trace in enumerate(traces):
        np.testing.assert_array_equal(found[row, : trace.route_len], trace.routed_experts)


def test_lookup_equals_a_replay_of_the_batch(qwen):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    batch = ReplayBatch.collate(traces, spec=replay.spec)
    with torch.no_grad():
        with replay(batch):
            expected = qwen(**batch.model_inputs()).logits
        report = replay.report()
        with replay.lookup(traces):
            assert torch.equal(qwen(**batch.model_inputs()).logits, expected)
    assert dataclasses.replace(replay.report(), missing_share=report.missing_share) == report


def test_rows_that_were_not_recorded_keep_their_native_choice(qwen):
    replay = RouterReplay(qwen)
    trace = make_traces(replay.spec)[2]
    valid = np.array([True, False, True, True, False, True])
    holes = dataclasses.replace(trace, route_valid=valid, routed_experts=trace.routed_experts * valid[:, None, None])
    inputs = pad([trace.token_ids], "right")
    with replay.record() as own, torch.no_grad():
        qwen(**inputs)
    found = executed(qwen, replay.lookup([holes]), inputs)[0]
    np.testing.assert_array_equal(found[:6][valid], trace.routed_experts[valid])
    np.testing.assert_array_equal(found[1, 0], own.routed_experts[1, 0])  # the first site still sees the same input


def test_traces_may_come_while_the_lookup_is_open(qwen):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    with replay.lookup(RouteTable(replay.spec)) as table, torch.no_grad():
        table.add(traces)
        qwen(**pad([trace.token_ids for trace in traces], "left"))
    assert replay.report().forced_rows == sum(trace.route_len for trace in traces)


def test_a_row_that_is_no_traces_is_an_error_that_shows_it(qwen):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    inputs = pad([traces[0].token_ids, [5, 6, 7, 9, 9]], "right")
    with (
        pytest.raises(ValueError, match=r"row 1 of the batch, 5 tokens that start \[5, 6, 7, 9, 9\], is none of the 4"),
        replay.lookup(traces),
        torch.no_grad(),
    ):
        qwen(**inputs)


def test_padding_without_a_mask_is_a_miss_and_not_a_guess(qwen):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    inputs = pad([trace.token_ids for trace in traces], "right")
    with pytest.raises(ValueError, match="row 0 of the batch"), replay.lookup(traces), torch.no_grad():
        qwen(input_ids=inputs["input_ids"])


def test_equal_tokens_with_other_routes_are_refused_or_the_first_is_taken(qwen):
    replay = RouterReplay(qwen)
    first = make_traces(replay.spec)[0]
    second = dataclasses.replace(first, sample_id="run/0/a/1", routed_experts=random_routes(replay.spec, 4, 77))
    same = dataclasses.replace(first, sample_id="run/0/a/2")
    RouteTable(replay.spec).add([first, same])
    with pytest.raises(ValueError, match=r"'run/0/a/0' and 'run/0/a/1' have the same tokens and other routes"):
        RouteTable(replay.spec).add([first, second])
    table = RouteTable(replay.spec, duplicates="first")
    table.add([first, second])
    found = executed(qwen, replay.lookup(table), pad([first.token_ids], "right"))
    np.testing.assert_array_equal(found[0, :4], first.routed_experts)


def test_a_table_of_whole_sequences_does_not_guess_about_shorter_ones(qwen):
    """b without its last token has the tokens of a: only the table's owner knows which one is forwarded."""
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    assert traces[1].token_ids[:-1] == traces[0].token_ids
    whole = executed(qwen, replay.lookup(traces), pad([traces[0].token_ids], "right"))
    np.testing.assert_array_equal(whole[0, :4], traces[0].routed_experts)
    with pytest.raises(ValueError, match="row 0 of the batch, 6 tokens"), replay.lookup(traces):
        qwen(**pad([traces[2].token_ids[:-1]], "right"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "trace 'run/0/a/0' has no routes to look up"),
        ({"routed_experts": np.zeros((4, 2, 2), np.uint8)}, r"trace 'run/0/a/0', row 0, at site 0 .* twice: \[0, 0\]"),
        ({"routed_experts": np.full((4, 3, 2), 1)}, r"trace 'run/0/a/0': routed_experts has shape \(4, 3, 2\)"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_when_added(qwen, change, message):
    replay = RouterReplay(qwen)
    with pytest.raises(ValueError, match=message):
        RouteTable(replay.spec).add([dataclasses.replace(make_traces(replay.spec)[0], **change)])


# --- several forwards in flight ---------------------------------------------------------------------------------------


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def loss(model, batch):
    return batch.token_logprobs(model(**batch.model_inputs()).logits).sum()


def sequential(model, replay, parts):
    """The truth: each micro-batch forward and backward in a context of its own, without checkpointing."""
    model.zero_grad()
    for part in parts:
        with replay(part):
            loss(model, part).backward()
    return gradients(model)


@pytest.mark.parametrize("how", ["list", "lookup"])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_backwards_of_micro_batches_in_flight_repeat_their_own_forwards(qwen, how, checkpointing, order):
    replay = RouterReplay(qwen)
    traces = make_traces(replay.spec)
    parts = [ReplayBatch.collate(part, spec=replay.spec) for part in (traces[:2], traces[2:])]
    qwen.train()
    expected = sequential(qwen, replay, parts)
    if checkpointing is not None:
        qwen.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        qwen.enable_input_require_grads()
    qwen.zero_grad()
    with replay(parts) if how == "list" else replay.lookup(traces):
        losses = [loss(qwen, part) for part in parts]
        for index in order:
            losses[index].backward()
    for name, gradient in gradients(qwen).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4, msg=name)
    assert replay.report().rows == sum(part.num_rows for part in parts)


def test_micro_batches_are_taken_once_each(qwen):
    replay = RouterReplay(qwen)
    parts = [ReplayBatch.collate([trace], spec=replay.spec) for trace in make_traces(replay.spec)[:2]]
    with pytest.raises(RuntimeError, match="1 of 2 micro-batches were forwarded"), replay(parts):
        loss(qwen, parts[0])
    with pytest.raises(RuntimeError, match="forward 3 under a replay of 2 micro-batches"), replay(parts):
        for part in (*parts, parts[0]):
            loss(qwen, part)


def test_a_router_that_runs_twice_in_one_forward_is_an_error(qwen):
    replay = RouterReplay(qwen)
    batch = ReplayBatch.collate(make_traces(replay.spec), spec=replay.spec)
    mlp = qwen.model.layers[0].mlp
    mlp.register_forward_hook(lambda _, args, output: mlp.gate(args[0].reshape(-1, 32)) and None)
    with pytest.raises(RuntimeError, match=r"layers.0.mlp.gate ran 2 times in one forward"), replay(batch):
        qwen(**batch.model_inputs())
