"""Size of the archive layout against the usual one: `python -m tests.bench.bench_archive [DIR]`.

Without a dataset, routes of 48 sites, top 8 of 128, are drawn: each site has experts of its own popularity (normal
logits), and each sequence shifts them by a topic of the given strength. With one, a copy of it is archived.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from storage import RoutingSpec, Trace, TraceDataset, TraceWriter

SPEC = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
SAMPLES, TOKENS = 8, 1500
TOPICS = (0.0, 1.0, 2.0)


def routes(popularity: np.ndarray, topic: float, rng: np.random.Generator) -> np.ndarray:
    """Ids `[TOKENS - 1, 48, 8]`: the top 8 of logits with Gumbel noise, the best first."""
    ids = np.empty((TOKENS - 1, *SPEC.row_shape), np.uint8)
    for site, logits in enumerate(popularity + topic * rng.normal(size=popularity.shape)):
        noisy = logits + rng.gumbel(size=(TOKENS - 1, len(logits)))
        ids[:, site] = np.argsort(-noisy, axis=1)[:, : SPEC.top_k]
    return ids


def make_traces(topic: float) -> list[Trace]:
    rng = np.random.default_rng(0)
    popularity = rng.normal(size=(SPEC.num_sites, 128))
    return [
        Trace(
            sample_id=f"run/0/{sample}/0",
            step=0,
            prompt_ids=[1] * (TOKENS // 2),
            completion_ids=[2] * (TOKENS // 2),
            logprobs=np.zeros(TOKENS // 2, np.float32),
            routed_experts=routes(popularity, topic, rng),
            finish_reason="length",
        )
        for sample in range(SAMPLES)
    ]


def archived(root: Path) -> tuple[int, int]:
    """Bytes of Parquet before and after all steps of `root` were archived."""
    dataset = TraceDataset(root)
    before = _size(root)
    dataset.archive(before=dataset.steps[-1] + 1)
    assert dataset.verify() == []
    return before, _size(root)


def _size(root: Path) -> int:
    return sum(file.stat().st_size for file in root.glob("*-*/*.parquet"))


def main() -> None:
    """Print the sizes."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:]:
            shutil.copytree(sys.argv[1], f"{folder}/copy")
            _report(sys.argv[1], archived(Path(folder, "copy")))
            return
        for topic in TOPICS:
            root = Path(folder, str(topic))
            with TraceWriter(root, SPEC) as writer:
                writer.write(make_traces(topic), step=0)
                writer.commit(0)
            _report(f"topic of strength {topic}", archived(root))


def _report(what: str, sizes: tuple[int, int]) -> None:
    before, after = sizes
    print(f"{what}: {before:,} bytes, archived {after:,}, {after / before:.3f} of that")


if __name__ == "__main__":
    main()
