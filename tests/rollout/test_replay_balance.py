"""Load balancing from executed experts: the loss, the counts, and the selection bias, against hand computations."""

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rollout import RouterReplay
from storage import ReplayBatch, Trace
from tests.families import save_tiny
from tests.rollout.routes import TOKENS, load, own_routes, random_routes

LENGTHS = (7, 4)


@pytest.fixture
def qwen(checkpoint):
    return load(checkpoint("qwen3_moe"))


def batch_of(replay, strided=False):
    """Sequences of 7 and 4 tokens, padded to 7 columns."""
    traces = [
        Trace(f"run/0/{n}/0", 0, [5] * (n - 2), [6, 7], [-1.0] * 2, random_routes(replay.spec, n - 1, n), "length")
        for n in LENGTHS
    ]
    return ReplayBatch.collate(traces, spec=replay.spec, pad_routes="strided" if strided else "native")


def executed(model, context, batch):
    """Ids that the experts got and the live router logits, `[tokens, sites, ...]` without padding, by plain hooks."""
    ids, logits, handles = [], [], []
    for layer in model.model.layers:
        handles.append(layer.mlp.experts.register_forward_pre_hook(lambda _, args: ids.append(args[1])))
        handles.append(layer.mlp.gate.register_forward_pre_hook(lambda m, args: logits.append(args[0] @ m.weight.T)))
    with context:
        model(**batch.model_inputs())
    for handle in handles:
        handle.remove()
    tokens = torch.from_numpy(batch.attention_mask.reshape(-1).astype(bool))
    return torch.stack(ids, 1)[tokens], torch.stack(logits, 1)[tokens]


@pytest.mark.parametrize("strided", [False, True], ids=["native padding", "strided padding"])
def test_counts_are_of_the_experts_that_ran_and_padding_is_left_out(qwen, strided):
    replay = RouterReplay(qwen)
    batch = batch_of(replay, strided)
    ids, _ = executed(qwen, replay(batch), batch)
    assert len(ids) == sum(LENGTHS)
    expected = [np.bincount(ids[:, site].reshape(-1), minlength=8) for site in range(2)]
    np.testing.assert_array_equal(replay.expert_counts(), expected)


def test_the_loss_is_switchs_over_executed_experts(qwen):
    """E * sum_e f_e * P_e over the 2 * 11 (site, token) pairs, with f counted by hand."""
    replay = RouterReplay(qwen)
    batch = batch_of(replay)
    ids, logits = executed(qwen, replay(batch), batch)
    pairs = sum(LENGTHS) * 2
    f = np.bincount(ids.reshape(-1), minlength=8) / pairs
    p = logits.float().softmax(-1).sum((0, 1)).detach().numpy() / pairs
    assert replay.load_balancing_loss().item() == pytest.approx(8 * (f * p).sum(), rel=1e-5)


def test_with_own_routes_it_is_the_loss_of_transformers(qwen):
    replay = RouterReplay(qwen)
    with replay(own_routes(qwen)):
        logits = qwen(input_ids=TOKENS, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, num_experts=8, top_k=2)
    assert replay.load_balancing_loss().item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_loss_of_transformers_selects_again_and_ours_does_not(qwen):
    replay = RouterReplay(qwen)
    routes = random_routes(replay.spec, 14)
    with replay(routes):
        logits = qwen(input_ids=TOKENS, output_router_logits=True).router_logits
    theirs = load_balancing_loss_func(logits, num_experts=8, top_k=2)
    assert abs(replay.load_balancing_loss().item() - theirs.item()) > 1e-3


def test_its_gradient_reaches_every_router(qwen):
    replay = RouterReplay(qwen)
    with replay(random_routes(replay.spec, 14)):
        qwen(input_ids=TOKENS)
    replay.load_balancing_loss().backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in qwen.model.layers)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_with_checkpointing_the_loss_has_its_gradient_or_is_refused(qwen, checkpoint):
    """Reentrant checkpointing runs the layers without a graph first: the loss would be a constant."""
    routes = random_routes(RouterReplay(qwen).spec, 14)
    gradients = []
    for use_reentrant in (None, False, True):
        model = load(checkpoint("qwen3_moe")).train()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        replay = RouterReplay(model)
        with replay(routes):
            model(input_ids=TOKENS, use_cache=False)
            if use_reentrant:
                with pytest.raises(ValueError, match=r"ran router model\.layers\.0\.mlp\.gate without a graph"):
                    replay.load_balancing_loss()
            else:
                replay.load_balancing_loss().backward()
                gradients.append([layer.mlp.gate.weight.grad for layer in model.model.layers])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)
        assert plain.abs().sum() > 0


def test_without_gradients_the_loss_can_be_read(qwen):
    replay = RouterReplay(qwen)
    with replay(random_routes(replay.spec, 14)), torch.no_grad():
        qwen(input_ids=TOKENS)
    assert replay.load_balancing_loss().item() > 0


@pytest.mark.parametrize("family", ["gemma4_text", "afmoe"])
def test_routers_that_return_probabilities_or_scores_are_refused_by_name(family, tmp_path):
    """A softmax of a softmax is near uniform, whatever the router prefers."""
    model = load(save_tiny(family, tmp_path))
    replay = RouterReplay(model)
    with replay(random_routes(replay.spec, TOKENS.numel())), torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    with pytest.raises(ValueError, match=r"router model\.layers\.\d\..* returns probabilities or scores, not logits"):
        replay.load_balancing_loss()


def test_without_a_replayed_forward_there_is_no_loss(qwen):
    with pytest.raises(RuntimeError, match="no forward was replayed yet"):
        RouterReplay(qwen).load_balancing_loss()


def test_routers_without_logits_are_refused_by_name(tmp_path):
    model = load(save_tiny("jetmoe", tmp_path))
    replay = RouterReplay(model)
    with replay.record() as own, torch.no_grad():
        model(input_ids=TOKENS)
    with replay(own.routed_experts), torch.no_grad():
        model(input_ids=TOKENS)
    with pytest.raises(ValueError, match=r"router model\.layers\.0\..* returns no logits"):
        replay.load_balancing_loss()


def test_the_report_counts_no_padding_and_the_overlap_is_the_share_of_common_experts(qwen):
    replay = RouterReplay(qwen)
    with replay.record() as own, torch.no_grad():
        qwen(**batch_of(replay).model_inputs())
    for strided in (False, True):
        batch = batch_of(replay, strided)
        with replay(batch), torch.no_grad():
            qwen(**batch.model_inputs())
        report = replay.report()
        rows = batch.route_mask.reshape(-1) & batch.input_mask.reshape(-1)
        live, forced = own.routed_experts[rows, 0], batch.routed_experts.reshape(14, 2, 2)[rows, 0]
        overlap = np.mean([len(set(a) & set(b)) / 2 for a, b in zip(live.tolist(), forced.tolist(), strict=True)])
        assert report.overlap_per_site[0] == pytest.approx(overlap)
        assert (report.forced_rows, report.native_rows, report.rows) == (9, 5, 14)


def test_the_selection_bias_follows_the_executed_load(tmp_path):
    """DeepSeek-V3, section 2.1.2: overloaded experts lose `rate`, others gain it."""
    model = load(save_tiny("deepseek_v3", tmp_path))
    replay = RouterReplay(model)
    with replay.record() as own, torch.no_grad():
        model(input_ids=TOKENS)
    with replay(own.routed_experts), torch.no_grad():
        model(input_ids=TOKENS)
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    before = [gate.e_score_correction_bias.clone() for gate in gates]
    replay.update_selection_bias(0.01)
    for site, (gate, old) in enumerate(zip(gates, before, strict=True)):
        tokens = np.bincount(own.routed_experts[:, site].reshape(-1), minlength=8)
        moved = 0.01 * np.sign(tokens.mean() - tokens)
        np.testing.assert_allclose((gate.e_score_correction_bias - old).numpy(), moved, atol=1e-6)


def test_a_router_without_a_selection_bias_is_refused_by_name(qwen):
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate \(Qwen3MoeTopKRouter\) has no e_score_correction_bias"):
        RouterReplay(qwen).update_selection_bias(0.01)
