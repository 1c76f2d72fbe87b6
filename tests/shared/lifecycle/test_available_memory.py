from pathlib import Path

from shared.lifecycle.available_memory import available_bytes

MEMINFO = "MemTotal:       32 kB\nMemAvailable:      20 kB\n"


def test_memory_is_that_of_the_machine_within_the_limit_of_its_container(tmp_path: Path) -> None:
    """Cached files of the container can be dropped."""
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert available_bytes(cgroup, meminfo) is None
    meminfo.write_text(MEMINFO)
    assert available_bytes(cgroup, meminfo) == 20 << 10
    for name, text in {"max": "9000\n", "current": "8000\n"}.items():
        (cgroup / f"memory.{name}").write_text(text)
    assert available_bytes(cgroup, meminfo) == 1000
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 2000\nactive_file 500\n")
    assert available_bytes(cgroup, meminfo) == 3500
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(cgroup, meminfo) == 20 << 10
