from services.local.gpus import count_gpus


def test_a_machine_without_a_driver_has_none() -> None:
    assert count_gpus("libthere_is_no_such_driver.so.1") == 0
