"""When `hearth up` compiles CPU kernels while the other processes start."""

from __future__ import annotations

from pathlib import Path

from services.local.plan import UpOptions, plan_warming


def test_only_the_first_start_on_a_cpu_compiles_kernels(tmp_path: Path) -> None:
    environ = {"HEARTH_CACHE_DIR": str(tmp_path)}
    spec = plan_warming(UpOptions(model_dir=tmp_path, dtype="float32"), environ)
    assert spec is not None
    assert spec.argv[3:] == (
        *("warm", "--model", str(tmp_path), "--dtype", "float32", "--kv-dtype", "auto"),
        *("--weights", "auto", "--no-rows"),
    )
    assert plan_warming(UpOptions(model_dir=tmp_path, device="cuda"), environ) is None
    marker = tmp_path / "kernels" / "0f" / "compiled-layers-1"
    marker.parent.mkdir(parents=True)
    marker.touch()
    assert plan_warming(UpOptions(model_dir=tmp_path), environ) is None
