"""`hearth bench` on a new cluster or a running one, stored as a result of this repository.

services/client/load_test.py describes the measurements.

    python -m benchmarks.serve                                a new cluster, 100 in / 64 out
    python -m benchmarks.serve --url URL --api-key KEY        a running one
    python -m benchmarks.serve --rate 20 --duration-s 30
    python -m benchmarks.serve --corpus                       questions of the demo model's corpus
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.report import at_most, write_result
from services.cli.cluster.bench import target
from services.cli.cluster.chat import GatewayAddress
from services.cli.cluster.service_options import DEMO_MODEL_DIR, model_name_for
from services.client.load_test import LoadTestOptions, Row, measure
from services.local.gpus import count_gpus
from services.local.hub_download import local_copy
from services.local.plan import UpOptions
from shared.errors import HearthError

CORPUS = Path(__file__).resolve().parent.parent / "scripts" / "demo_corpus"


def corpus_questions() -> list[str]:
    files = sorted(CORPUS.glob("*.toml"))
    pairs = [pair for file in files for pair in tomllib.loads(file.read_text()).get("pair", ())]
    return [question for pair in pairs for question in pair["questions"]]


def up_options(arguments: argparse.Namespace) -> UpOptions:
    return UpOptions(
        model_dir=local_copy(arguments.model),
        model_name=model_name_for(arguments.model, ""),
        num_prefill=arguments.prefill,
        num_decode=arguments.decode,
        num_both=arguments.both,
        http_port=0,
        dtype=arguments.dtype,
        device=arguments.device,
        num_gpus=0 if arguments.device == "cpu" else count_gpus(),
        load_format=arguments.load_format,
        kv_cache_bytes=arguments.kv_cache_bytes,
    )


async def run(arguments: argparse.Namespace) -> list[Row]:
    options = LoadTestOptions(
        concurrency=tuple(arguments.concurrency),
        rate=arguments.rate,
        duration_s=arguments.duration_s,
        num_input_tokens=arguments.input_tokens,
        num_output_tokens=arguments.output_tokens,
        temperature=arguments.temperature,
        ttft_limit_s=arguments.ttft_s,
        itl_limit_s=arguments.itl_s,
        seed=arguments.seed,
    )
    questions = corpus_questions() if arguments.corpus else None
    given = None
    if arguments.url is not None:
        given = GatewayAddress(arguments.url, arguments.api_key or "")
    own = up_options(arguments) if given is None else None
    async with target(given, own, console=Console(stderr=True)) as gateway:
        return await measure(gateway.url, gateway.api_key, options, questions=questions)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", help="a running gateway (default: starts a cluster for the measurement)")
    add("--api-key")
    add("--model", type=Path, default=DEMO_MODEL_DIR, help="model of the started cluster")
    add("--prefill", type=int, default=1)
    add("--decode", type=int, default=1)
    add("--both", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="cpu")
    add("--load-format", default="auto", help="dummy: random weights of the model's config.json")
    add("--kv-cache-bytes", type=int, help="of each worker of the started cluster")
    add("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    add("--rate", type=float, help="requests per second, Poisson, instead of --concurrency")
    add("--duration-s", type=float, default=10.0, help="duration of each load")
    add("--input-tokens", type=int, default=100)
    add("--output-tokens", type=int, default=64)
    add("--corpus", action="store_true", help="questions of the demo corpus, full-length answers")
    add("--temperature", type=float, default=0.0)
    add("--ttft-s", type=float, default=0.5, help="goodput: maximum TTFT")
    add("--itl-s", type=float, default=0.05, help="goodput: maximum mean ITL")
    add("--seed", type=int, default=0)
    add("--name", default="serve", help="results/NAME.json")
    return parser.parse_args(argv)


def shown(argv: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Returns the words of the command without the key: results are committed."""
    key = arguments.api_key
    return [word.replace(key, "KEY") for word in argv] if key else list(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    try:
        rows = uvloop.run(run(arguments))
    except HearthError as error:
        print(f"serve: {error.message}", file=sys.stderr)
        return 2
    num_errors = sum(row["num_errors"] for row in rows)
    bars = [at_most("requests without an answer", num_errors, 0, "requests")]
    command = ["-m", "benchmarks.serve", *shown(argv, arguments)]
    is_full = arguments.url is None or arguments.name != "serve"
    write_result(arguments.name, rows, bars, command, is_full=is_full)
    return 0 if num_errors == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
