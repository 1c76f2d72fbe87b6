"""Each place that starts work on one item of others, and where a fault is injected into it."""

from __future__ import annotations

from tests.services.faults.test_item_faults import (
    FAULTS,
    PASSING,
    ROOT,
    _sources,
    started_by,
)

# By file and function: a fault of `test_item_faults`, or the test that raises within the work.
# GUARDED: `fail` does nothing there, and the next beat, try or request makes up for the item; the
# guard itself is shown by the tests of `shared.background`.
GUARDED = (
    "tests/shared/test_background.py::test_item_fails_alone_and_a_loop_of_the_process_does_not"
)
SITES = {
    "services/decode/active_handoffs.py": {"_run": "handoff", "_renew_at_site": GUARDED},
    "services/encode/service.py": {"_deliver": GUARDED},
    "services/gateway/dialects/responses/storage/store.py": {"_save": "stored response"},
    "services/gateway/nats_api/api.py": {"_serve": GUARDED},
    "services/gateway/observability/telemetry/span_exporter.py": {"_watch": GUARDED},
    "services/gateway/preparation/preparation_pool.py": {"_run": "preparation", "_fill": GUARDED},
    "services/gateway/sites/site_service.py": {"_report_loss": GUARDED},
    "services/gateway/sites/site_tenants.py": {"_note_site": GUARDED},
    "services/gateway/sites/tenant_copies.py": {"_ask": GUARDED},
    "services/gateway/streams/stream_driver.py": {"_submit": "submission", "_resend": GUARDED},
    "services/gateway/tenancy/site_leases.py": {"_exchange": GUARDED},
    "services/host/hosted_revisions.py": {
        "_search": "tests/services/host/test_model_faults.py::test_search_that_raises_is_repeated"
    },
    "services/host/service.py": {
        "work": "tests/services/host/test_model_faults.py::"
        "test_start_that_raises_fails_its_model_alone"
    },
    "services/host/workers/workers.py": {
        "_wait": GUARDED,
        "_follow": "tests/services/host/test_model_faults.py::"
        "test_template_that_cannot_be_read_is_replaced",
    },
    "services/kv_index/service.py": {"_resync": "resync"},
    "services/local/processes/fault_server.py": {"_thaw_later": GUARDED},
    "services/prefill/service.py": {"_deliver": "computed prompt"},
    "services/scheduler/service.py": {
        "_on_first_worker": GUARDED,
        "_place": "placement",
        "probing": "queue",
        "_started": "placed",
        "_send": "failure",
        "_abort": "abort",
    },
    "services/worker/drained_worker.py": {"hand_over": GUARDED},
    "services/worker/step_profiles.py": {"_record": GUARDED},
    "shared/engine/executors/cuda/idle_captures.py": {"_run": GUARDED},
    "shared/engine/executors/group/kv/rank_kv.py": {
        "_answer": "tests/shared/engine/executors/group/test_rank_kv.py::"
        "test_command_that_raises_fails_alone"
    },
    "shared/engine/vision/image_jobs.py": {"_run": GUARDED},
    "shared/kv_wire/kv_server.py": {"_welcome": "connection of a push"},
    "shared/lifecycle/heartbeat.py": {"_request": "late peer", "_probe": "probe"},
    "shared/lifecycle/host_models.py": {"_request": GUARDED},
    "shared/pixels/pixel_holder.py": {"_push": GUARDED, "_push_stored": GUARDED},
    "shared/sites/linked_sites.py": {"_read_models": GUARDED},
    "shared/transport/bus.py": {"answer": "admission"},
}


def test_each_start_of_an_item_is_known() -> None:
    found = {
        str(path.relative_to(ROOT)): set(names)
        for path in _sources("start_item")
        if (names := tuple(started_by(path, "start_item")))
    }
    assert found == {path: set(names) for path, names in SITES.items()}


def test_the_faults_of_the_items_exist() -> None:
    for fault in {each for names in SITES.values() for each in names.values()}:
        path, _, test = fault.partition("::")
        if "::" in fault:
            assert f"def {test}" in (ROOT / path).read_text(), fault
        else:
            assert fault in FAULTS or fault in PASSING, fault
