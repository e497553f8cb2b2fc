"""Every layout is the same computation: replay in fp32 scores each token as in a right-padded batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from rollout.tiny_moe import MODEL_PATH
from storage import ReplayBatch, Trace, merge_turns
from tests.rollout.routes import random_routes

SHAPES = [(4, 5), (1, 2), (7, 1), (3, 6), (2, 3)]
OPTIONS = [
    {"padding": "left"},
    {"padding": "split"},
    {"padding": "packed"},
    {"padding": "right", "pad_routes": "strided"},
    {"padding": "split", "pad_routes": "strided", "pad_to_multiple_of": 8},
    {"padding": "packed", "pad_routes": "strided", "pad_to_multiple_of": 8},
]


@pytest.fixture(params=["sdpa", "eager"], scope="module")
def model(request):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, dtype=torch.float32, attn_implementation=request.param
    ).eval()


def make_trace(spec, index: int, prompt: int, completion: int) -> Trace:
    """Random tokens and routes that the model would not choose, so that a wrong row changes every score behind it."""
    tokens = np.random.default_rng(index).integers(2, 15, prompt + completion)
    routes = random_routes(spec, prompt + completion - 1, seed=index)
    logprobs = np.full(completion, -1.0)
    return Trace(f"s/{index}", 0, tokens[:prompt], tokens[prompt:], logprobs, routes, "length", reward=float(index))


@pytest.fixture
def traces(model) -> list[Trace]:
    spec = RouterReplay(model).spec
    return [make_trace(spec, index, *shape) for index, shape in enumerate(SHAPES)]


@torch.no_grad()
def scores(model, batch: ReplayBatch) -> np.ndarray:
    """Log-probabilities of all sampled tokens, one sequence after the other."""
    with RouterReplay(model)(batch):
        logits = model(**batch.model_inputs()).logits
    return batch.token_logprobs(logits).numpy()[batch.completion_mask]


@torch.no_grad()
def logits_of(model, batch: ReplayBatch) -> torch.Tensor:
    """Logits `[tokens, V]` of all tokens that are no padding."""
    with RouterReplay(model)(batch):
        return model(**batch.model_inputs()).logits[torch.from_numpy(batch.attention_mask).bool()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_layout_scores_tokens_as_right_padding_does(model, traces, options):
    spec = RouterReplay(model).spec
    expected = scores(model, ReplayBatch.collate(traces, spec=spec))
    assert len(expected) == sum(completion for _, completion in SHAPES)
    np.testing.assert_allclose(scores(model, ReplayBatch.collate(traces, spec=spec, **options)), expected, atol=1e-5)


def test_sequences_of_a_packed_batch_do_not_attend_to_each_other(model, traces):
    """Logits of each position equal those of the sequence in a forward of its own."""
    spec = RouterReplay(model).spec
    packed = ReplayBatch.collate(traces, spec=spec, padding="packed")
    alone = torch.cat([logits_of(model, ReplayBatch.collate([trace], spec=spec)) for trace in traces])
    torch.testing.assert_close(logits_of(model, packed), alone, atol=3e-5, rtol=1e-5)
    with RouterReplay(model)(packed), torch.no_grad():
        together = model(input_ids=packed.model_inputs()["input_ids"]).logits[0]
    assert (together - alone).abs().max() > 1, "without restarting positions the same tokens score otherwise"


def test_routes_in_the_wrong_column_would_be_seen(model, traces):
    """The comparison above can fail: rows moved by one column change the scores."""
    spec = RouterReplay(model).spec
    batch = ReplayBatch.collate(traces, spec=spec, padding="packed")
    expected = scores(model, batch)
    batch.routed_experts[:, 1:4] = batch.routed_experts[:, :3].copy()
    assert np.abs(scores(model, batch) - expected).max() > 1e-2


def test_micro_batches_and_shards_score_like_the_whole(model, traces):
    spec = RouterReplay(model).spec
    for padding in ("right", "split", "packed"):
        batch = ReplayBatch.collate(traces, spec=spec, padding=padding)
        whole = scores(model, batch)
        parts = [scores(model, part) for part in batch.micro_batches(3)]
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
        ranks = [scores(model, batch.shard(dp=(rank, 2))) for rank in range(2)]
        np.testing.assert_allclose(np.concatenate(ranks), whole, atol=1e-5)


def test_truncation_leaves_the_tokens_before_it_as_they_were(model, traces):
    spec = RouterReplay(model).spec
    whole, cut = (ReplayBatch.collate(traces, spec=spec, max_length=n) for n in (None, 8))
    kept = whole.completion_mask & (np.arange(9) < 8)
    assert cut.truncated.sum() == 2
    full = np.zeros(whole.completion_mask.shape, np.float32)
    full[whole.completion_mask] = scores(model, whole)
    np.testing.assert_allclose(scores(model, cut), full[kept], atol=1e-5)


def test_a_merged_conversation_replays_like_the_trace_of_all_its_tokens(model):
    """Cut one recording into two turns, the second one a delta: joined, it scores as before."""
    spec = RouterReplay(model).spec
    whole = make_trace(spec, 9, 3, 7)
    tokens, routes, logprobs = whole.token_ids, whole.routed_experts, whole.logprobs
    first = Trace("c/0", 0, tokens[:3], tokens[3:5], logprobs[:2], routes[:4], "stop")
    second = Trace("c/1", 0, tokens[:7], tokens[7:], logprobs[:3], routes[4:], "stop", route_start=4)
    merged = ReplayBatch.collate([merge_turns([first, second])], spec=spec)
    expected = scores(model, ReplayBatch.collate([whole], spec=spec))
    np.testing.assert_allclose(scores(model, merged), expected[[0, 1, 4, 5, 6]], atol=1e-5)


@pytest.mark.parametrize("padding", ["right", "left", "split", "packed"])
def test_the_missing_share_counts_inputs_without_a_row_in_every_layout(model, traces, padding):
    """2 of the 8 inputs of the first sequence were not recorded, of 8 + 2 + 7 + 8 + 4 in all."""
    spec = RouterReplay(model).spec
    trace = traces[0]
    valid = np.arange(8) >= 2
    rows = np.where(valid[:, None, None], trace.routed_experts, 0)
    fields = (trace.prompt_ids, trace.completion_ids, trace.logprobs, rows, "length")
    part = Trace("s/0", 0, *fields, route_valid=valid)
    for pad_routes in ("native", "strided"):
        batch = ReplayBatch.collate([part, *traces[1:]], spec=spec, padding=padding, pad_routes=pad_routes)
        replay = RouterReplay(model)
        with replay(batch), torch.no_grad():
            model(**batch.model_inputs())
        assert replay.report().missing_share == pytest.approx(2 / 29)
