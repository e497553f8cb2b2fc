"""Bad input: one error that names the value and the remedy, no thread left behind, no byte written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import RoutingSpec, SpecMismatchError, StepExistsError, TraceDataset, TraceWriter
from tests.rollout.threads import no_thread_left

SHORT = SamplingParams(max_tokens=4, seed=0)
PROMPT = [4, 5, 13, 6, 14]  # 12+3=


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def nothing_left(tmp_path):
    """After the test no thread is left that was not there before, and the traces folder was never made."""
    with no_thread_left():
        yield tmp_path / "traces"
    assert not (tmp_path / "traces").exists()


# --- models -----------------------------------------------------------------------------------------------------


def dense(path: Path) -> Path:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def changed_config(path: Path, **changes) -> Path:
    shutil.copytree(MODEL_PATH, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def pickled(path: Path) -> Path:
    shutil.copytree(MODEL_PATH, path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return path


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def a_file(path: Path) -> Path:
    path.write_text("weights")
    return path


def cut_short(path: Path) -> Path:
    shutil.copytree(MODEL_PATH, path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return path


def incomplete(path: Path) -> Path:
    shutil.copytree(MODEL_PATH, path)
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (dense, "Qwen3ForCausalLM has no MoE router: it is dense.* Use a mixture-of-experts checkpoint"),
        (lambda p: changed_config(p, model_type="moe_of_2031"), "installed transformers does not know .*moe_of_2031"),
        (
            pickled,
            r"no \*\.safetensors weights but \['pytorch_model.bin'\]; pickled weights are never loaded: convert them",
        ),
        (empty, r"has no config.json; is it a checkpoint saved by save_pretrained\?"),
        (a_file, "is not a directory; give a checkpoint directory or a hub id"),
        (lambda p: p / "missing", "missing' is not a directory; give a checkpoint directory or a hub id"),
        (cut_short, r"a \*\.safetensors file is cut short or damaged .* download or save it again"),
        (incomplete, r"1 weights such as 'model.norm.weight' are in no \*\.safetensors file; download or save"),
    ],
    ids=["dense", "unknown family", "pickle only", "empty folder", "a file", "missing", "cut short", "incomplete"],
)
def test_a_model_that_cannot_be_used_is_refused(nothing_left, tmp_path, make, message):
    path = make(tmp_path / "model")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        RolloutClient.local(path, traces=nothing_left)
    assert str(path) in str(caught.value), "the message must name the model"


def test_a_relative_path_that_is_missing_is_not_taken_for_a_hub_id(nothing_left):
    with pytest.raises(FileNotFoundError, match=r"'\./nowhere' is not a directory"):
        RolloutClient.local("./nowhere", traces=nothing_left)


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_token": 8}, "unknown EngineOptions key 'max_batch_token': did you mean 'max_batch_tokens'"),
        ({"dtype": "float8"}, "dtype\n.*'float32'.*input_value='float8'"),
        ({"max_running_requests": 0}, "max_running_requests\n.*greater than or equal to 1 .*input_value=0"),
        ({"kv_tokens": 1}, "kv_tokens\n.*greater than or equal to 2 .*input_value=1"),
        ({"experts_implementation": "magic"}, "experts_implementation\n.*'eager'.*input_value='magic'"),
        ({"device": "toaster"}, "device 'toaster' is not supported by this engine; use device='cpu'"),
        ({"run": "a/b"}, "run 'a/b' must be a printable name without '/'"),
        ({"run": ""}, "run '' must be a printable name without '/'"),
    ],
    ids=str,
)
def test_an_option_that_is_unknown_or_out_of_range_is_refused(nothing_left, options, message):
    with pytest.raises(ValueError, match=message):
        RolloutClient.local(MODEL_PATH, traces=nothing_left, **options)


# --- datasets ---------------------------------------------------------------------------------------------------


def test_a_dataset_of_another_model_is_refused_and_not_touched(tmp_path):
    TraceWriter(tmp_path / "t", RoutingSpec.uniform(num_sites=2, num_experts=4, top_k=1)).close()
    before = files(tmp_path)
    with no_thread_left(), pytest.raises(SpecMismatchError, match=str(tmp_path / "t")):
        RolloutClient.local(MODEL_PATH, traces=tmp_path / "t")
    assert files(tmp_path) == before


def test_a_traces_path_that_is_a_file_is_refused_and_not_touched(tmp_path):
    (tmp_path / "t").write_text("mine")
    with no_thread_left(), pytest.raises(OSError, match=str(tmp_path / "t")):
        RolloutClient.local(MODEL_PATH, traces=tmp_path / "t")
    assert (tmp_path / "t").read_text() == "mine"


def test_a_step_that_exists_is_refused_before_anything_is_sampled(tmp_path):
    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t") as client:
        client.sample([PROMPT], sampling_params=SHORT, step=3)
        before, forwards = files(tmp_path), client.backend.stats.forwards
        with pytest.raises(StepExistsError, match="step 3 exists already; use step=4 or leave step out"):
            client.sample([PROMPT], sampling_params=SHORT, step=3)
        with pytest.raises(StepExistsError, match="step 3 exists already"), client.step(3):
            pytest.fail("the step must not open")
        assert client.backend.stats.forwards == forwards
        assert files(tmp_path) == before
    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t") as again:
        with pytest.raises(StepExistsError, match="step 3 exists already"):
            again.sample([PROMPT], sampling_params=SHORT, step=3)
        assert again.sample([PROMPT], sampling_params=SHORT)[0].step == 4


# --- requests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One client with a small pool; every test checks that it stays idle and wrote nothing."""
    root = tmp_path_factory.mktemp("shared")
    with RolloutClient.local(MODEL_PATH, traces=root / "t", kv_tokens=48, max_running_requests=2) as client:
        yield client, root


@pytest.fixture
def client(shared):
    client, root = shared
    before, forwards = files(root), client.backend.stats.forwards
    with no_thread_left():
        yield client
    assert files(root) == before
    assert client.backend.stats.forwards == forwards, "a request was started"
    assert TraceDataset(root / "t").steps == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SHORT, "prompt 1 is empty; it needs at least one token"),
        ("", SHORT, "prompt 1 is empty; it needs at least one token"),
        (
            [4] * 45,
            SHORT,
            r"prompt 1: 45 prompt tokens \+ max_tokens 4 = 49 exceed 48 \(kv_tokens, the key/value pool\)",
        ),
        (
            PROMPT,
            SamplingParams(max_tokens=44),
            r"prompt 1: 5 prompt tokens \+ max_tokens 44 = 49 exceed 48 .* lower max_tokens",
        ),
        ([3, 15], SHORT, r"prompt 1 has token id 15, outside the vocabulary \[0, 15\)"),
        ([3, -7], SHORT, r"prompt 1 has token id -7, outside the vocabulary \[0, 15\)"),
        (PROMPT, SamplingParams(stop_token_ids=(15,)), r"stop_token_ids of prompt 1 has token id 15, outside"),
        (None, SHORT, "prompt 1 is None, need a string or a list of token ids"),
        ([0.5], SHORT, r"prompt 1 is \[0.5\], need a string or a list of token ids"),
    ],
    ids=str,
)
def test_one_bad_prompt_is_named_and_nothing_of_its_call_starts(client, prompt, params, message):
    with pytest.raises((ValueError, TypeError), match=message):
        client.sample([PROMPT, prompt], sampling_params=[SHORT, params])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0, need an integer of at least 1"),
        ({"step": -2}, "step is -2, need an integer from 0 on"),
        ({"prompt_keys": ["a", "b"]}, "prompt_keys must be 1 different strings"),
        ({"prompt_keys": ["a/b"]}, "prompt key 'a/b' is empty, has a '/'"),
        ({"metadata": [{"x": {1, 2}}]}, r"metadata of prompt 0 is \{'x': \{1, 2\}\}, need JSON values"),
        ({"metadata": {"x": float("nan")}}, r"metadata of prompt 0 is \{'x': nan\}, need JSON values"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_and_nothing_starts(client, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        client.sample([PROMPT], sampling_params=SHORT, **arguments)


def test_top_p_of_zero_is_refused_when_it_is_written_down():
    with pytest.raises(ValueError, match=r"top_p\n.*greater than 0 .*input_value=0"):
        SamplingParams(top_p=0)


def test_references_of_a_local_engine_are_refused_and_nothing_is_written(tmp_path):
    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t") as client:
        with pytest.raises(ValueError, match=r"as_refs=True needs RolloutClient\.ray"):
            list(client.stream([PROMPT], sampling_params=SHORT, as_refs=True))
        assert TraceDataset(tmp_path / "t").steps == []
        assert client.sample([PROMPT], sampling_params=SHORT)[0].step == 0


def test_a_refused_call_does_not_use_up_its_step(client):
    for _ in range(2):
        with pytest.raises(ValueError, match="prompt 0 is empty"):
            client.sample([[]], sampling_params=SHORT, step=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: 7, r"weights are a int; pass a state dict .*, a directory of safetensors files, or an iterator"),
        (lambda state: {**state, "extra": torch.zeros(1)}, r"unknown \['extra'\]; nothing was changed"),
        (lambda state: dict(list(state.items())[1:]), r"missing \['model.embed_tokens.weight'\]; nothing was changed"),
        (
            lambda state: {**state, "model.norm.weight": torch.zeros(3)},
            r"'model.norm.weight' is .*\(3,\).*, need dense .*\(64,\)",
        ),
        (
            lambda state: {**state, "model.norm.weight": torch.zeros(64, dtype=torch.int8)},
            "is torch.int8 .*, need dense floating point",
        ),
    ],
    ids=["a path", "unknown name", "missing name", "wrong shape", "wrong dtype"],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(client, change, message):
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    with pytest.raises(ValueError, match=message):
        client.update_weights(change(model.state_dict()), version=1)
    served = client.backend._built
    assert served.engine.weight_version == 0
    for name, tensor in served.runner.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_version_that_does_not_rise_is_refused(client):
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    with pytest.raises(ValueError, match="weight version 0 is not above the current 0; force=True allows it"):
        client.update_weights(model.state_dict(), version=0)


def test_beyond_the_models_positions(nothing_left):
    with RolloutClient.local(MODEL_PATH) as client:
        positions = AutoConfig.from_pretrained(MODEL_PATH).max_position_embeddings
        with pytest.raises(
            ValueError, match=rf"= {positions + 1} exceed {positions} \(the model's positions\); shorten"
        ):
            client.sample([[4] * (positions - 3)], sampling_params=SHORT)
        (trace,) = client.sample([[4] * (positions - 4)], sampling_params=SHORT)
        assert trace.finish_reason in ("length", "stop")


def test_text_without_a_tokenizer(nothing_left, checkpoint):
    with RolloutClient.local(checkpoint("qwen3_moe")) as client:
        with pytest.raises(
            ValueError, match="prompt 0 needs a tokenizer and this checkpoint ships none; pass token ids"
        ):
            client.sample(["12+3="], sampling_params=SHORT)
        with pytest.raises(ValueError, match="prompt 0 needs a tokenizer"):
            client.sample([[5]], sampling_params=SamplingParams(stop="x"))


def test_a_closed_client_says_so():
    client = RolloutClient.local(MODEL_PATH)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed; make a new one"):
        client.sample([PROMPT], sampling_params=SHORT)
    with pytest.raises(RuntimeError, match="this client is closed; make a new one"):
        client.update_weights({}, version=1)
