from services.local.gpus import count_gpus


def test_count_is_zero_without_a_driver() -> None:
    assert count_gpus("libthere_is_no_such_driver.so.1") == 0
