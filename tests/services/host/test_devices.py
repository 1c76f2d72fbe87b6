from fractions import Fraction

import pytest

from services.host import devices
from services.host.devices import budgets_of, memory_bytes, offload_bytes_of
from shared.config import device_budgets
from shared.errors import ConfigError


def test_budgets_have_units() -> None:
    given = ["cpu=1.5GiB", "cuda:1=2GB", "cuda:2=7", "cuda:3", "cuda:4=45%"]
    assert device_budgets(given) == {
        "cpu": 3 << 29,
        "cuda:1": 2 * 10**9,
        "cuda:2": 7,
        "cuda:3": None,
        "cuda:4": Fraction(45, 100),
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tpu=1GiB", r"is not DEVICE=SIZE\|SHARE with the device cpu or cuda:N"),
        ("cpu=", "'' is neither a size such as 8GiB"),
        ("cpu=0", "is no memory"),
        ("cpu=12 parsecs", "'12 parsecs' is neither a size such as 8GiB"),
    ],
)
def test_invalid_budgets_are_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"budget '{text}'.* {problem}|{problem}"):
        device_budgets([text])


def test_device_has_one_budget() -> None:
    with pytest.raises(ConfigError, match="cpu has a budget already"):
        device_budgets(["cpu=1GiB", "cpu=2GiB"])


def test_default_is_half_of_the_memory_and_more_than_all_is_refused() -> None:
    assert budgets_of(["cpu"]) == {"cpu": memory_bytes() // 2}
    with pytest.raises(ConfigError, match="this machine has"):
        budgets_of([f"cpu={2 * memory_bytes()}"])


def test_share_is_of_all_memory_and_the_default_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert budgets_of(["cpu=25%"]) == {"cpu": memory_bytes() // 4}
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    monkeypatch.setattr(devices, "gpu_memories", lambda: [(700, 1000), (100, 2000)])
    assert budgets_of(["cuda:1=0.45", "cuda:0"]) == {"cuda:1": 900, "cuda:0": 630}
    assert budgets_of([]) == {"cuda:0": 630, "cuda:1": 90}


def test_parked_weights_take_half_of_the_memory_with_the_cpu() -> None:
    total = memory_bytes()
    assert offload_bytes_of(None, {"cpu": 1}) == 0
    assert offload_bytes_of(None, {"cuda:0": 1}) == total // 2
    assert offload_bytes_of(None, {"cuda:0": 1, "cpu": 7}) == total // 2 - 7
    assert offload_bytes_of(0, {"cuda:0": 1}) == 0
    with pytest.raises(ConfigError, match=r"parked_weights_bytes .* this machine has"):
        offload_bytes_of(total, {"cuda:0": 1, "cpu": 1})


def test_device_that_this_machine_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="budget of cuda:99: the CUDA devices of this machine"):
        budgets_of(["cuda:99=1GiB"])
