"""One policy step, end to end: sample with rewards, replay, learn, push the weights, sample again."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.tiny_moe import MODEL_PATH, exact_match, problems
from storage import ReplayBatch, TraceDataset

PROBLEMS = problems(12, seed=3, digits=2)
PROMPTS = [problem.prompt for problem in PROBLEMS]
FACTS = [{"answer": problem.answer} for problem in PROBLEMS]
PARAMS = SamplingParams(temperature=1.0, max_tokens=5, seed=0)
GROUP = 4


def reward(trace):
    return exact_match(trace.text, trace.metadata["answer"])


def advantages(rewards: np.ndarray) -> torch.Tensor:
    """GRPO: a sample's reward against the mean of its prompt's samples."""
    groups = torch.from_numpy(rewards).view(-1, GROUP)
    return (groups - groups.mean(1, keepdim=True)).reshape(-1)


@pytest.fixture
def policy():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)


@pytest.fixture
def client(tmp_path):
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=tmp_path / "t", reward_fn=reward) as client:
        yield client


def sample(client):
    return client.sample(PROMPTS, num_samples=GROUP, sampling_params=PARAMS, metadata=FACTS)


def test_a_step_of_grpo_raises_the_expected_reward_of_its_own_samples(policy, client, tmp_path):
    traces = sample(client)
    batch = ReplayBatch.collate(traces, spec=client.info.spec)
    weight = advantages(batch.rewards)
    assert weight.abs().sum() > 0, "some group needs a right and a wrong answer, or there is nothing to learn"
    replay = RouterReplay(policy)

    def surrogate():
        return (weight[:, None] * batch.token_logprobs(policy(**batch.model_inputs()).logits)).sum() / len(traces)

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    with replay(batch):
        before = surrogate()
        (-before).backward()
    optimizer.step()
    with torch.no_grad(), replay(batch):
        assert surrogate() > before

    client.update_weights(policy.state_dict(), version=1)
    again = sample(client)
    assert {span.version for trace in traces for span in trace.weight_versions} == {0}
    assert {span.version for trace in again for span in trace.weight_versions} == {1}
    dataset = TraceDataset(tmp_path / "t")
    assert (dataset.steps, dataset.verify()) == ([0, 1], [])
    assert {trace.weight_version for trace in dataset.iter(step=1)} == {1}


def test_before_the_update_trainer_and_engine_agree(policy, client):
    """The recorded experts are the policy's own, and the recorded logprobs those of its forward under replay."""
    batch = ReplayBatch.collate(sample(client), spec=client.info.spec)
    replay = RouterReplay(policy)
    with torch.no_grad(), replay(batch):
        found = batch.token_logprobs(policy(**batch.model_inputs()).logits).numpy()
    np.testing.assert_allclose(found, batch.raw_logprobs, atol=1e-4)
    np.testing.assert_allclose(found, batch.logprobs, atol=1e-4)
    report = replay.report()
    assert report.flipped_share < 1e-3
    assert report.missing_share == 0


def test_after_the_update_the_engine_samples_from_the_new_weights(policy, client):
    """Greedy tokens and logprobs are those of the changed policy, and not those of the old one."""
    greedy = SamplingParams(temperature=0, max_tokens=5)
    old = client.sample(PROMPTS, sampling_params=greedy, metadata=FACTS)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    client.update_weights(policy.state_dict(), version=4)
    new = client.sample(PROMPTS, sampling_params=greedy, metadata=FACTS)
    assert [t.completion_ids for t in new] != [t.completion_ids for t in old]
    for trace in new:
        with torch.no_grad():
            logits = policy(torch.tensor([trace.token_ids])).logits[0, len(trace.prompt_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == trace.completion_ids
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(trace.completion_ids)[:, None])[:, 0]
        np.testing.assert_allclose(trace.raw_logprobs, expected.numpy(), atol=1e-4)


def test_weights_in_another_precision_are_cast_and_the_callers_tensors_are_not_kept(policy, client):
    """The checkpoint is bfloat16, so the way through bfloat16 loses nothing and the tokens stay."""
    greedy = SamplingParams(temperature=0, max_tokens=5)
    before = client.sample(PROMPTS, sampling_params=greedy, metadata=FACTS)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in policy.state_dict().items()}
    client.update_weights(state, version=1)
    for tensor in state.values():
        tensor.zero_()
    after = client.sample(PROMPTS, sampling_params=greedy, metadata=FACTS)
    assert [t.completion_ids for t in after] == [t.completion_ids for t in before]
    assert all(np.array_equal(a.routed_experts, b.routed_experts) for a, b in zip(after, before, strict=True))
