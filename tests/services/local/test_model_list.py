from pathlib import Path

import pytest

from services.local.model_list import NamedModel, named_models
from services.local.plan import Endpoints, UpOptions, check_options, plan_credentials, plan_services
from shared.errors import CheckpointError, ConfigError

ENDPOINTS = Endpoints(
    nats_host="127.0.0.1", nats_port=4222, redis_url="redis://x", http_host="x", http_port=1
)


def test_models_are_named_by_their_directories_or_explicitly(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = named_models([str(tmp_path / "a"), f"other={tmp_path}/b", "org/name"])
    assert found == (
        NamedModel("a", f"{tmp_path}/a"),
        NamedModel("other", f"{tmp_path}/b"),
        NamedModel("org/name", "org/name"),
    )


def test_missing_directories_and_equal_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/b does not exist: expected a check"):
        named_models([str(tmp_path / "b")])
    with pytest.raises(ConfigError, match="have the name 'a': give one another, as NAME=DIR"):
        named_models([str(tmp_path / "a"), f"a={tmp_path}"])


def test_several_models_have_a_host_with_the_workers_credential(tmp_path: Path) -> None:
    models = (NamedModel("a", str(tmp_path)), NamedModel("b", str(tmp_path)))
    options = UpOptions(
        model_dir=tmp_path, models=models, num_prefill=0, num_decode=0, kv_dtype="fp8"
    )
    check_options(options)
    credentials = plan_credentials(options)
    specs = plan_services(options, credentials, ENDPOINTS, num_cores=2, environ={})
    assert [each.argv[3] for each in specs] == ["kv-index", "scheduler", "host", "gateway"]
    worker = next(each for each in credentials if each.role == "worker")
    urls = [each.environ.get("HEARTH_WORKER_NATS_URL") for each in specs]
    assert urls == [None, None, worker.nats_url("127.0.0.1", 4222), None]


def test_options_of_one_model_are_refused_for_several(tmp_path: Path) -> None:
    models = (NamedModel("a", str(tmp_path)), NamedModel("b", str(tmp_path)))
    options = UpOptions(model_dir=tmp_path, models=models, tp=2)
    with pytest.raises(ConfigError, match="--tp is for one --model, and 2 are given"):
        check_options(options)
