"""The `moe-rollout` command line. Arguments are parsed before torch is imported, so `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rollout.look_parser import add_look_commands, natural

EPILOG = "Sample over Ray with `python -m actors.pipeline --config run.toml`."


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="moe-rollout", description="MoE rollouts with recorded routes.", epilog=EPILOG
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="sample with the small built-in model, verify the traces, replay them")
    demo.add_argument("--out", default="demo-traces", metavar="DIR", help="dataset directory (default: %(default)s)")

    sample = commands.add_parser("sample", help="sample completions of prompts, one JSON object per completion")
    sample.add_argument("model", help="checkpoint directory or hub id")
    sample.add_argument(
        "--prompts",
        default="-",
        metavar="FILE",
        help="one prompt per line, or .jsonl with 'prompt' or 'prompt_ids'; - is stdin",
    )
    sample.add_argument("--traces", metavar="DIR", help="also commit the traces to this dataset")
    sample.add_argument("--num-samples", type=int, default=1, metavar="N")
    sample.add_argument("--max-tokens", type=int, default=64, metavar="N")
    sample.add_argument("--temperature", type=float, default=1.0, metavar="T")
    sample.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sample.add_argument("--top-k", type=int, default=0, metavar="K")
    sample.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sample.add_argument("--seed", type=int, metavar="S")
    sample.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    sample.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    sample.add_argument(
        "--num-actors",
        type=int,
        default=0,
        metavar="N",
        help="sample over Ray with N actors (default: in process)",
    )
    sample.add_argument("--timeline", metavar="FILE", help="also write when each step ran, for `plot --timeline FILE`")

    bench = commands.add_parser("bench", help="tokens/s and ratios: recording, overlap, batch invariance, transformers")
    bench.add_argument("--sizes", default="small", metavar="LIST", help="random models: small,mid (default: small)")
    bench.add_argument(
        "--model", action="append", default=[], metavar="PATH", help="a checkpoint instead; may be repeated"
    )
    bench.add_argument("--batches", default="16,64", metavar="LIST", help="default: %(default)s")
    bench.add_argument("--prompt-len", type=int, default=64, metavar="N")
    bench.add_argument("--new-tokens", type=int, default=128, metavar="N")
    bench.add_argument("--repeats", type=int, default=3, metavar="N")
    bench.add_argument(
        "--threads",
        default="auto",
        metavar="LIST",
        help="counts of compute threads to try, such as 1,2; the engine and each peer keep their fastest "
        "(default: powers of two up to the cores)",
    )
    bench.add_argument("--device", default="cpu")
    bench.add_argument("--floor", action="store_true", help="measure what the machine can do at best, too")
    bench.add_argument(
        "--peers", default="generate", metavar="LIST", help="generate,generate_batch of transformers; '' for none"
    )
    bench.add_argument("--vllm", action="store_true", help="vLLM in this process too; it must be installed")
    bench.add_argument("--json", action="store_true", help="every round, for programs")

    inspect = commands.add_parser("inspect", help="what a dataset holds: steps, samples, tokens, bytes, expert load")
    inspect.add_argument("dir", metavar="DIR", help="directory or URL (s3://bucket/traces)")
    inspect.add_argument("--step", type=int, metavar="N", help="only this step (default: all)")
    inspect.add_argument(
        "--slowest", type=natural, default=5, metavar="N", help="how many to name (default: %(default)s)"
    )
    inspect.add_argument("--json", action="store_true", help="all figures, for programs")

    verify = commands.add_parser("verify", help="check every file, checksum and row; exit code 1 on problems")
    verify.add_argument("dir", metavar="DIR")
    verify.add_argument(
        "--repair",
        action="store_true",
        help="first remove what dead writers left; committed data is never touched",
    )
    verify.add_argument(
        "--all-hosts",
        action="store_true",
        help="with --repair: also what writers of other hosts left; only when none of them is at work",
    )

    archive = commands.add_parser("archive", help="rewrite old steps in a smaller layout; readers see no difference")
    archive.add_argument("dir", metavar="DIR")
    archive.add_argument("--before", type=natural, required=True, metavar="N", help="steps below N")

    export = commands.add_parser("export", help="write the traces of a dataset in a trainer's format")
    export.add_argument("dir", metavar="DIR")
    export.add_argument(
        "--to",
        required=True,
        metavar="FORMAT",
        help="verl, slime, miles, megatron, nemo-rl, nemo-rl-string, skyrl, prime-rl, roll, ms-swift, fireworks-r3, "
        "expert-counts or safetensors",
    )
    export.add_argument("--out", required=True, metavar="PATH", help="the file to write; it must not exist")
    export.add_argument("--step", type=int, metavar="N", help="only this step (default: all)")
    export.add_argument("--num-layers", type=int, metavar="N", help="decoder layers, for an axis with the dense ones")
    export.add_argument("--moe-only", action="store_true", help="a layer axis without the dense layers")
    export.add_argument("--skip-unrecorded", action="store_true", help="leave out samples without routes")

    add_look_commands(commands)

    commands.add_parser("families", help="which model families are served, how fast, captured and replayed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's error is one line on stderr."""
    options = build_parser().parse_args(arguments)
    try:
        from rollout import commands

        return int(getattr(commands, options.command)(options))
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.traceback:
            raise
        sys.stderr.write(f"error: {_one_line(error)}\n")
        return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None and "pip install" not in str(error):
        return f"{error}: the package is not installed with what it needs; next, in a clone: pip install ."
    from pydantic import ValidationError

    from rollout.sampling import readable

    return readable(error) if isinstance(error, ValidationError) else " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
