"""GRPO on the built-in arithmetic model: sample in bfloat16, train in float32, replay the sampler's experts.

    python examples/grpo.py                     # about four minutes on two cores
    python examples/grpo.py --no-replay         # the trainer routes by itself
    python examples/grpo.py --ray 2             # the same, sampled by two Ray actors
    python examples/grpo.py --traces runs/a     # keep the traces

The loss is PPO-clip with one update per batch and the sampler's log-probabilities as the old ones, so everything the
trainer computes differently from the sampler ends up in the ratio. `compare_replay.py` runs both variants.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.tiny_moe import MAX_ANSWER_TOKENS, MODEL_PATH, exact_match, problems
from storage import ReplayBatch, Trace
from storage.stats import mismatch

CLIP = 0.2


@dataclass(frozen=True)
class Recipe:
    """One run; the defaults lift sampled accuracy clearly within the time limit."""

    replay: bool = True
    seed: int = 0
    steps: int = 400
    max_seconds: float = 240.0
    prompts: int = 32
    group: int = 8
    lr: float = 1.5e-4
    updates: int = 1
    sampler_dtype: str = "bfloat16"
    ray: int = 0
    traces: str | None = None
    evaluate: int = 1000


@dataclass
class Mismatch:
    """Trainer against sampler, over the sampled tokens of a step, before its update (k3: Schulman 2020)."""

    k3: float
    clipped: float
    above_ln2: float
    max_abs: float

    @classmethod
    def of(cls, trainer: torch.Tensor, batch: ReplayBatch) -> Mismatch:
        """From the trainer's log-probabilities `[R, S]`."""
        sampled = batch.logprobs[batch.completion_mask], trainer.numpy()[batch.completion_mask]
        difference, measured = sampled[1] - sampled[0], mismatch(*sampled)
        return cls(
            k3=measured["k3"],
            clipped=float(np.mean(np.abs(np.exp(difference) - 1) > CLIP)),
            above_ln2=float(np.mean(np.abs(difference) > np.log(2))),
            max_abs=measured["max_abs"],
        )


@dataclass
class History:
    """What a run saw, one entry per step or per evaluation `(step, accuracy)`."""

    reward: list[float] = field(default_factory=list)
    native: list[Mismatch] = field(default_factory=list)
    replayed: list[Mismatch] = field(default_factory=list)
    flipped_tokens: list[float] = field(default_factory=list)
    greedy: list[tuple[int, float]] = field(default_factory=list)
    sampled: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


def reward(trace: Trace) -> float:
    return exact_match(trace.text, trace.metadata["answer"])


def open_client(recipe: Recipe, traces: str | None) -> RolloutClient:
    arguments: dict[str, Any] = {"dtype": recipe.sampler_dtype, "traces": traces, "reward_fn": reward}
    if recipe.ray:
        return RolloutClient.ray(MODEL_PATH, num_actors=recipe.ray, **arguments)
    return RolloutClient.local(MODEL_PATH, max_running_requests=recipe.prompts * recipe.group, **arguments)


def sample(client: RolloutClient, sums: list[Any], temperature: float, seed: int, num_samples: int) -> list[Trace]:
    return client.sample(
        [problem.prompt for problem in sums],
        num_samples=num_samples,
        sampling_params=SamplingParams(temperature=temperature, max_tokens=MAX_ANSWER_TOKENS, seed=seed),
        metadata=[{"answer": problem.answer} for problem in sums],
    )


def accuracy(client: RolloutClient, n: int, temperature: float) -> float:
    traces = sample(client, problems(n, seed=12345, split="test"), temperature, seed=0, num_samples=1)
    return float(np.mean([trace.reward for trace in traces]))


def group_advantages(traces: list[Trace], group: int) -> np.ndarray:
    """Reward against the mean of the prompt's samples, by their standard deviation; 0 when all agree."""
    rewards = np.array([trace.reward for trace in traces]).reshape(-1, group)
    return ((rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)).ravel()


class Policy:
    """The trainer's model, its optimiser, and its routers under replay or not."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
        self.replay = RouterReplay(self.model)
        self._recipe = recipe
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._warmup = torch.optim.lr_scheduler.LinearLR(self._optimizer, 0.1, total_iters=10)

    def logprobs(self, batch: ReplayBatch) -> torch.Tensor:
        """Of the sampled tokens, `[R, S]`."""
        return batch.token_logprobs(self.model(**batch.model_inputs()).logits)

    @torch.no_grad()
    def compare(self, batch: ReplayBatch, history: History) -> torch.Tensor:
        """Measure the batch natively and under replay; the old log-probabilities as this run sees them."""
        with self.replay.record() as own:
            native = self.logprobs(batch)
        with self.replay(batch):
            replayed = self.logprobs(batch)
        history.native.append(Mismatch.of(native, batch))
        history.replayed.append(Mismatch.of(replayed, batch))
        history.flipped_tokens.append(_flipped_tokens(own.routed_experts, batch))
        return replayed if self._recipe.replay else native

    def update(self, batch: ReplayBatch) -> None:
        """One PPO-clip step on the token mean."""
        if self._recipe.replay:
            with self.replay(batch):
                self._loss(batch).backward()
        else:
            self._loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._warmup.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, batch: ReplayBatch) -> torch.Tensor:
        ratio = (self.logprobs(batch) - torch.from_numpy(batch.logprobs)).exp()
        advantage = torch.from_numpy(batch.advantages)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return -(gain * torch.from_numpy(batch.loss_mask)).sum() / float(batch.loss_mask.sum())


def _flipped_tokens(own: np.ndarray, batch: ReplayBatch) -> float:
    """Share of the recorded tokens of which at least one layer would have taken another set of experts."""
    recorded = batch.routed_experts.reshape(own.shape)
    flipped = (np.sort(own, -1) != np.sort(recorded, -1)).any((1, 2))
    return float(flipped[batch.route_mask.ravel()].mean())


def run(recipe: Recipe, progress: bool = True) -> History:
    """Train; the accuracy is measured before and after on sums that no training saw."""
    torch.set_num_threads(1)
    history, policy = History(), Policy(recipe)
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_client(recipe, recipe.traces or scratch) as client,
        open_client(Recipe(ray=0), None) as judge,
    ):
        _train(recipe, policy, client, judge, history, progress)
    return history


def _train(
    recipe: Recipe, policy: Policy, client: RolloutClient, judge: RolloutClient, history: History, progress: bool
) -> None:
    _evaluate(judge, recipe, 0, history)
    sums = problems(recipe.steps * recipe.prompts, seed=1000 + recipe.seed)
    started = time.perf_counter()
    bar = tqdm(range(recipe.steps), desc="grpo", unit="step", disable=None if progress else True)
    for step in bar:
        if time.perf_counter() - started > recipe.max_seconds:
            break
        chunk = sums[step * recipe.prompts : (step + 1) * recipe.prompts]
        traces = sample(client, chunk, 1.0, seed=recipe.seed, num_samples=recipe.group)
        _learn(recipe, policy, traces, history)
        client.update_weights(policy.model.state_dict(), version=step + 1)
        bar.set_postfix(_postfix(history))
    history.seconds = time.perf_counter() - started
    judge.update_weights(policy.model.state_dict(), version=1)
    _evaluate(judge, recipe, len(history.reward), history)


def _learn(recipe: Recipe, policy: Policy, traces: list[Trace], history: History) -> None:
    history.reward.append(float(np.mean([trace.reward for trace in traces])))
    advantages = group_advantages(traces, recipe.group)
    batch = ReplayBatch.collate(traces, spec=policy.replay.spec, advantages=list(advantages))
    policy.compare(batch, history)
    useful = np.flatnonzero(advantages)  # groups that agree carry no gradient
    order = np.random.default_rng([recipe.seed, len(history.reward)]).permutation(useful)
    for part in np.array_split(order, recipe.updates):
        if len(part):
            chosen = [traces[i] for i in part]
            policy.update(ReplayBatch.collate(chosen, spec=policy.replay.spec, advantages=list(advantages[part])))


def _evaluate(judge: RolloutClient, recipe: Recipe, step: int, history: History) -> None:
    history.greedy.append((step, accuracy(judge, recipe.evaluate, 0.0)))
    history.sampled.append((step, accuracy(judge, recipe.evaluate, 1.0)))


def _postfix(history: History) -> dict[str, str]:
    return {
        "reward": f"{np.mean(history.reward[-10:]):.3f}",
        "k3 native": f"{history.native[-1].k3:.1e}",
        "k3 replay": f"{history.replayed[-1].k3:.1e}",
        "flipped": f"{history.flipped_tokens[-1]:.1%}",
    }


def summary(recipe: Recipe, history: History) -> str:
    """A few lines a person can read."""
    native = {name: np.mean([asdict(m)[name] for m in history.native]) for name in asdict(history.native[0])}
    replay = {name: np.mean([asdict(m)[name] for m in history.replayed]) for name in asdict(history.replayed[0])}
    (_, greedy0), (_, greedy1) = history.greedy
    (_, sampled0), (_, sampled1) = history.sampled
    return "\n".join(
        [
            f"{len(history.reward)} steps in {history.seconds:.0f} s, replay {'on' if recipe.replay else 'off'}",
            f"exact match, greedy:  {greedy0:.3f} -> {greedy1:.3f} on sums that no training saw",
            f"exact match, sampled: {sampled0:.3f} -> {sampled1:.3f}",
            f"tokens with a flipped layer {np.mean(history.flipped_tokens):.1%}",
            *(f"{name:10} {native[name]:.2e} native, {replay[name]:.2e} under replay" for name in native),
        ]
    )


def parse(arguments: list[str] | None = None) -> Recipe:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction, default=Recipe.replay)
    for name in ("seed", "steps", "prompts", "group", "updates", "ray", "evaluate"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Recipe, name))
    parser.add_argument("--max-seconds", type=float, default=Recipe.max_seconds)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--sampler-dtype", choices=("bfloat16", "float32"), default=Recipe.sampler_dtype)
    parser.add_argument("--traces", help="directory of the dataset; none is kept by default")
    return Recipe(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    chosen = parse()
    print(summary(chosen, run(chosen)))
