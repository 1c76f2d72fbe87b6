import sys
from pathlib import Path

import pytest

from services.local.plan import (
    Endpoints,
    UpOptions,
    check_options,
    expected_workers,
    plan_credentials,
    plan_services,
)
from shared.errors import ConfigError

ENDPOINTS = Endpoints(
    nats_host="127.0.0.1",
    nats_port=4222,
    redis_url="redis://:secret-word@127.0.0.1:6379/0",
    http_host="127.0.0.1",
    http_port=8123,
)


def options(tmp_path: Path, **changes: object) -> UpOptions:
    return UpOptions(model_dir=tmp_path, **changes)  # type: ignore[arg-type]


def test_the_default_cluster_is_one_process_a_service(tmp_path: Path) -> None:
    credentials = plan_credentials(options(tmp_path))
    assert [each.process_id for each in credentials] == [
        "kv_index-1",
        "scheduler-1",
        "prefill-1",
        "decode-1",
        "gateway-1",
    ]


def test_a_worker_of_both_kinds_counts_as_both(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_prefill=0, num_decode=1, num_both=1)
    workers = expected_workers(plan_credentials(chosen))
    assert workers == {"prefill": {"worker-1"}, "decode": {"decode-1", "worker-1"}}


def test_names_on_an_external_nats_do_not_collide(tmp_path: Path) -> None:
    chosen = options(tmp_path, nats_url="nats://user:word@host:4222")
    first, second = plan_credentials(chosen), plan_credentials(chosen)
    assert not {each.process_id for each in first} & {each.process_id for each in second}


def test_secrets_travel_in_the_environment_and_never_in_argv(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    credentials = plan_credentials(chosen)
    specs = plan_services(chosen, credentials, ENDPOINTS, num_cores=2, environ={})
    for credential, spec in zip(credentials, specs, strict=True):
        assert spec.environ["HEARTH_NATS_URL"] == credential.nats_url("127.0.0.1", 4222)
        assert spec.environ["HEARTH_REDIS_URL"] == ENDPOINTS.redis_url
        line = " ".join(spec.argv)
        assert credential.password not in line
        assert "secret-word" not in line
        assert spec.argv[:3] == (sys.executable, "-m", "services")


@pytest.mark.parametrize(
    ("num_cores", "num_decode", "num_threads"), [(2, 1, "1"), (8, 1, "4"), (8, 3, "2"), (1, 4, "1")]
)
def test_workers_share_the_cores(
    tmp_path: Path, num_cores: int, num_decode: int, num_threads: str
) -> None:
    chosen = options(tmp_path, num_decode=num_decode)
    specs = plan_services(
        chosen, plan_credentials(chosen), ENDPOINTS, num_cores=num_cores, environ={}
    )
    for spec in specs:
        is_worker = spec.argv[3] in ("prefill", "decode")
        assert spec.environ["OMP_NUM_THREADS"] == (num_threads if is_worker else "1")
        assert spec.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        assert ("--num-threads" in spec.argv) == is_worker


def test_the_gateway_stops_first_and_the_index_last(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    order = {spec.argv[3]: spec.start_order for spec in specs}
    assert order["kv-index"] == order["scheduler"] < order["prefill"] == order["decode"]
    assert order["decode"] < order["gateway"]


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prefill -1 is negative.*not a directory"):
        check_options(UpOptions(model_dir=tmp_path / "none", num_prefill=-1))


def test_workers_are_told_the_form_of_their_weights(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_both=1, weights="compressed")
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    told = {spec.argv[3] for spec in specs if "--weights compressed" in " ".join(spec.argv)}
    assert told == {"prefill", "decode", "worker"}
    with pytest.raises(ConfigError, match="--weights 'tiny' is none of auto, dense, compressed"):
        check_options(options(tmp_path, weights="tiny"))


def test_a_cluster_without_decode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing could answer"):
        check_options(options(tmp_path, num_decode=0))


def test_the_url_of_a_door_open_to_all_is_dialled_on_loopback() -> None:
    import msgspec

    open_door = msgspec.structs.replace(ENDPOINTS, http_host="0.0.0.0")
    assert open_door.http_url == "http://127.0.0.1:8123"
