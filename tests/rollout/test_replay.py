"""RouterReplay: the experts are exactly the recorded ones, and the weights stay live."""

import copy

import numpy as np
import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rollout import RouterReplay
from rollout.replay_batch import rows_of
from storage import ReplayBatch, Trace
from tests.rollout.routes import TOKENS, load, logits, own_routes, random_routes

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe"]
WITNESS = "test_witness"


@pytest.fixture(params=FAMILIES)
def model(request, checkpoint):
    return load(checkpoint(request.param))


@pytest.fixture
def qwen(checkpoint):
    return load(checkpoint("qwen3_moe"))


def perturbed(model, scale=0.3):
    """A copy with other weights everywhere, which chooses other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * scale)
    return other


@pytest.fixture
def witness():
    """The ids that the experts receive, noted by an experts implementation of transformers' public interface."""
    seen = []

    def noting(experts, hidden, ids, weights):
        seen.append(ids.reshape(-1, ids.shape[-1]).clone())
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, ids, weights)

    ALL_EXPERTS_FUNCTIONS[WITNESS] = noting
    yield seen
    del ALL_EXPERTS_FUNCTIONS[WITNESS]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model, context=None):
    """Forward and backward of a loss within `context`; (logits, gradients)."""
    model.zero_grad()
    if context is None:
        out = logits(model)
        out.square().mean().backward()
    else:
        with context:
            out = logits(model)
            out.square().mean().backward()
    return out.detach(), gradients(model)


# --- recording --------------------------------------------------------------------------------------------------


def test_record_sees_the_choice_of_every_router_and_changes_no_logit(model):
    plain = logits(model)
    replay = RouterReplay(model)
    with replay.record() as recorded:
        assert torch.equal(logits(model), plain)
    assert recorded.routed_experts.dtype == np.uint8
    assert np.array_equal(recorded.routed_experts, own_routes(model))


def test_record_joins_the_forwards_inside_it(qwen):
    with RouterReplay(qwen).record() as recorded:
        logits(qwen, TOKENS[:1])
        logits(qwen, TOKENS[1:, :3])
    expected = np.concatenate([own_routes(qwen, TOKENS[:1]), own_routes(qwen, TOKENS[1:, :3])])
    assert np.array_equal(recorded.routed_experts, expected)


def test_a_recording_without_a_whole_forward_cannot_be_read(qwen):
    with RouterReplay(qwen).record() as recorded:
        pass
    with pytest.raises(RuntimeError, match="run whole forwards inside"):
        _ = recorded.routed_experts
    with RouterReplay(qwen).record() as recorded:
        qwen.model.layers[0].mlp.gate(torch.zeros(2, 32))
    with pytest.raises(RuntimeError, match=r"recorded \[0, 2\] rows"):
        _ = recorded.routed_experts


# --- replaying --------------------------------------------------------------------------------------------------


def test_own_ids_replayed_give_the_same_logits_and_gradients_in_every_bit(model):
    plain_logits, plain_gradients = train(model)
    replay = RouterReplay(model)
    replayed_logits, replayed_gradients = train(model, replay(own_routes(model)))
    assert torch.equal(replayed_logits, plain_logits)
    assert replayed_gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert torch.equal(replayed_gradients[name], gradient), name


def test_in_other_weights_the_experts_receive_exactly_the_forced_ids(model, witness):
    recorded = own_routes(model)
    other = perturbed(model)
    assert (own_routes(other) != recorded).any(), "the copy must choose otherwise for this test to mean anything"
    other.set_experts_implementation(WITNESS)
    logits(other)
    assert not np.array_equal(torch.stack(witness, 1).numpy(), recorded)
    witness.clear()
    with RouterReplay(other)(recorded):
        logits(other)
    assert np.array_equal(torch.stack(witness, 1).numpy(), recorded)


def test_even_random_ids_reach_the_experts_in_their_order(model, witness):
    replay = RouterReplay(model)
    forced = random_routes(replay.spec, TOKENS.numel())
    model.set_experts_implementation(WITNESS)
    with replay(forced):
        logits(model)
    assert np.array_equal(torch.stack(witness, 1).numpy(), forced)


def test_every_router_gets_a_gradient_under_forced_ids(model):
    replay = RouterReplay(model)
    _, found = train(model, replay(random_routes(replay.spec, TOKENS.numel())))
    for site in replay.spec.sites:
        of_site = [gradient for name, gradient in found.items() if name.startswith(site.name)]
        assert of_site, site.name
        assert any(gradient.abs().max() > 0 for gradient in of_site), site.name


def test_forced_weights_are_the_live_scores_of_the_forced_experts(qwen):
    """By hand: softmax over all experts, gathered at the forced ids, renormalised."""
    replay = RouterReplay(qwen)
    gate, hidden = qwen.model.layers[1].mlp.gate, torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    forced = random_routes(replay.spec, 3)
    with torch.no_grad():
        probs = (hidden @ gate.weight.T).softmax(-1)
        chosen = probs.gather(-1, torch.from_numpy(forced[:, 1]).long())
        with pytest.raises(RuntimeError, match="replay reached 1 sites but not"), replay(forced):
            _, weights, ids = gate(hidden)
    assert ids.tolist() == forced[:, 1].tolist()
    expected = chosen / chosen.sum(-1, keepdim=True) if gate.norm_topk_prob else chosen
    torch.testing.assert_close(weights, expected)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_replays_in_backward_too(model, use_reentrant):
    """Checkpointing runs the routers again in backward: the context is open, so they are forced again."""
    replay = RouterReplay(model)
    forced = random_routes(replay.spec, TOKENS.numel())
    plain_logits, plain_gradients = train(model, replay(forced))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    if use_reentrant:
        model.enable_input_require_grads()
    calls = []
    model.get_submodule(replay.spec.sites[0].name).register_forward_pre_hook(lambda *_: calls.append(1))
    again_logits, again_gradients = train(model, replay(forced))
    assert len(calls) == 2, "the router must have run again in backward"
    assert torch.equal(again_logits, plain_logits)
    for name, gradient in plain_gradients.items():
        assert torch.equal(again_gradients[name], gradient), name


def test_one_context_serves_several_forwards(qwen):
    replay = RouterReplay(qwen)
    forced = random_routes(replay.spec, TOKENS.numel())
    with replay(forced):
        assert torch.equal(logits(qwen), logits(qwen))


def test_ids_may_arrive_in_any_integer_type(qwen):
    replay = RouterReplay(qwen)
    forced = random_routes(replay.spec, TOKENS.numel())
    with replay(forced):
        expected = logits(qwen)
    for dtype in (np.int16, np.int32, np.int64, np.uint16):
        with replay(forced.astype(dtype)):
            assert torch.equal(logits(qwen), expected)


def test_the_callers_array_is_not_changed_and_not_kept(qwen):
    replay = RouterReplay(qwen)
    forced = random_routes(replay.spec, TOKENS.numel())
    kept = forced.copy()
    with replay(forced):
        expected = logits(qwen)
        forced[:] = 0
        assert torch.equal(logits(qwen), expected)
    with replay(kept):
        assert torch.equal(logits(qwen), expected)


# --- masked rows ------------------------------------------------------------------------------------------------


def trace(sample: str, prompt: list[int], completion: list[int], routes: np.ndarray, **fields) -> Trace:
    logprobs = [-0.5] * len(completion)
    return Trace(f"run/0/{sample}/0", 0, prompt, completion, logprobs, routes, "length", **fields)


@pytest.fixture
def batch(qwen):
    """Two traces of 7 and 4 tokens; row 2 of the first was not recorded."""
    spec = RouterReplay(qwen).spec
    first, second = random_routes(spec, 6, seed=1), random_routes(spec, 3, seed=2)
    valid = np.array([True, True, False, True, True, True])
    first[~valid] = 0
    traces = [
        trace("a", [5, 9, 21, 40], [3, 66, 17], first, route_valid=valid),
        trace("b", [30, 31], [5, 5], second),
    ]
    return ReplayBatch.collate(traces, spec=spec)


def test_the_rows_outside_the_mask_keep_their_native_choice(qwen, witness, batch):
    """Not recorded, last sampled token, padding: 1 + 1 + 4 of 14 rows; checked with the routers' own arithmetic."""
    mask = batch.route_mask.reshape(-1)
    assert mask.tolist() == [True, True, False, True, True, True, False] + [True] * 3 + [False] * 4
    native = []
    gates = [layer.mlp.gate for layer in qwen.model.layers]
    handles = [
        gate.register_forward_hook(lambda m, args, _o: native.append((args[0] @ m.weight.T).topk(m.top_k).indices))
        for gate in gates
    ]
    qwen.set_experts_implementation(WITNESS)
    with RouterReplay(qwen)(batch) as inner, torch.no_grad():
        assert inner is batch
        qwen(**inner.model_inputs())
    for handle in handles:
        handle.remove()
    received, chosen = torch.stack(witness, 1).numpy(), torch.stack(native, 1).numpy()
    assert np.array_equal(received[mask], batch.routed_experts.reshape(-1, *received.shape[1:])[mask])
    assert np.array_equal(received[~mask], chosen[~mask])
    assert (received[~mask] != 0).any(), "zeros that fill a missing row must not be taken for expert 0"


def test_what_fills_the_masked_rows_does_not_matter(qwen, batch):
    replay = RouterReplay(qwen)
    with replay(batch):
        expected = qwen(**batch.model_inputs()).logits
    batch.routed_experts[~batch.route_mask] = 7
    with replay(batch):
        assert torch.equal(qwen(**batch.model_inputs()).logits, expected)


def test_a_left_padded_batch_of_the_models_own_routes_changes_nothing(qwen):
    spec = RouterReplay(qwen).spec
    tokens = [[5, 9, 21, 40, 3, 66, 17], [30, 31, 5, 5]]
    traces = [
        trace(str(i), ids[:2], ids[2:], own_routes(qwen, torch.tensor([ids]))[:-1]) for i, ids in enumerate(tokens)
    ]
    for padding in ("left", "right"):
        batch = ReplayBatch.collate(traces, spec=spec, padding=padding)
        replay = RouterReplay(qwen)
        with replay(batch), torch.no_grad():
            found = qwen(**batch.model_inputs()).logits[torch.from_numpy(batch.attention_mask).bool()]
        alone = torch.cat([logits(qwen, torch.tensor([ids]))[0] for ids in tokens])
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
        assert replay.report().flipped_share == 0


def test_a_duplicate_in_a_recorded_row_of_a_batch_is_refused(qwen, batch):
    batch.routed_experts[1, 1] = 3
    with (
        pytest.raises(ValueError, match=r"row 8, sample 'run/0/b/0', position 1, at site 0 .* twice: \[3, 3\]"),
        RouterReplay(qwen)(batch),
    ):
        pytest.fail("the context must not open")


# --- report -----------------------------------------------------------------------------------------------------


def test_the_report_equals_an_independent_count(qwen, batch):
    """Native choices under replay, noted by hooks and counted in numpy."""
    native = []
    gates = [layer.mlp.gate for layer in qwen.model.layers]
    for gate in gates:
        gate.register_forward_hook(lambda m, args, _o: native.append((args[0] @ m.weight.T).topk(m.top_k).indices))
    replay = RouterReplay(qwen)
    with replay(batch), torch.no_grad():
        qwen(**batch.model_inputs())
    mask = batch.route_mask.reshape(-1)
    chosen = torch.stack(native, 1).numpy()[mask]
    forced = batch.routed_experts.reshape(14, *chosen.shape[1:])[mask]
    flipped = (np.sort(chosen, -1) != np.sort(forced, -1)).any(-1)
    reordered = (chosen != forced).any(-1) & ~flipped
    report = replay.report()
    assert (report.sites_used, report.num_sites, report.rows) == (2, 2, 14)
    assert report.missing_share == pytest.approx(1 / 9), "of 6 + 3 rows one was not recorded; padding has none"
    assert report.flipped_share == pytest.approx(flipped.mean())
    assert report.flipped_per_site == pytest.approx(flipped.mean(0).tolist())
    assert report.reordered_share == pytest.approx(reordered.mean())
    assert report.flipped_share > 0


def test_the_report_tells_another_order_from_another_set(qwen):
    own = own_routes(qwen)
    turned = own[..., ::-1].copy()
    turned[:7] = own[:7]
    replay = RouterReplay(qwen)
    with replay(turned), torch.no_grad():
        logits(qwen)
    report = replay.report()
    assert report.flipped_per_site[0] == 0
    assert report.reordered_share >= 0.25
    assert report.missing_share == 0


def test_the_report_is_of_the_last_context(qwen):
    replay = RouterReplay(qwen)
    for routes, share in ((own_routes(qwen), 0), (random_routes(replay.spec, 14), None)):
        with replay(routes), torch.no_grad():
            logits(qwen)
        assert (replay.report().flipped_share == 0) == (share == 0)
    assert replay.report().rows == 14


def test_before_any_context_the_report_is_empty(qwen):
    report = RouterReplay(qwen).report()
    assert (report.sites_used, report.rows, report.flipped_share, report.missing_share) == (0, 0, 0, 0)


def test_ids_of_all_sites_stay_narrow(qwen, batch):
    """Only one site's are widened at a time: int64 ids of all would take eight times the memory of the routes."""
    assert rows_of(RouterReplay(qwen).spec, batch).ids.dtype is torch.uint8
