"""Conversations: turns carry only what is new, and together they are one sequence with exact rows."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import ReplayBatch
from tests.rollout.flipped import flipped_selection
from tests.rollout.oracle import Oracle, log_softmax, routes_agree
from tests.rollout.probes import parts_of, prompts, wait_until

SAMPLED = SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=3)
PROMPT, TOOL, USER = prompts(1, length=9)[0], [11, 12, 13], [20]


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3_moe")


def converse(client, flip_from=None):
    session = client.session(SAMPLED)
    session.sample(PROMPT)
    with flipped_selection(client, flip_from):
        session.sample(TOOL)
        session.sample(USER, sampling_params=SAMPLED.model_copy(update={"max_tokens": 4}))
    return session


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_turns_are_one_sequence(path, prefix_cache):
    with RolloutClient.local(path, prefix_cache=prefix_cache) as client:
        session = converse(client)
        computed = client.backend.stats.tokens
    first, second, _ = session.turns
    assert second.prompt_ids == [*first.token_ids, *TOOL]
    assert [turn.route_start for turn in session.turns] == [0, 14, 23]
    assert [turn.route_len for turn in session.turns] == [14, 9, 5], "the boundary token's row comes with the next turn"
    merged = session.merged()
    truth = Oracle(path).forward(merged.token_ids.tolist())
    assert routes_agree(truth, merged.routed_experts)
    assert merged.sampled.tolist() == [False] * 9 + [True] * 6 + [False] * 3 + [True] * 6 + [False] + [True] * 4
    for at in np.flatnonzero(merged.sampled):
        expected = log_softmax(truth.logits[at - 1])[merged.token_ids[at]]
        assert abs(merged.raw_logprobs[at] - expected) < 1e-5
    assert not merged.logprobs[~merged.sampled].any()
    assert computed == (28 if prefix_cache else 14 + 23 + 28)


def test_a_replay_batch_takes_the_conversation_with_a_mask_on_what_was_sampled(path):
    oracle = Oracle(path)
    with RolloutClient.local(path) as client:
        merged = converse(client).merged()
    replay = RouterReplay(oracle.model)
    batch = ReplayBatch.collate([merged], spec=replay.spec)
    assert int(batch.loss_mask.sum()) == 6 + 6 + 4
    with replay(batch):
        oracle.model(**batch.model_inputs())
    assert (replay.report().missing_share, replay.report().flipped_share) == (0.0, 0.0)


def test_earlier_turns_keep_their_experts_found_in_the_cache_or_computed_again(path):
    """The routers choose otherwise from the second turn on. Both ways end in the same bits."""
    found = {}
    for prefix_cache in (False, True):
        with RolloutClient.local(path, batch_invariant=True, prefix_cache=prefix_cache) as client:
            merged = converse(client, flip_from=0).merged()
            found[prefix_cache] = (
                merged.token_ids.tolist(),
                merged.raw_logprobs.tobytes(),
                merged.routed_experts.tolist(),
            )
        native = Oracle(path).forward(merged.token_ids.tolist())
        assert routes_agree(native, merged.routed_experts[:14])
        assert (merged.routed_experts[14] != native.routes[14]).any()
    assert found[False] == found[True]


def test_plain_prompts_that_extend_a_trace_can_leave_out_its_rows(path):
    with RolloutClient.local(path) as client:
        (first,) = client.sample([PROMPT], sampling_params=SAMPLED)
        prompt = [*first.token_ids, *TOOL]
        (whole,) = client.sample([prompt], sampling_params=SAMPLED, step=5)
        (delta,) = client.sample([prompt], sampling_params=SAMPLED, step=5, routed_experts_start_len=14)
        with pytest.raises(ValueError, match=r"routed_experts_start_len of prompt 0 is 18, need \[0, 18\)"):
            client.sample([prompt], routed_experts_start_len=18)
    assert delta.route_start == 14
    assert np.array_equal(delta.routed_experts, whole.routed_experts[14:])
    assert delta.logprobs.tobytes() == whole.logprobs.tobytes()


def test_text_between_turns_gets_no_special_tokens():
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        session = client.session(SAMPLED)
        first = session.sample("12+34=")
        second = session.sample("7+1=")
        tokenizer = client.backend._built.tokenizer
        assert second.prompt_ids == [*first.token_ids, *tokenizer("7+1=", add_special_tokens=False)["input_ids"]]


def test_without_capture_there_is_no_session(path):
    with RolloutClient.local(path, enable_return_routed_experts=False) as client:
        with pytest.raises(ValueError, match="a session needs an engine that can repeat recorded routes"):
            client.session()


def test_two_threads_cannot_take_a_turn_at_once(path):
    with RolloutClient.local(path) as client:
        session = client.session(SAMPLED)
        client.pause()
        turn = threading.Thread(target=session.sample, args=(PROMPT,))
        turn.start()
        wait_until(lambda: not parts_of(client)[1].idle)
        with pytest.raises(RuntimeError, match="a turn of this session is under way"):
            session.sample(PROMPT)
        client.resume()
        turn.join()
        session.sample(TOOL)
        assert session.turns[1].prompt_ids == [*session.turns[0].token_ids, *TOOL]
