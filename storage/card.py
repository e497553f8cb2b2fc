"""README.md and run.json of a dataset: what a person, and Hugging Face's `load_dataset`, find beside the traces.

Written once, by the writer that made the dataset. Readers need neither, `verify` checks run.json: a dataset without
them, or with an edited README, is as good. A README that lay there before stays as it was.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from storage.manifest import UNREADABLE
from storage.promises import Promises
from storage.redact import without_secrets
from storage.schema import FORMAT_VERSION, check_version
from storage.store import Store
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)
CARD_FILE = "README.md"
RUN_FILE = "run.json"
LIBRARIES = ("moe-rollout", "numpy", "pyarrow", "torch", "transformers", "ray", "vllm", "sglang")

_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: "*-*/*.parquet"
tags:
- moe-rollout
- mixture-of-experts
- reinforcement-learning
---

# Rollouts with recorded expert routes

One row per sampled completion of a mixture-of-experts language model: tokens, logprobs, and for every token that was an
input of the model the experts that each of its routers chose. Written by moe-rollout, format
version {version}; `run.json` says with which configuration and which versions.

| routes | |
|---|---|
| routers | {sites} |
| experts per router | {experts} |
| chosen per token | {top_k} |
| bytes per token | {row_bytes} ({dtype}) |
| routes survive recomputation | {frozen} |
| order of a row's ids | {slot_order} |

```python
from datasets import load_dataset

rows = load_dataset("PATH-OF-THIS-DIRECTORY", split="train")
```

Other readers take the glob `*-*/*.parquet` (`step-*/*.parquet` while nothing was compacted). `routed_experts` has one
binary value per row; `numpy.frombuffer(b"".join(row["routed_experts"]), "{dtype}").reshape(-1, {sites}, {top_k})` is
`[rows, routers, chosen]`, and row i is the routing of token `route_start + i`. `storage.TraceDataset` of moe-rollout
decodes and checks the rows, and joins rewards that were annotated later. Steps that were archived have columns of their
own and need it; the others are `load_dataset("parquet", data_files="PATH-OF-THIS-DIRECTORY/step-*/*.parquet")`.

`TraceDataset` follows no symbolic links, which is what the Hugging Face cache is made of. Download from the Hub with
`huggingface_hub.snapshot_download(REPOSITORY, repo_type="dataset", local_dir="traces")` and open `"traces"`.
"""


def write_card(store: Store, spec: RoutingSpec, promises: Promises, run: Mapping[str, Any] | None) -> None:
    """Make both files; one that is there already stays."""
    for name, text in ((CARD_FILE, card(spec, promises)), (RUN_FILE, run_json(run))):
        try:
            store.create(name, text.encode())
        except FileExistsError:
            logger.info("%s is there already and stays as it is", store.url(name))


def card(spec: RoutingSpec, promises: Promises | None = None) -> str:
    """The text of README.md."""
    promises = promises or Promises()
    experts = sorted({site.num_experts for site in spec.sites})
    return _CARD.format(
        version=FORMAT_VERSION,
        sites=spec.num_sites,
        experts=" to ".join(str(bound) for bound in dict.fromkeys((experts[0], experts[-1]))),
        top_k=spec.top_k,
        row_bytes=spec.row_bytes,
        dtype=spec.dtype.name,
        frozen="yes" if promises.frozen_recompute else "no",
        slot_order=promises.slot_order,
    )


def run_json(run: Mapping[str, Any] | None = None) -> str:
    """The text of run.json: format version, time, versions of libraries and, without secrets, what else `run` says.

    >>> json.loads(run_json({"model": "Qwen/Qwen3-30B-A3B", "api_key": "k"}))["api_key"]
    'not recorded'
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"format_version": FORMAT_VERSION, "created": created, "versions": library_versions()}
    return json.dumps(head | without_secrets(dict(run or {})) | head, indent=1, allow_nan=False)


def library_versions() -> dict[str, str]:
    """Of Python and of those libraries that are installed here; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def card_problems(store: Store) -> list[str]:
    """One text when there is a run.json that cannot be read. The README is for people, who may change it."""
    try:
        raw = json.loads(store.read(RUN_FILE))
        check_version(raw["format_version"], "it")
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        return [f"{store.url(RUN_FILE)}: {type(error).__name__}: {error}; the traces are intact without it"]
    return []
