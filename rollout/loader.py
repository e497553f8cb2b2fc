"""Load a checkpoint: safetensors only, and only models whose routers can be recorded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from rollout.sharded_loader import load_rank
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, its routing, and what generation needs to know of it. `tokenizer` is None without files."""

    model: Any
    spec: RoutingSpec
    tokenizer: Any
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def load_model(
    path: str, dtype: str, trust_remote_code: bool = False, part: tuple[int, int] | None = None
) -> LoadedModel:
    """Load a local directory or hub id; with `part` (rank, size) only this rank's experts, see sharded_loader.py.

    `trust_remote_code` lets the checkpoint run its own Python code, which the log says.

    Raises:
        FileNotFoundError: the path does not exist, or holds no safetensors weights.
        ValueError: not an MoE model, a family that the installed transformers does not know, or weights that are
            damaged, missing or quantised.
    """
    path = str(path)
    check_files(path)
    if trust_remote_code:
        logger.warning("trust_remote_code=True: model %r may run its own code in this process", path)
    config = load_config(path, trust_remote_code)
    _check_weights_are_plain(path, config)
    meta = meta_model(path, config, trust_remote_code)
    model = _load_weights(path, dtype, trust_remote_code, part).eval().requires_grad_(False)
    _check_rope(path, model)
    text = config.get_text_config()
    return LoadedModel(
        model=model,
        spec=RoutingSpec.from_model(meta),
        tokenizer=load_tokenizer(path, trust_remote_code),
        vocab_size=int(text.vocab_size),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 2**31),
        eos_token_ids=eos_token_ids(model),
    )


def _load_weights(path: str, dtype: str, trust_remote_code: bool, part: tuple[int, int] | None) -> Any:
    """Every weight comes from the files: transformers alone would draw missing ones at random and only warn."""
    try:
        with no_progress_bar():
            if part is not None:
                return load_rank(path, dtype, *part)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    except SafetensorError as error:
        raise ValueError(
            f"model {path!r}: a *.safetensors file is cut short or damaged ({error}); download or save it again"
        ) from error
    model, facts = loaded
    if missing := sorted(facts["missing_keys"]):
        raise ValueError(
            f"model {path!r}: {len(missing)} weights such as {missing[0]!r} are in no *.safetensors file; "
            "download or save the whole checkpoint again"
        )
    return model


@torch.inference_mode(False)
@torch.no_grad()
def move_model(model: Any, device: torch.device) -> None:
    """Move all weights in place; as ordinary tensors, so that they can still be replaced."""
    model.to(device)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers draws its bar even where stderr is no terminal."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer, or None when a local checkpoint ships none."""
    if Path(path).is_dir() and not any(Path(path).glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def check_files(path: str) -> None:
    """Raises FileNotFoundError for a path that is no checkpoint with safetensors weights, nor a hub id."""
    directory = Path(path)
    if not directory.is_dir():
        if directory.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise FileNotFoundError(
                f"model {path!r} is not a directory; give a checkpoint directory or a hub id 'owner/name'"
            )
        return
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"model {path!r} has no config.json; is it a checkpoint saved by save_pretrained?")
    if not any(directory.glob("*.safetensors")):
        others = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in directory.glob(pattern))
        raise FileNotFoundError(
            f"model {path!r} has no *.safetensors weights{f' but {others}' if others else ''}; pickled weights are "
            "never loaded: convert them with save_pretrained(..., safe_serialization=True)"
        )


def load_config(path: str, trust_remote_code: bool) -> Any:
    """The config of a local directory or hub id; errors as in `load_model`."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise FileNotFoundError(
            f"model {path!r} is no directory in {Path.cwd()}, and as a hub id it cannot be loaded: {error}"
        ) from error
    except (ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(
            f"model {path!r}: the installed transformers does not know this family or cannot read its config ({error})"
        ) from error


def _check_weights_are_plain(path: str, config: Any) -> None:
    """Quantised weights need kernels of their own, and their logits are not those that a trainer computes."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ValueError(
            f"model {path!r} has weights quantised with {str(method)!r}, which this engine does not run; "
            "use a checkpoint in float32, bfloat16 or float16"
        )


def meta_model(path: str, config: Any, trust_remote_code: bool = False) -> Any:
    """The model without memory, before any weight is read; ValueError when it has no routers that can be recorded."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            RoutingSpec.from_model(model)
    except ValueError as error:
        raise ValueError(f"model {path!r}: {error}") from error
    return model


def rope_types(model: Any) -> set[str]:
    """Kinds of rotary embedding that the model uses."""
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    flat = [kind for found in kinds for kind in (found.values() if isinstance(found, dict) else [found])]
    return {kind for kind in flat if isinstance(kind, str)}


def _check_rope(path: str, model: Any) -> None:
    """`dynamic` keeps the longest length ever seen in the module: every request would change its neighbours."""
    if "dynamic" in rope_types(model):
        raise ValueError(
            f"model {path!r} uses rope_type 'dynamic', whose frequencies depend on the requests before; it cannot be "
            "sampled reproducibly. Use a checkpoint with rope_type 'default', 'linear', 'llama3' or 'yarn'"
        )


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a sequence, from the generation config, else from the config."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    return tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (int(eos),)


def fingerprint(model: Any, tokenizer: Any) -> str:
    """16 hex digits that tell models of other shapes and other tokenizers apart; weights do not count.

    >>> fingerprint(model, tokenizer)
    '3f6c0f3a9be2d7c1'
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NO_IDENTITY}
    vocabulary = sorted(tokenizer.get_vocab().items()) if tokenizer is not None else None
    text = json.dumps([config, vocabulary], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_NO_IDENTITY = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "_attn_implementation"})
