"""Memory while weights are compressed as they arrive: never more than the result and one matrix."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ops
from kernels.split_weight import HALF
from shared.engine.executors.loading.model_loading import empty_model, open_weights
from shared.engine.models.checkpoint_config import read_config
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.shared_weights import compress_weights
from shared.engine.weights.weight_form import weights_report
from shared.engine.weights.weight_regions import regions_of

WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
META = torch.device("meta")
WIDE_SHARE = 0.01  # of groups of weights, as in trained ones
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
}


class Counted(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until no tensor has them. A mask on
    meta selects `WIDE_SHARE` of the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._tensors: Counter[int] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            made = args[0].new_empty((int(args[1][0].numel() * WIDE_SHARE), HALF))
        else:
            made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.is_meta:
                self._count(each)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if not self._tensors[key]:
            self.live += num_bytes
            self.peak = max(self.peak, self.live)
        self._tensors[key] += 1
        weakref.finalize(tensor, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self.live -= num_bytes


@pytest.mark.parametrize(
    ("num_layers", "part"),  # of the widths of a 70B model
    [(1, 4), *(pytest.param(each, 1, marks=pytest.mark.long) for each in (1, 8, 80))],
)
def test_70b_in_12_bits_needs_its_final_size_and_one_matrix(
    tmp_path: Path, num_layers: int, part: int
) -> None:
    narrow = {name: LLAMA_70B[name] // part for name in WIDTHS}
    fields = {**LLAMA_70B, **narrow, "num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_config(tmp_path)
    model = empty_model(tmp_path, config, "bfloat16", META, num_positions=1, weights_on=META)
    destinations = model.weight_destinations()  # unset: on a device they take no memory
    largest = max(each.num_bytes for each in regions_of(model, destinations))
    with (
        patch.object(ops, "HAS_TRITON", True),
        patch.object(DummyTensors, "read_into", lambda *_: None),  # no value counts
        open_weights(tmp_path, config, model, "dummy") as source,
        Counted() as counted,
    ):
        compress_weights(model, destinations, source.tensors, META)
    report = weights_report(model)
    final = report.num_compressed_bytes + report.num_plain_bytes
    assert report.bits_per_weight == pytest.approx(12 + 4 * WIDE_SHARE, abs=0.1)
    assert largest == 2 * 128_256 * 8192 // part**2
    assert 0.99 * final < counted.live <= final
    print(f"final {final}, largest {largest}, peak {counted.peak}")
    assert counted.peak <= final + largest


MEASURED = """
import json, sys, torch
from pathlib import Path
from tests.shared.engine.weights.test_compressed_peak import load_measured
print(json.dumps(load_measured(Path(sys.argv[1]))))
"""


def load_measured(folder: Path) -> dict[str, int]:
    """Bytes: of the weights, of the largest storage, and that the process has grown by at most."""
    config = read_config(folder)
    model = empty_model(
        folder, config, "bfloat16", torch.device("cpu"), num_positions=1, weights_on=META
    )
    largest = max(each.num_bytes for each in regions_of(model, model.weight_destinations()))
    ops.compress_weight(torch.zeros(64, 64, dtype=torch.bfloat16))  # compiles
    before = resident("VmRSS")
    with open_weights(folder, config, model, "auto") as source:
        compress_weights(model, model.weight_destinations(), source.tensors)
        source.revision()
    report = weights_report(model)
    final = report.num_compressed_bytes + report.num_plain_bytes
    return {"final": final, "largest": largest, "grown": resident("VmHWM") - before}


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


@pytest.mark.long
def test_a_real_file_needs_its_final_size_and_one_matrix(tmp_path: Path) -> None:
    """1 GB in one file: loaded and hashed by a process of its own."""
    fields = LLAMA_70B | {
        "num_hidden_layers": 4,
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = empty_model(
        tmp_path, read_config(tmp_path), "bfloat16", META, num_positions=1, weights_on=META
    )
    tensors = {
        name: torch.randn(each.shape, dtype=torch.bfloat16) * 0.02
        for name, each in model.weight_destinations().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 1e9
    del tensors
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["grown"] <= found["final"] + found["largest"] + (200 << 20)
