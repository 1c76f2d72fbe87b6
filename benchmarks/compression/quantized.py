"""The engine with weights of four and eight bits, over its own speed in BF16, in one run.

Decoding tiles beside the product must cost no more than the smaller weights save: at batch 1
reading weights is the cost, at batch 64 and in prompts arithmetic is. All forms take random weights
of the same shapes (no checkpoint is read), and alternate; a figure is the median of the rounds.
Bytes are those of the weights in this process, over those of the checkpoint's tensors.

    python -m benchmarks.compression.quantized [--layers 8] [--hidden 2048] [--inner 8192]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Row, at_least, at_most, write_result
from kernels.ops import cpu_host
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.layers.linear import MatmulModule
from shared.engine.step import StepInputs
from tests.support.engine.quantized import packed_config

VOCABULARY = 8192
STEPS = {"batch 1": [1], "batch 64": [1] * 64, "prefill 512": [512]}
# least speed over BF16, and most bytes over the file's
BARS = {"int4, batch 1": 1.0, "int4, batch 64": 0.6}
MOST_BYTES = 1.03
GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int4": packed_config(group_size=GROUP),
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def write_config(folder: Path, options: argparse.Namespace, quantized: dict[str, Any]) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": options.hidden,
        "intermediate_size": options.inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 128,
        "num_key_value_heads": max(1, options.hidden // 512),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **({"quantization_config": quantized} if quantized else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def steps(executor: LocalExecutor) -> dict[str, StepInputs]:
    """Steps of random tokens without a cached prefix: attention costs next to nothing."""
    found = {}
    for name, query_lens in STEPS.items():
        step = idle_step(executor.kv_layout.block_size, query_lens, num_groups=1)
        tokens = np.random.default_rng(0).integers(3, VOCABULARY, len(step.input_ids))
        step.input_ids[:] = tokens
        found[name] = step
    return found


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(executors: dict[str, LocalExecutor], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds by case and form; forms alternate, the first round warms up."""
    given = {form: steps(executor) for form, executor in executors.items()}
    found: dict[str, dict[str, list[float]]] = {}
    for round_index in range(rounds + 1):
        for case in STEPS:
            for form, executor in executors.items():
                taken = seconds(lambda run=executor.step_logits, x=given[form][case]: run(x))
                if round_index:
                    found.setdefault(case, {}).setdefault(form, []).append(taken)
    return found


def bytes_of_layers(executor: LocalExecutor) -> int:
    """Returns the bytes of the linear layers, without embedding and head; all of them are
    quantized.
    """
    report = executor.weights
    if report.num_quantized:
        return report.num_quantized_bytes
    layers = executor.computer.model.layers
    linears = (each for each in layers.modules() if isinstance(each, MatmulModule))
    return sum(each.weight.numel() * 2 for each in linears)


def rows_of(
    found: dict[str, dict[str, list[float]]], executors: dict[str, LocalExecutor]
) -> list[Row]:
    rows: list[Row] = []
    for case, by_form in found.items():
        for form in executors:
            if form == "bf16":
                continue
            ratios = sorted(
                bf16 / own for bf16, own in zip(by_form["bf16"], by_form[form], strict=True)
            )
            rows.append(
                {
                    "case": f"{form}, {case}",
                    "ms": round(1e3 * statistics.median(by_form[form]), 2),
                    "bf16_ms": round(1e3 * statistics.median(by_form["bf16"]), 2),
                    "speed_over_bf16": round(statistics.median(ratios), 3),
                    "least": round(ratios[0], 3),
                    "most": round(ratios[-1], 3),
                }
            )
    return rows


def byte_rows(executors: dict[str, LocalExecutor]) -> list[Row]:
    num_weights = executors["int4"].weights.num_quantized
    file_bytes = {"int4": num_weights * (0.5 + 2 / GROUP), "fp8": num_weights * (1 + 4 / 128**2)}
    return [
        {
            "case": f"{form}, bytes",
            "resident_mb": round(bytes_of_layers(executors[form]) / 1e6, 2),
            "file_mb": round(stored / 1e6, 2),
            "over_file": round(bytes_of_layers(executors[form]) / stored, 4),
            "over_bf16": round(bytes_of_layers(executors[form]) / (2 * num_weights), 4),
        }
        for form, stored in file_bytes.items()
    ]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        cpu_host()  # uses the usual cache of compiled code
        os.environ["HEARTH_CACHE_DIR"] = folder
        executors = {
            form: load_executor(
                write_config(Path(folder, form), options, quantized),
                dtype="bfloat16",
                load_format="dummy",
                kv_cache_bytes=64 << 20,
                num_threads=options.threads,
            )
            for form, quantized in CONFIGS.items()
        }
        rows = rows_of(measure(executors, options.rounds), executors)
        sizes = byte_rows(executors)
    speeds = {row["case"]: row["speed_over_bf16"] for row in rows}
    bars = [at_least(f"{case} / BF16", speeds[case], least, "") for case, least in BARS.items()]
    bars += [
        at_most(f"{row['case']} / the file's", row["over_file"], MOST_BYTES, "") for row in sizes
    ]
    write_result("quantized", rows + sizes, bars, ["-m", "benchmarks.compression.quantized", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
