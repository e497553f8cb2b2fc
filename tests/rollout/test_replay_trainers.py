"""RouterReplay in what trainers wrap around a model: autocast, FSDP2, torch.compile, bfloat16 on both sides."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout import RolloutClient, RouterReplay, SamplingParams
from storage import ReplayBatch
from tests.rollout.routes import TOKENS, load, logits, random_routes


@pytest.fixture
def qwen(checkpoint):
    return load(checkpoint("qwen3_moe"))


def executed(model, run):
    """Ids that the experts got in `run`, `[tokens, sites, K]`."""
    ids, handles = [], []
    for layer in model.model.layers:
        handles.append(layer.mlp.experts.register_forward_pre_hook(lambda _, args: ids.append(args[1].clone())))
    run()
    for handle in handles:
        handle.remove()
    return torch.stack(ids, 1).numpy()


def test_under_autocast_the_experts_are_forced_and_every_router_learns(qwen):
    replay = RouterReplay(qwen)
    routes = random_routes(replay.spec, 14)

    def run():
        with replay(routes), torch.autocast("cpu", torch.bfloat16):
            logits(qwen).float().square().mean().backward()

    np.testing.assert_array_equal(executed(qwen, run), routes)
    for layer in qwen.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("how", ["wrapper", "in place", "a layer"])
def test_a_compiled_model_is_refused_by_name(qwen, how):
    replay = RouterReplay(qwen)
    if how == "in place":
        qwen.compile()
    elif how == "a layer":
        qwen.model.layers[1].compile()
    model = torch.compile(qwen) if how == "wrapper" else qwen
    with pytest.raises(ValueError, match=r"is compiled by torch\.compile; replay the plain model"):
        RouterReplay(model)
    if how != "wrapper":
        with pytest.raises(ValueError, match=r"compiled by torch\.compile"), replay(random_routes(replay.spec, 14)):
            pytest.fail("the context must not open")


def test_attention_may_be_compiled_as_the_error_advises(qwen):
    for layer in qwen.model.layers:
        layer.self_attn = torch.compile(layer.self_attn, backend="eager")
    replay = RouterReplay(qwen)
    routes = random_routes(replay.spec, 14)

    def run():
        with replay(routes), torch.no_grad():
            logits(qwen)

    np.testing.assert_array_equal(executed(qwen, run), routes)


@pytest.mark.full
def test_fsdp2_with_checkpointing_gives_the_gradients_of_one_process(qwen, checkpoint, tmp_path):
    """Two gloo ranks with half of the batch each; FSDP averages their gradients."""
    replay = RouterReplay(qwen)
    routes = random_routes(replay.spec, 14)
    halves = torch.from_numpy(routes).view(2, 7, *routes.shape[1:])
    torch.save({"tokens": TOKENS, "routes": halves}, tmp_path / "batch.pt")
    command = [sys.executable, "-m", "tests.rollout.fsdp_replay"]
    arguments = str(checkpoint("qwen3_moe")), str(tmp_path)
    ranks = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    found = torch.load(tmp_path / "out.pt")
    qwen.zero_grad()
    for tokens, half in zip(TOKENS, halves, strict=True):
        with replay(half.numpy()):
            (logits(qwen, tokens[None]).square().mean() / 2).backward()
    for name, parameter in qwen.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert found["report"] == 7


def test_with_bfloat16_on_both_sides_replay_reduces_the_mismatch(checkpoint, tmp_path):
    """The study of FACTS: decode in bfloat16, a full bfloat16 forward in the trainer, routers sharpened threefold."""
    path = tmp_path / "sharp"
    model = load(checkpoint("qwen3_moe", num_hidden_layers=6, num_experts=32, num_experts_per_tok=4))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(3)
    model.to(torch.bfloat16).save_pretrained(path)
    prompts = [[3 + (7 * i + 11 * j) % 90 for j in range(8)] for i in range(24)]
    params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, seed=0)
    with RolloutClient.local(path, dtype="bfloat16") as client:
        traces = client.sample(prompts, sampling_params=params)
    replay = RouterReplay(model)
    batch = ReplayBatch.collate(traces, spec=replay.spec)

    @torch.no_grad()
    def differences():
        found = batch.token_logprobs(model(**batch.model_inputs()).logits).numpy()
        return np.abs(found - batch.raw_logprobs)[batch.completion_mask]

    native = differences()
    with replay(batch):
        replayed = differences()
    assert replayed.mean() < 0.9 * native.mean()
    assert replayed.max() < native.max()
    report = replay.report()
    assert 0.001 < report.flipped_share < 0.5
    assert report.flipped_share == pytest.approx(_flipped_by_hooks(model, batch, replay), abs=1e-9)


def _flipped_by_hooks(model, batch, replay):
    """The live choice of each router under replay, from its own scores, against the recorded sets."""
    live = []
    handles = [
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, args: live.append(
                torch.topk((args[0] @ gate.weight.T).softmax(-1, dtype=torch.float), gate.top_k).indices
            )
        )
        for layer in model.model.layers
    ]
    with replay(batch), torch.no_grad():
        model(**batch.model_inputs())
    for handle in handles:
        handle.remove()
    rows = batch.route_mask.reshape(-1)
    chosen = torch.stack(live, 1).numpy()[rows]
    recorded = batch.routed_experts.reshape(-1, *chosen.shape[1:])[rows]
    return (np.sort(chosen, -1) != np.sort(recorded, -1)).any(-1).mean()
