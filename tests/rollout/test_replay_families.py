"""RouterReplay for every MoE family of the installed transformers: exact, or refused by name.

What a model was made to use is read behind its routers, where tokens meet experts. Tiny models and their routes come
from tests/families.py; all but the representative families are left to the full tier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollout import RouterReplay
from rollout.families import measured_table
from storage import ReplayBatch, Trace
from tests.families import VOCAB, save_tiny
from tests.rollout.routes import load, logits, random_routes
from tests.rollout.witness import _by_token_id

FAMILIES = [row.family for row in measured_table().rows if row.family != "doge"]
REPRESENTATIVE = ("deepseek_v2", "deepseek_v3", "llama4_text", "mixtral", "zaya")
SPECIAL = ("afmoe", "dbrx", "deepseek_v2", "deepseek_v3", "jetmoe", "llama4_text", "mixtral", "phimoe", "zaya")
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, (2, 20)))
ROWS = TOKENS.numel()
SKIP = {"ZayaRouter": 8}  # the id that stands for no expert: the experts module gets a 0 for it, with weight 0


def families(names=FAMILIES):
    marks = {name: [] if name in REPRESENTATIVE else [pytest.mark.full] for name in names}
    return pytest.mark.parametrize("family", [pytest.param(name, marks=marks[name]) for name in names])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Callable[..., Any]:
    """`tiny("mixtral")`: a float32 model of its own, in eval mode, of a checkpoint that is built once."""
    path = cache(lambda family: save_tiny(family, tmp_path_factory.mktemp(family)))
    return lambda family, dtype=torch.float32: load(path(family), dtype)


def perturbed(model: Any) -> Any:
    """A copy with other weights everywhere, which chooses other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += 0.3 * noise * parameter.std(correction=0)
    return other


# --- the witness ------------------------------------------------------------------------------------------------


class Used(NamedTuple):
    """What the tokens met at one site: ids `[tokens, K]` and the weights of these experts."""

    ids: torch.Tensor
    weights: torch.Tensor


def _of_experts(_module: Any, args: Any, kwargs: Any) -> Used | None:
    """Experts modules are called with hidden states, ids and weights."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim == 2]
    ids = [value for value in given if not value.is_floating_point()]
    return Used(ids[0], next(v for v in given if v.is_floating_point() and v.shape == ids[0].shape)) if ids else None


def _of_llama4(_module: Any, out: Any) -> Used:
    """Every expert sees every token, times a score: 0 for all but the chosen."""
    weights, ids = out[0].topk(1)
    return Used(ids, weights)


def _of_jetmoe(module: Any, out: Any) -> Used:
    """Expert after expert, `sizes` of each: the place of each (token, choice) in that order."""
    order, _, gates, sizes, _ = out
    ids, weights = torch.empty_like(order), torch.empty_like(gates)
    ids[order], weights[order] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), gates
    return Used(ids.view(-1, module.top_k), weights.view(-1, module.top_k))


OF_ROUTERS = {"Llama4Router": _of_llama4, "JetMoeTopKGating": _of_jetmoe}


class Witness:
    """Inside `with Witness(model) as used`, `used` is filled with one entry per site and forward."""

    def __init__(self, model: Any) -> None:
        self._modules, self._handles = dict(model.named_modules()), []

    def __enter__(self) -> list[Used]:
        used: list[Used] = []
        for name, module in self._modules.items():
            kind = type(module).__name__
            if kind in OF_ROUTERS:
                self._handles.append(module.register_forward_hook(lambda m, _, out: used.append(_router(m, out))))
            elif kind.endswith("Experts") and not _by_token_id(self._modules[name.rpartition(".")[0]]):
                self._handles.append(module.register_forward_pre_hook(_noting(used), with_kwargs=True))
        return used

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


def _router(module: Any, out: Any) -> Used:
    used = OF_ROUTERS[type(module).__name__](module, out)
    return Used(used.ids.detach(), used.weights.detach())


def _noting(used: list[Used]) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if (found := _of_experts(module, args, kwargs)) is not None:
            used.append(Used(found.ids.detach().long(), found.weights.detach()))

    return hook


def skip_id(model: Any) -> int | None:
    return next((SKIP[kind] for module in model.modules() if (kind := type(module).__name__) in SKIP), None)


def as_experts_see(routes: np.ndarray, model: Any) -> np.ndarray:
    return np.where(routes == skip_id(model), 0, routes)


def ids_of(used: list[Used]) -> np.ndarray:
    return torch.stack([site.ids for site in used], 1).numpy()


def zeros_of(used: list[Used], routes: np.ndarray, model: Any) -> int:
    """Experts that a token was sent to with weight 0."""
    weights = torch.stack([site.weights for site in used], 1).float().numpy()
    return int(((weights == 0) & (routes != skip_id(model))).sum())


def recorded(model: Any) -> np.ndarray:
    with RouterReplay(model).record() as found, torch.no_grad():
        logits(model, TOKENS)
    return found.routed_experts


def train(model: Any, context: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a forward and backward within `context`."""
    model.zero_grad()
    with context:
        out = logits(model, TOKENS)
        out.float().square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- every family -----------------------------------------------------------------------------------------------


@families()
def test_recording_changes_no_logit_and_notes_what_the_experts_get(family, tiny):
    model = tiny(family)
    with Witness(model) as used, torch.no_grad():
        plain = logits(model, TOKENS)
    with RouterReplay(model).record() as found, torch.no_grad():
        assert torch.equal(logits(model, TOKENS), plain)
    assert np.array_equal(as_experts_see(found.routed_experts, model), ids_of(used))


@families()
def test_own_ids_replayed_change_no_bit_of_logits_and_gradients(family, tiny):
    model = tiny(family)
    check_own_ids(model)


def check_own_ids(model: Any) -> None:
    plain_logits, plain = train(model, torch.enable_grad())
    replay = RouterReplay(model)
    replayed_logits, replayed = train(model, replay(recorded(model)))
    assert torch.equal(replayed_logits, plain_logits)
    assert replayed.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(replayed[name], plain[name])] == []
    assert replay.report().flipped_share == replay.report().reordered_share == 0


@families()
def test_the_ids_of_another_model_reach_the_experts_exactly(family, tiny):
    model = tiny(family)
    check_foreign_ids(model, recorded(perturbed(model)))


def check_foreign_ids(model: Any, routes: np.ndarray) -> None:
    """The first site's input does not depend on replay: there the report equals a count by hand."""
    own = recorded(model)
    assert (own != routes).any(), "the other model must choose otherwise"
    replay = RouterReplay(model)
    with Witness(model) as used, replay(routes), torch.no_grad():
        logits(model, TOKENS)
    assert np.array_equal(ids_of(used), as_experts_see(routes, model))
    flipped = (np.sort(own[:, 0], -1) != np.sort(routes[:, 0], -1)).any(-1)
    assert replay.report().flipped_per_site[0] == pytest.approx(flipped.mean())


@families()
def test_every_router_learns_and_no_forced_expert_is_weighted_with_zero(family, tiny):
    """With random ids, most of which are outside the groups that a group-limited router would use."""
    model = tiny(family)
    check_learning(model)


def check_learning(model: Any) -> None:
    replay = RouterReplay(model)
    routes = random_routes(replay.spec, ROWS)
    with Witness(model) as natively, torch.no_grad():
        logits(model, TOKENS)
    with Witness(model) as forced:
        _, gradients = train(model, replay(routes))
    assert np.array_equal(ids_of(forced), as_experts_see(routes, model))
    for site in replay.spec.sites:
        of_site = [gradient for name, gradient in gradients.items() if name.startswith(f"{site.name}.")]
        assert any(gradient.abs().max() > 0 for gradient in of_site), site.name
    assert zeros_of(forced, routes, model) <= zeros_of(natively, recorded(model), model)


# deepseek_v3 scores a group by its two best experts, so that one expert is no group there.
GROUPS = [(4, 1, 2), (2, 1, 4), (4, 3, 4), (4, 4, 2), (1, 1, 2)]
GROUP_LIMITED = [("deepseek_v3", sizes) for sizes in GROUPS]
GROUP_LIMITED += [("deepseek_v2", sizes) for sizes in (*GROUPS, (8, 2, 2))]


@pytest.mark.parametrize(("family", "sizes"), GROUP_LIMITED)
def test_any_number_of_groups_live_groups_and_experts(family, sizes, tmp_path):
    groups, live, top_k = sizes
    model = load(save_tiny(family, tmp_path, n_group=groups, topk_group=live, num_experts_per_tok=top_k))
    check_own_ids(model)
    check_foreign_ids(model, recorded(perturbed(model)))
    check_learning(model)


def test_a_token_that_skips_its_experts_skips_them_in_replay(tiny):
    """zaya's id 8 of 8 experts: the experts module gets expert 0 with weight 0, and the route says 8."""
    model = tiny("zaya")
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer[-1] = 0.2
    with Witness(model) as used:
        own = recorded(model)
    skipped = torch.stack([site.weights for site in used[-len(RouterReplay(model).spec.sites) :]], 1).numpy() == 0
    assert 0 < skipped.mean() < 1
    assert np.array_equal(own == 8, skipped)
    check_own_ids(model)


# --- other ways to compute --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_implementation_of_experts(family, implementation, tiny):
    model = tiny(family)
    if not hasattr(model, "set_experts_implementation") or not model._can_set_experts_implementation():
        pytest.skip(f"{family} has one implementation only")
    model.set_experts_implementation(implementation)
    check_own_ids(model)
    check_foreign_ids(model, recorded(perturbed(model)))
    check_learning(model)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.full) for name in FAMILIES]
)
def test_in_bfloat16(family, tiny):
    model = tiny(family, torch.bfloat16)  # loaded so: inkling2 keeps parts in float32 that `.to` would convert
    check_own_ids(model)
    check_foreign_ids(model, recorded(perturbed(model)))
    check_learning(model)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["afmoe", "dbrx", "deepseek_v2", "llama4_text", "zaya"])
def test_gradient_checkpointing_forces_again_in_backward(family, use_reentrant, tiny):
    model = tiny(family).train()
    replay = RouterReplay(model)
    routes = random_routes(replay.spec, ROWS)
    plain_logits, plain = train(model, replay(routes))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    again_logits, again = train(model, replay(routes))
    assert torch.equal(again_logits, plain_logits)
    assert [name for name in plain if not torch.equal(again[name], plain[name])] == []


@pytest.mark.parametrize("family", ["dbrx", "deepseek_v2", "jetmoe", "phimoe"])
def test_masked_rows_keep_the_native_choice(family, tiny):
    """At the first site, whose input does not depend on replay, it is the recorded one."""
    model = tiny(family)
    replay, own = RouterReplay(model), recorded(model)
    routes = random_routes(replay.spec, ROWS).reshape(2, 20, *replay.spec.row_shape)
    valid = np.arange(19) % 3 != 1
    routes[:, :19][:, ~valid] = 0
    traces = [
        Trace(f"run/0/{i}/0", 0, ids[:4], ids[4:], [-0.5] * 16, rows[:19], "length", route_valid=valid)
        for i, (ids, rows) in enumerate(zip(TOKENS.tolist(), routes, strict=True))
    ]
    batch = ReplayBatch.collate(traces, spec=replay.spec)
    mask = batch.route_mask.reshape(-1)
    assert 0 < mask.sum() < ROWS
    with Witness(model) as used, replay(batch), torch.no_grad():
        model(**batch.model_inputs(), use_cache=False)
    first = ids_of(used)[:, 0]
    assert np.array_equal(first[mask], routes.reshape(ROWS, *replay.spec.row_shape)[mask, 0])
    assert np.array_equal(first[~mask], own[~mask, 0])


# --- refused ----------------------------------------------------------------------------------------------------


def test_phimoe_is_refused_in_training_mode_even_after_construction(tiny):
    model = tiny("phimoe")
    replay = RouterReplay(model)
    model.train()
    message = r"\(PhimoeTopKRouter\) .* in training mode samples its experts with jitter; .* model.eval\(\)"
    with pytest.raises(ValueError, match=message):
        RouterReplay(model)
    for context in (replay(random_routes(replay.spec, ROWS)), replay.record()):
        with pytest.raises(ValueError, match=message), context, torch.no_grad():
            logits(model, TOKENS)


def test_doge_is_refused_with_the_reason(tiny):
    with pytest.raises(ValueError, match=r"\(DogeCDMoE\) selects in 2 top-k calls, and none of them alone decides"):
        RouterReplay(tiny("doge"))


def test_layers_that_look_experts_up_by_token_id_are_no_sites_and_replay_as_they_are(tiny):
    """deepseek_v4's first layer: its choice follows from the tokens, so there is nothing to record or force."""
    names = [site.name for site in RouterReplay(tiny("deepseek_v4")).spec.sites]
    assert names == [f"model.layers.{layer}.mlp.gate" for layer in (1, 2, 3)]


def test_making_a_replay_of_a_model_in_training_mode_draws_no_random_number(tiny):
    model = tiny("afmoe").train()
    state = torch.get_rng_state()
    RouterReplay(model)
    assert torch.equal(torch.get_rng_state(), state)


def sorting(router: Any, hidden: torch.Tensor) -> Any:
    scores = (hidden @ router.weight.T).softmax(-1)
    ids = scores.argsort(-1, descending=True)[:, : router.top_k]
    return scores, scores.gather(-1, ids), ids


def deciding_after_top_k(router: Any, hidden: torch.Tensor) -> Any:
    (hidden @ router.weight.T).topk(router.top_k)
    return sorting(router, hidden)


def limited_by_sorting(router: Any, hidden: torch.Tensor) -> Any:
    """As deepseek_v2, but the live groups of two experts are not what a top-k answered."""
    scores = (hidden @ router.weight.T).softmax(-1)
    best = scores.view(len(scores), -1, 2).amax(-1)
    best.topk(1)
    dead = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.argmax(-1, keepdim=True), False)
    masked = scores.masked_fill(dead.repeat_interleave(2, -1), 0.0)
    weights, ids = masked.topk(router.top_k)
    return scores, weights, ids


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (sorting, "selects neither with top-k nor with 2 maxima in turn; .* Train without replay"),
        (deciding_after_top_k, "selects in 1 top-k calls, and none of them alone decides which 2 of 8 experts"),
        (limited_by_sorting, r"weight 0, in a way that cannot be steered; .*n_group=1"),
    ],
)
def test_a_router_that_no_family_has_yet_is_refused_by_name(forward, reason, tiny):
    model = tiny("mixtral")
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type("OddRouter", (type(gate),), {"forward": forward})
    with pytest.raises(ValueError, match=rf"router model.layers.0.mlp.gate \(OddRouter\) .*{reason}"):
        RouterReplay(model)


def test_a_router_that_selects_otherwise_than_when_it_was_tried_is_an_error(tiny):
    model = tiny("deepseek_v2")
    replay = RouterReplay(model)
    model.model.layers[1].mlp.gate.topk_method = "greedy"
    with (
        pytest.raises(RuntimeError, match="selected in 1 calls, but in 2 when it was tried; make a new RouterReplay"),
        replay(random_routes(replay.spec, ROWS)),
    ):
        logits(model, TOKENS)
