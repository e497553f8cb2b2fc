"""RouterReplay leaves a model as it was, and refuses by name what it cannot force exactly."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import RouterReplay
from storage import ReplayBatch, RoutingSpec, Trace
from tests.rollout.routes import load, logits, own_routes, random_routes


@pytest.fixture
def qwen(checkpoint):
    return load(checkpoint("qwen3_moe"))


# --- leaving no trace -------------------------------------------------------------------------------------------


def wrapped(model) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def failing_forward(model):
    logits(model)
    assert wrapped(model) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    raise ZeroDivisionError


def test_an_error_in_the_forward_leaves_the_model_as_it_was(qwen):
    replay = RouterReplay(qwen)
    plain = logits(qwen)
    for context in (replay(random_routes(replay.spec, 14)), replay.record()):
        with pytest.raises(ZeroDivisionError), context:
            failing_forward(qwen)
        assert wrapped(qwen) == []
    assert torch.equal(logits(qwen), plain)


def test_another_model_in_the_process_is_untouched(qwen, checkpoint):
    other = load(checkpoint("qwen3_moe"))
    plain = logits(other)
    replay = RouterReplay(qwen)
    with replay(random_routes(replay.spec, 14)):
        assert torch.equal(logits(other), plain)
        assert not torch.equal(logits(qwen), plain)


def test_contexts_on_one_model_do_not_nest(qwen):
    replay, routes = RouterReplay(qwen), own_routes(qwen)
    with replay.record() as recorded:
        logits(qwen)
        with pytest.raises(RuntimeError, match="already wrapped: leave the other"), replay(routes):
            pytest.fail("the context must not open")
    assert recorded.routed_experts.shape == (14, 2, 2)
    assert wrapped(qwen) == []


def test_making_a_replay_uses_no_random_numbers(qwen):
    state = torch.get_rng_state()
    RouterReplay(qwen)
    assert torch.equal(torch.get_rng_state(), state)


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: np.zeros_like(r), r"row 0 at site 0 \(model.layers.0.mlp.gate\) names an expert twice: \[0, 0\]"),
        (lambda r: np.where(np.arange(14)[:, None, None] == 9, 4, r), r"row 9 at site 0 .* twice: \[4, 4\]; .* masked"),
        (lambda r: r[:, :1], r"shape \(14, 1, 2\), need \[rows, 2, 2\]"),
        (lambda r: r[:, :, :1], r"shape \(14, 2, 1\), need \[rows, 2, 2\]"),
        (lambda r: r[0], r"shape \(2, 2\), need"),
        (lambda r: r.astype(np.float32), "float32, need integers"),
        (lambda r: r + 8, r"site 0 \(model.layers.0.mlp.gate\) has an id in \[8, 15\], need \[0, 8\)"),
        (lambda r: r.astype(np.int32) - 8, r"has an id in \[-8, -1\], need \[0, 8\)"),
    ],
    ids=["zeros", "duplicate", "one site less", "smaller k", "one row", "floats", "too high", "negative"],
)
def test_impossible_ids_are_refused_before_any_forward(qwen, change, message):
    replay = RouterReplay(qwen)
    with pytest.raises(ValueError, match=message), replay(change(random_routes(replay.spec, 14))):
        pytest.fail("the context must not open")
    assert wrapped(qwen) == []


@pytest.mark.parametrize("rows", [13, 15, 0])
def test_another_number_of_rows_than_tokens_is_refused_by_the_router(qwen, rows):
    replay = RouterReplay(qwen)
    with (
        pytest.raises(
            ValueError, match=f"mlp.gate sees 14 tokens but the replay holds {rows} rows; .* with all its padding"
        ),
        replay(random_routes(replay.spec, rows)),
    ):
        logits(qwen)


@pytest.mark.parametrize(
    ("sites", "num_experts", "message"),
    [(3, 8, "collated for 3 sites, this model has 2"), (2, 16, r"for another model: it has Site\(.*num_experts=16")],
)
def test_a_batch_of_another_spec_is_refused_though_its_ids_would_fit(qwen, sites, num_experts, message):
    spec = RoutingSpec.uniform(num_sites=sites, num_experts=num_experts, top_k=2)
    routes = np.broadcast_to(np.array([1, 2], np.uint8), (1, sites, 2))
    batch = ReplayBatch.collate([Trace("run/0/x/0", 0, [5], [6], [-1.0], routes, "length")], spec=spec)
    with pytest.raises(ValueError, match=message), RouterReplay(qwen)(batch):
        pytest.fail("the context must not open")


def test_int16_views_are_replayed_as_the_ids_they_hold(qwen):
    replay = RouterReplay(qwen)
    routes = random_routes(replay.spec, 14)
    view = np.repeat(routes.astype(np.int16), 2, axis=-1)[..., ::2]
    with replay(routes), torch.no_grad():
        expected = logits(qwen)
    with replay(view), torch.no_grad():
        assert torch.equal(logits(qwen), expected)


def test_a_trace_without_routes_is_refused_by_its_sample_id(qwen):
    bare = Trace("run/0/x/3", 0, [5], [6], [-1.0], None, "length")
    with pytest.raises(ValueError, match=r"trace 'run/0/x/3' has no routes"):
        ReplayBatch.collate([bare], spec=RouterReplay(qwen).spec)


def test_a_forward_that_was_cut_short_is_noticed(qwen):
    replay = RouterReplay(qwen)
    with (
        pytest.raises(RuntimeError, match=r"reached 1 sites but not \['model.layers.1.mlp.gate'\]"),
        replay(random_routes(replay.spec, 2)),
    ):
        qwen.model.layers[0].mlp.gate(torch.zeros(2, 32))


TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("mixtral", {**TINY, "num_local_experts": 4, "router_jitter_noise": 0.1}, r"\(MixtralTopKRouter\) .* jitter"),
        ("phimoe", {**TINY, "num_local_experts": 4, "router_jitter_noise": 0.1}, r"\(PhimoeTopKRouter\) .* jitter"),
        ("doge", {**TINY, "is_moe": True, "num_experts": 16}, r"\(DogeCDMoE\)"),
        ("qwen3", TINY, "Qwen3ForCausalLM has no MoE router: it is dense"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_a_router_that_cannot_be_forced_exactly_is_refused_by_class_name(family, config, message):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    with pytest.raises(ValueError, match=message):
        RouterReplay(model)


def test_a_context_in_which_nothing_was_replayed_is_an_error(qwen):
    """A copy of the model that was forwarded instead would train another path, silently."""
    other = copy.deepcopy(qwen)
    replay = RouterReplay(qwen)
    with pytest.raises(RuntimeError, match="nothing was replayed: forward the model that RouterReplay was made of"):
        with replay(own_routes(qwen)), torch.no_grad():
            logits(other)


@pytest.mark.parametrize("wrong", [["a", "list"], None])
def test_something_else_than_a_batch_is_refused_with_the_way_to_make_one(qwen, wrong):
    with pytest.raises(TypeError, match=r"ReplayBatch.collate\(traces, spec=replay.spec\) makes a batch"):
        with RouterReplay(qwen)(wrong):
            pass


def test_a_path_is_no_model():
    with pytest.raises(TypeError, match="RouterReplay takes a loaded model, got str"):
        RouterReplay("path/to/model")
