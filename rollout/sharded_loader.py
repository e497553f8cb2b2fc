"""Load one rank's part of a checkpoint: all that is not an expert, and the rank's own experts.

Other ranks' experts are never read: the model is built with smaller expert weights, and transformers' own loader, with
its conversions from checkpoint names, gets a state dict that holds this rank's experts only, counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from rollout.packed_experts import is_experts
from rollout.parallel import ExpertRange

NUMBERED = re.compile(r"\.experts\.(\d+)\.")


def load_rank(path: str, dtype: Any, rank: int, size: int) -> Any:
    """The model in eval mode, with `num_experts // size` experts in each MoE layer.

    Raises:
        ValueError: when `size` does not divide the experts, or the family's expert weights cannot be divided, by name.
    """
    plain, config = _class_of(AutoConfig.from_pretrained(path))
    experts = _range_of(plain, config, rank, size)
    try:
        model, facts = _divided(plain, experts).from_pretrained(
            None, config=config, state_dict=dict(_own_tensors(path, experts)), dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise ValueError(
            f"{plain.__name__}: its expert weights cannot be divided among ranks ({error}); use dp_size=1"
        ) from error
    if facts["missing_keys"]:
        raise ValueError(
            f"{plain.__name__}: weights such as {sorted(facts['missing_keys'])[0]!r} are in no file of {path!r}; "
            "download or save the whole checkpoint again, or use dp_size=1"
        )
    return model.eval().requires_grad_(False)


def check_divides(path: str, size: int, trust_remote_code: bool = False) -> None:
    """Raises the ValueError of `load_rank` before any rank is started; reads the config alone."""
    if trust_remote_code:
        raise ValueError(
            f"trust_remote_code=True with dp_size={size}: ranks divide the experts of classes that transformers has, "
            f"not of code in {path!r}; use dp_size=1, or leave trust_remote_code out"
        )
    config = AutoConfig.from_pretrained(path)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:  # what else there is, the loader names
        _range_of(*_class_of(config), 0, size)


def _class_of(config: Any) -> tuple[Any, Any]:
    """The class that transformers would choose, and the config that it takes: of several towers, that of the text."""
    plain: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if plain.config_class is config.sub_configs.get("text_config"):
        return plain, config.get_text_config()
    return plain, config


def _range_of(plain: Any, config: Any, rank: int, size: int) -> ExpertRange:
    ranges: dict[int, ExpertRange] = {}
    with torch.device("meta"):
        for module in plain(config).modules():
            if is_experts(module):
                ranges[module.num_experts] = ExpertRange.of(rank, size, module.num_experts)
    if len(ranges) != 1:
        raise ValueError(
            f"{plain.__name__} has {f'layers of {sorted(ranges)} experts' if ranges else 'no experts'} that go through "
            "transformers' experts interface; this family cannot be divided among ranks, use dp_size=1"
        )
    (experts,) = ranges.values()
    return experts


def _divided(plain: type, experts: ExpertRange) -> Any:
    """The model's class, which shrinks its expert weights when it is built.

    Name and module are the same: by them transformers knows how checkpoints of the class name their weights.
    """

    def init(self: Any, config: Any) -> None:
        plain.__init__(self, config)  # type: ignore[misc]
        for module in self.modules():
            if is_experts(module):
                _shrink(module, experts)

    return type(plain.__name__, (plain,), {"__init__": init, "__module__": plain.__module__})


def _shrink(module: Any, experts: ExpertRange) -> None:
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.shape[0] == experts.num_experts:
            shape = (experts.end - experts.start, *weight.shape[1:])
            setattr(module, name, torch.nn.Parameter(weight.new_empty(shape), requires_grad=False))
    module.num_experts = experts.end - experts.start
    module.expert_range = experts


def own_experts(model: Any) -> ExpertRange | None:
    """Which experts a model from `load_rank` holds; None for one that has all."""
    return next((m.expert_range for m in model.modules() if hasattr(m, "expert_range")), None)


def checkpoint_directory(path: str) -> Path:
    """A local directory as it is; that of a hub id, downloaded if need be."""
    directory = Path(path)
    if directory.is_dir():
        return directory
    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))


def _own_tensors(path: str, experts: ExpertRange) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(checkpoint_directory(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield from _own_tensor(tensors, name, experts)


def own_tensor_name(name: str, experts: ExpertRange) -> str | None:
    """The name of one expert's tensor on the rank that holds it, counted from 0; None when that is another rank.

    A number that no expert has stays, so that it is refused as unknown.
    """
    numbered = NUMBERED.search(name)
    if numbered is None or (index := int(numbered[1])) >= experts.num_experts:
        return name
    if not experts.start <= index < experts.end:
        return None
    return f"{name[: numbered.start(1)]}{index - experts.start}{name[numbered.end(1) :]}"


def _own_tensor(tensors: Any, name: str, experts: ExpertRange) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of one expert, of all experts in one, or of none."""
    if NUMBERED.search(name) is not None:
        if (own := own_tensor_name(name, experts)) is not None:
            yield own, tensors.get_tensor(name)
        return
    part = tensors.get_slice(name)
    whole = ".experts." in name and part.get_shape()[0] == experts.num_experts
    yield name, part[experts.start : experts.end] if whole else tensors.get_tensor(name)
