import sys
from pathlib import Path

import msgspec
import pytest

from services.local.model_list import named_models
from services.local.plan import (
    Endpoints,
    UpOptions,
    check_options,
    expected_workers,
    offers_faults,
    plan_credentials,
    plan_services,
    worker_counts,
)
from services.local.redis_acl import REDIS_ROLES
from shared.config import EncodeConfig
from shared.errors import ConfigError
from shared.transport.link_config import SiteLink, SiteLinks

ENDPOINTS = Endpoints(
    nats_host="127.0.0.1",
    nats_port=4222,
    redis_url="redis://:secret-word@127.0.0.1:6379/0",
    http_host="127.0.0.1",
    http_port=8123,
)


def options(tmp_path: Path, **changes: object) -> UpOptions:
    return UpOptions(model_dir=tmp_path, **changes)  # type: ignore[arg-type]


def test_default_cluster_has_one_process_per_service(tmp_path: Path) -> None:
    credentials = plan_credentials(options(tmp_path))
    assert [each.process_id for each in credentials] == [
        "kv_index-1",
        "scheduler-1",
        "prefill-1",
        "decode-1",
        "gateway-1",
    ]


def test_worker_with_both_roles_counts_as_both(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_prefill=0, num_decode=1, num_both=1)
    workers = expected_workers(plan_credentials(chosen))
    both = {"prefill": {"worker-1"}, "decode": {"decode-1", "worker-1"}}
    assert workers == {**both, "encode": set()}


def test_an_encode_worker_gets_the_options_of_its_command(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_encode=1, kv_cache_bytes=1 << 20, dtype="float32")
    credentials = plan_credentials(chosen)
    assert expected_workers(credentials)["encode"] == {"encode-1"}
    specs = plan_services(chosen, credentials, ENDPOINTS, num_cores=6, environ={})
    (encode,) = [each for each in specs if each.process_id == "encode-1"]
    given = dict(zip(encode.argv[4::2], encode.argv[5::2], strict=True))
    assert (given["--dtype"], given["--num-threads"]) == ("float32", "2")
    known = {f"--{each.replace('_', '-')}" for each in EncodeConfig.__struct_fields__}
    assert given.keys() <= known | {"--instance"}


def test_names_on_an_external_nats_do_not_collide(tmp_path: Path) -> None:
    chosen = options(tmp_path, nats_url="nats://user:word@host:4222")
    first, second = plan_credentials(chosen), plan_credentials(chosen)
    assert not {each.process_id for each in first} & {each.process_id for each in second}


def test_secrets_are_in_the_environment_and_not_in_argv(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    credentials = plan_credentials(chosen)
    specs = plan_services(chosen, credentials, ENDPOINTS, num_cores=2, environ={})
    for credential, spec in zip(credentials, specs, strict=True):
        assert spec.environ["HEARTH_NATS_URL"] == credential.nats_url("127.0.0.1", 4222)
        redis_url = spec.environ.get("HEARTH_REDIS_URL")
        assert redis_url == (ENDPOINTS.redis_url if credential.role in REDIS_ROLES else None)
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


def test_gateway_starts_after_workers_and_workers_after_index(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    order = {spec.argv[3]: spec.start_order for spec in specs}
    assert order["kv-index"] == order["scheduler"] < order["prefill"] == order["decode"]
    assert order["decode"] < order["gateway"]


def test_port_of_a_running_nats_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nats names a running one"):
        check_options(options(tmp_path, nats_url="nats://host:4222", nats_port=4222))


def ports_of(chosen: UpOptions) -> dict[str, str]:
    check_options(chosen)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    given = [(each.process_id, each.argv) for each in specs if "--data-plane-port" in each.argv]
    return {name: argv[argv.index("--data-plane-port") + 1] for name, argv in given}


def test_workers_take_the_ports_from_the_given_one_on(tmp_path: Path) -> None:
    """One for each rank and one for images, decode workers first; an encode worker has no ranks."""
    assert ports_of(options(tmp_path)) == {}
    assert ports_of(options(tmp_path, data_plane_port=7700)) == {
        "decode-1": "7700",
        "prefill-1": "7702",
    }
    many = options(
        tmp_path,
        **{"num_decode": 2, "num_both": 1, "num_encode": 2, "pp": 2, "decode_tp": 2, "tp": 4},
        data_plane_port=65_508,
    )
    assert ports_of(many) == {
        "decode-1": "65508",
        "decode-2": "65513",
        "worker-1": "65518",
        "prefill-1": "65527",
        "encode-1": "65530",
        "encode-2": "65531",
    }
    with pytest.raises(ConfigError, match="65533: its workers need the ports to 65536, over 65535"):
        check_options(options(tmp_path, data_plane_port=65_533))
    several = named_models(["a=org/a", "b=org/b"])
    with pytest.raises(ConfigError, match="--data-plane-port is for one --model, and 2 are given"):
        check_options(options(tmp_path, models=several, data_plane_port=7700))


@pytest.mark.parametrize(
    ("changes", "offers"),
    [
        ({}, True),
        ({"http_host": "::1", "advertise_host": "localhost", "http_port": 1}, True),
        ({"http_host": "0.0.0.0"}, False),
        ({"http_host": "::"}, False),
        ({"advertise_host": "10.0.0.1"}, False),
        ({"nats_url": "nats://127.0.0.1:4222"}, False),
        ({"models": named_models(["a=org/a", "b=org/b"])}, False),
    ],
)
def test_page_offers_faults_on_loopback_alone(
    tmp_path: Path, changes: dict[str, object], offers: bool
) -> None:
    assert offers_faults(options(tmp_path, **changes)) == offers


def test_site_and_region_are_passed_to_the_processes(tmp_path: Path) -> None:
    links = SiteLinks(site="a", links=(SiteLink(peer="b", key="U"),), port=7422)
    chosen = options(tmp_path, region="eu", region_classes=("c=eu", "d=eu,us"), links=links)
    credentials = plan_credentials(chosen)
    specs = plan_services(chosen, credentials, ENDPOINTS, num_cores=2, environ={})
    linked = {spec.argv[3] for spec in specs if "--site a" in " ".join(spec.argv)}
    assert linked == {"gateway", "scheduler", "prefill", "decode"}
    pushing = {spec.argv[3] for spec in specs if "--kv-networks 127.0.0.0/8" in " ".join(spec.argv)}
    assert pushing == {"gateway"}
    elsewhere = options(tmp_path, links=links, advertise_host="10.0.0.1")
    others = plan_services(elsewhere, credentials, ENDPOINTS, num_cores=2, environ={})
    assert not any("--kv-networks" in spec.argv for spec in others), "its KV is not encrypted"
    passed = "--region eu --region-classes c=eu --region-classes d=eu,us"
    assert all(passed in " ".join(spec.argv) for spec in specs)
    assert {each.region for each in credentials} == {"eu"}
    with pytest.raises(ConfigError, match="--link is of the NATS that is started"):
        check_options(options(tmp_path, nats_url="nats://host:4222", links=links))
    with pytest.raises(ConfigError, match="region 'e u' may have"):
        check_options(options(tmp_path, region="e u"))


def test_error_lists_all_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prefill -1 is negative.*not a directory"):
        check_options(UpOptions(model_dir=tmp_path / "none", num_prefill=-1))


def test_weights_option_is_passed_to_workers(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_both=1, weights="compressed")
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    commands = {spec.argv[3] for spec in specs if "--weights compressed" in " ".join(spec.argv)}
    assert commands == {"prefill", "decode", "worker"}
    with pytest.raises(ConfigError, match="--weights 'tiny' is none of auto, dense, compressed"):
        check_options(options(tmp_path, weights="tiny"))


def test_numbers_of_ranks_are_passed_to_workers(tmp_path: Path) -> None:
    chosen = options(tmp_path, num_both=1, tp=8, prefill_tp=2, decode_tp=4, pp=3)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    lines = {spec.argv[3]: " ".join(spec.argv) for spec in specs}
    for role, tp in {"prefill": 2, "decode": 4, "worker": 8}.items():
        assert f"--tp {tp}" in lines[role]
        assert "--pp 3" in lines[role]


def test_log_options_are_passed_to_every_service(tmp_path: Path) -> None:
    chosen = options(tmp_path, log_level="debug", log_format="text")
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    words = "--log-level debug --log-format text"
    assert specs and all(words in " ".join(spec.argv) for spec in specs)


def test_cluster_without_decode_worker_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing could answer"):
        check_options(options(tmp_path, num_decode=0))


def test_http_url_of_the_wildcard_address_is_loopback() -> None:
    import msgspec

    wildcard = msgspec.structs.replace(ENDPOINTS, http_host="0.0.0.0")
    assert wildcard.http_url == "http://127.0.0.1:8123"


def devices_of(chosen: UpOptions) -> list[str]:
    check_options(chosen)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    return [spec.argv[spec.argv.index("--device") + 1] for spec in specs if "--device" in spec.argv]


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("auto", 0, ["cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 4, ["cuda:0", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_each_worker_has_its_own_gpu(
    tmp_path: Path, device: str, num_gpus: int, expected: list[str]
) -> None:
    assert devices_of(options(tmp_path, device=device, num_gpus=num_gpus)) == expected


@pytest.mark.parametrize(
    ("counts", "device", "num_gpus", "expected"),
    [
        ((None, None, None), "auto", 0, (1, 1, 0)),
        ((None, None, None), "auto", 1, (0, 0, 1)),  # two workers would alternate on the one GPU
        ((None, None, None), "auto", 2, (1, 1, 0)),
        ((None, None, None), "cuda:1", 2, (0, 0, 1)),
        ((None, None, None), "cpu", 1, (1, 1, 0)),
        ((None, 2, None), "auto", 1, (1, 2, 0)),
        ((None, None, 2), "auto", 0, (0, 0, 2)),
        ((None, None, 0), "auto", 1, (1, 1, 0)),
    ],
)
def test_single_gpu_has_one_worker_for_both_by_default(
    counts: tuple[int | None, int | None, int | None],
    device: str,
    num_gpus: int,
    expected: tuple[int, int, int],
) -> None:
    assert worker_counts(*counts, device=device, num_gpus=num_gpus) == expected


def test_workers_share_a_gpu_only_with_a_given_size(tmp_path: Path) -> None:
    for size in ({"kv_cache_bytes": 1 << 30}, {"gpu_memory": "45%"}, {"gpu_memory": "36GiB"}):
        shared = options(tmp_path, num_gpus=1, **size)
        check_options(shared)
        assert devices_of(shared) == ["cuda:0", "cuda:0"]
    with pytest.raises(ConfigError, match=r"2 workers on 1 CUDA .*--both 1.*--kv-cache-bytes"):
        check_options(options(tmp_path, num_gpus=1))
    with pytest.raises(ConfigError, match="2 workers on 1 CUDA"):
        check_options(options(tmp_path, device="cuda:1", num_gpus=2))
    with pytest.raises(ConfigError, match=r"2 workers share a device, and 2 times 60% is more"):
        check_options(options(tmp_path, num_gpus=1, gpu_memory="60%"))
    check_options(options(tmp_path, num_gpus=2, gpu_memory="60%"))
    for device in ("cpu", "auto"):
        with pytest.raises(ConfigError, match="--gpu-memory 45% is for CUDA devices"):
            check_options(options(tmp_path, device=device, gpu_memory="45%"))


def test_memory_of_a_gpu_is_passed_to_workers_and_hosts(tmp_path: Path) -> None:
    shared = options(tmp_path, num_gpus=2, gpu_memory="0.45")
    specs = plan_services(shared, plan_credentials(shared), ENDPOINTS, num_cores=2, environ={})
    limited = {spec.argv[3] for spec in specs if "--gpu-memory 0.45" in " ".join(spec.argv)}
    assert limited == {"prefill", "decode"}
    several = msgspec.structs.replace(shared, models=named_models(["a=org/a", "b=org/b"]))
    check_options(several)
    specs = plan_services(several, plan_credentials(several), ENDPOINTS, num_cores=2, environ={})
    (host,) = [spec for spec in specs if spec.argv[3] == "host"]
    assert host.environ["HEARTH_BUDGET"] == "cuda:0=0.45 cuda:1=0.45"


@pytest.mark.parametrize(
    ("device", "num_gpus", "message"),
    [
        ("tpu", 0, "--device 'tpu' is not auto, cpu, cuda or cuda:N"),
        ("cuda", 0, "this machine shows no CUDA device"),
        ("cuda:2", 2, "there are 2 CUDA devices, 0 to 1"),
    ],
)
def test_unknown_or_missing_device_is_rejected(
    tmp_path: Path, device: str, num_gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(options(tmp_path, device=device, num_gpus=num_gpus))


def test_sizes_and_formats_are_passed_only_to_workers(tmp_path: Path) -> None:
    chosen = options(
        tmp_path,
        kv_cache_bytes=1 << 30,
        max_batch_tokens=4096,
        load_format="dummy",
        activations="bf16-exchange",
        kv_dtype="fp8",
    )
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ={})
    wanted = "--load-format dummy --kv-cache-bytes 1073741824 --max-batch-tokens 4096"
    assert {spec.argv[3] for spec in specs if wanted in " ".join(spec.argv)} == {
        "prefill",
        "decode",
    }
    in_fp8 = [spec.argv[3] for spec in specs if "--kv-dtype fp8" in " ".join(spec.argv)]
    assert sorted(in_fp8) == ["decode", "prefill"]
    rounded = [
        spec.argv[3] for spec in specs if "--activations bf16-exchange" in " ".join(spec.argv)
    ]
    assert sorted(rounded) == ["decode", "prefill"]
    with pytest.raises(ConfigError, match="--activations 'fp8' is none of plain, bf16-exchange"):
        check_options(options(tmp_path, activations="fp8"))
    with pytest.raises(ConfigError, match="--kv-dtype 'int8' is none of auto, bf16, fp8"):
        check_options(options(tmp_path, kv_dtype="int8"))
    default = options(tmp_path)
    specs = plan_services(default, plan_credentials(default), ENDPOINTS, num_cores=2, environ={})
    assert not any("--kv-cache-bytes" in spec.argv for spec in specs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "--dtype 'int8' is none of auto, bfloat16, float16, float32"),
        ({"load_format": "gguf"}, "--load-format 'gguf' is none of auto, dummy"),
        ({"kv_cache_bytes": 0}, "--kv-cache-bytes 0 is not positive"),
        ({"max_batch_tokens": -1}, "--max-batch-tokens -1 is not positive"),
        ({"api_key": "two words"}, "--api-key is not a word of 8 to 512 ASCII characters"),
        ({"api_key": "short"}, "--api-key is not a word"),
    ],
)
def test_invalid_sizes_and_formats_are_rejected(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(options(tmp_path, **changes))


@pytest.mark.parametrize(
    ("num_prefill", "environ", "expected"),
    [
        (1, {}, "512"),
        (0, {}, None),
        (1, {"HEARTH_MAX_LOCAL_PREFILL_TOKENS": "4"}, "4"),
    ],
)
def test_local_prefill_limit_is_set_if_prefill_workers_exist(
    tmp_path: Path, num_prefill: int, environ: dict[str, str], expected: str | None
) -> None:
    chosen = options(tmp_path, num_prefill=num_prefill)
    specs = plan_services(chosen, plan_credentials(chosen), ENDPOINTS, num_cores=2, environ=environ)
    (scheduler,) = (each for each in specs if each.process_id == "scheduler-1")
    assert scheduler.environ.get("HEARTH_MAX_LOCAL_PREFILL_TOKENS") == expected


def test_cluster_secret_is_given_to_gateways_and_the_index_alone(tmp_path: Path) -> None:
    given = options(tmp_path, num_prefill=1, num_decode=1, num_both=1)
    specs = plan_services(
        given,
        plan_credentials(given),
        msgspec.structs.replace(ENDPOINTS, cluster_secret="of the cluster"),
        num_cores=2,
        environ={"HEARTH_CLUSTER_SECRET": "of the shell", "HEARTH_METRICS_PORT": "9464"},
    )
    holders = {
        spec.process_id: spec.environ["HEARTH_CLUSTER_SECRET"]
        for spec in specs
        if "HEARTH_CLUSTER_SECRET" in spec.environ
    }
    assert holders == {"gateway-1": "of the cluster", "kv_index-1": "of the cluster"}
    assert not any("HEARTH_METRICS_PORT" in spec.environ for spec in specs), "one for all of them"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"advertise_host": "10.0.0.7"}, "none"),
        ({"advertise_host": "10.0.0.7", "nats_url": "tls://nats.example"}, None),
    ],
)
def test_kv_and_pixels_are_plain_only_where_own_nats_would_show_the_keys(
    tmp_path: Path, changes: dict[str, object], expected: str | None
) -> None:
    """The ends that send and those that receive: one that demands keys gets none."""
    given = options(tmp_path, num_encode=1, **changes)
    specs = plan_services(given, plan_credentials(given), ENDPOINTS, num_cores=2, environ={})
    found = {
        spec.process_id.partition("-")[0]: spec.environ.get("HEARTH_DATA_PLANE_SECURITY")
        for spec in specs
    }
    ends = ("gateway", "prefill", "decode", "encode")
    assert {role: found[role] for role in ends} == dict.fromkeys(ends, expected)


def test_host_of_several_models_has_the_security_of_a_worker(tmp_path: Path) -> None:
    given = options(tmp_path, models=("a", "b"), advertise_host="10.0.0.7")
    specs = plan_services(given, plan_credentials(given), ENDPOINTS, num_cores=2, environ={})
    (host,) = (each for each in specs if each.process_id.startswith("host"))
    assert host.environ["HEARTH_DATA_PLANE_SECURITY"] == "none"
