"""The same question to a dataset in DuckDB, polars and Hugging Face datasets: mean reward and completion length.

    moe-rollout demo --out traces/
    python examples/read_traces.py traces/

A dataset is a directory of Parquet files, so each of them reads it without this project. `*-*` are the directories of
committed steps and of compacted ones; what is still being written has another suffix and is not matched.
"""

from __future__ import annotations

import sys


def with_duckdb(directory: str) -> tuple[float, float]:
    import duckdb

    query = "select avg(reward), avg(len(completion_ids)) from read_parquet(?)"
    reward, tokens = duckdb.execute(query, [f"{directory}/*-*/*.parquet"]).fetchall()[0]
    return reward, tokens


def with_polars(directory: str) -> tuple[float, float]:
    import polars

    rows = polars.scan_parquet(f"{directory}/*-*/*.parquet")
    means = rows.select(polars.col("reward").mean(), polars.col("completion_ids").list.len().mean()).collect()
    return means.row(0)


def with_datasets(directory: str) -> tuple[float, float]:
    import datasets

    rows = datasets.load_dataset("parquet", data_files=f"{directory}/*-*/*.parquet", split="train", streaming=True)
    found = [(row["reward"], len(row["completion_ids"])) for row in rows]
    return sum(reward for reward, _ in found) / len(found), sum(tokens for _, tokens in found) / len(found)


def main(directory: str) -> dict[str, tuple[float, float]]:
    found = {read.__name__: read(directory) for read in (with_duckdb, with_polars, with_datasets)}
    for name, (reward, tokens) in found.items():
        print(f"{name:14} mean reward {reward:.4f}, mean completion {tokens:.4f} tokens")
    return found


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "traces")
