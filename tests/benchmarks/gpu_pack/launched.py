"""Launches a few kernels without a GPU: prints as JSON how many of them Triton had in its cache."""

from __future__ import annotations

import json

import torch

from benchmarks.gpu_kit.compiled.carried_cache import counting
from kernels.gpu.rows.rms_norm import rms_norm
from kernels.gpu.rows.silu_and_mul import silu_and_mul
from tests.support.kernels.fake_driver import fake_driver


def launch() -> None:
    x = torch.zeros(3, 128)
    rms_norm(x, x[0], 1e-5)
    rms_norm(x.bfloat16(), x[0].bfloat16(), 1e-5)
    silu_and_mul(x)


def main() -> None:
    with counting() as counts, fake_driver("cubin") as fake:
        launch()
    found = {"hits": counts.hits, "compiled": counts.compiled, "built": sum(fake.built.values())}
    print(json.dumps(found | {"source": rms_norm.__code__.co_filename}))


if __name__ == "__main__":
    main()
