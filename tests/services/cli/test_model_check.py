"""The same words for the same checkpoint, from each command, before any process starts."""

import json
import shutil
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.cli.model_check import check_models
from services.local.model_list import NamedModel
from services.local.plan import UpOptions
from shared.errors import CheckpointError, ConfigError
from tests.services.cli.in_process import call_hearth
from tests.support.services.running import environ_for


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "demo"))


def rename(folder: Path, name: str, new: str) -> None:
    (folder / name).rename(folder / new)


def set_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def gguf(folder: Path) -> str:
    rename(folder, "model.safetensors", "model.gguf")
    return "has *.gguf alone: GGUF is not served"


def mamba(folder: Path) -> str:
    set_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    return "architecture 'MambaForCausalLM' is not served: `hearth models` lists those that are"


def other_shape(folder: Path) -> str:
    set_config(folder, intermediate_size=8)
    return "has shape [256, 704], the config requires [256, 8]"


@pytest.mark.parametrize("change", [gguf, mamba, other_shape])
def test_commands_refuse_a_checkpoint_in_the_same_words(
    tmp_path: Path, demo: Path, change: object
) -> None:
    words = change(demo)
    source = str(demo)
    for command in (
        ("up", "--model", source),
        ("up", "--model", f"a={source}", "--model", f"b={DEMO_MODEL_DIR}"),
        ("plan", "--model", source),
        ("model", "add", "m", source, "--redis-url", "redis://127.0.0.1:1"),
    ):
        refused = call_hearth(command, environ_for(tmp_path))
        assert refused.returncode == 2 and words in refused.stderr, (command, refused.stderr)
        assert refused.stderr.count("\n") == 1 and "traceback" not in refused.stderr.lower()
    assert not (tmp_path / "hearth").exists()  # no process has started


def test_options_and_ranks_are_checked_first(demo: Path) -> None:
    check_models(UpOptions(model_dir=demo, tp=2))
    with pytest.raises(ConfigError, match="--dtype 'int8' is none of"):
        check_models(UpOptions(model_dir=demo, dtype="int8"))
    with pytest.raises(ConfigError, match="64"):
        check_models(UpOptions(model_dir=demo, pp=64))
    (demo / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        check_models(UpOptions(model_dir=demo))
    models = (NamedModel("a", str(demo)),)
    with pytest.raises(CheckpointError, match=r"model 'a': .* has no tokenizer\.json"):
        check_models(UpOptions(model_dir=DEMO_MODEL_DIR, models=models))


def test_plan_counts_sequences_of_the_models_context() -> None:
    shown = json.loads(call_hearth(("plan", "--memory", "1GiB", "--json"), {}).stdout)
    context = json.loads((DEMO_MODEL_DIR / "config.json").read_text())["max_position_embeddings"]
    assert shown["sequences"]["context"] == context < 32_768


def test_served_architectures_are_listed() -> None:
    shown = call_hearth(("models",), {})
    assert shown.returncode == 0
    assert "Qwen3ForCausalLM" in shown.stdout and "GGUF" in shown.stdout
