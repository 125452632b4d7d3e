"""What a process may use where a control group leaves it less than the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerostall import config, memory

MIB = 1 << 20


def tree(root: Path, cgroup: str, **files: object) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup: `files` by path, with `__` for a slash and `_` for itself."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "meminfo").write_text(f"MemTotal: {1 << 40} kB\nMemAvailable: {1 << 40} kB\n")
    (root / "groups").mkdir()
    for name, text in files.items():
        path = root / "groups" / name.replace("__", "/").replace("memory_", "memory.", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root / "proc", root / "groups"


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/", {"memory_max": 64 * MIB}),  # a container sees its own group at the top
        ("0::/a/b", {"a__b__memory_max": "max", "a__memory_max": 64 * MIB}),
        ("0::/a/b", {"a__b__memory_max": 64 * MIB, "a__memory_max": 65 * MIB}),
        ("0::/a", {"a__memory_max": 70 * MIB, "a__memory_high": 64 * MIB}),
        ("0::/gone", {"memory_max": 64 * MIB}),
        ("0::/../../elsewhere", {"memory_max": 64 * MIB}),
        ("1:cpu:/\n0::/a", {"unified__a__memory_max": 64 * MIB}),
    ],
)
def test_the_least_limit_of_the_groups_around_a_process_counts(tmp_path: Path, cgroup: str, files: dict) -> None:
    assert memory.limit(*tree(tmp_path, cgroup, **files)) == 64 * MIB


def test_the_first_version_of_groups_is_understood(tmp_path: Path) -> None:
    proc, groups = tree(tmp_path, "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/")
    for folder, bound in (("a/b", 2**63 - 4096), ("a", 64 * MIB), (".", 2**63 - 4096)):
        (groups / "memory" / folder).mkdir(parents=True, exist_ok=True)
        (groups / "memory" / folder / "memory.limit_in_bytes").write_text(str(bound))
    (groups / "memory" / "a" / "memory.usage_in_bytes").write_text(str(40 * MIB))
    (groups / "memory" / "a" / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {10 * MIB}\n")
    assert memory.limit(proc, groups) == 64 * MIB
    assert memory.available(proc, groups) == 34 * MIB


def test_what_a_group_has_used_is_not_available(tmp_path: Path) -> None:
    files = {"a__memory_max": 64 * MIB, "a__memory_current": 60 * MIB, "a__memory_stat": f"anon 3\ninactive_file {MIB}"}
    assert memory.available(*tree(tmp_path, "0::/a", **files)) == 5 * MIB


@pytest.mark.parametrize("cgroup", ["0::/", "", "4:memory:/a"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, cgroup: str) -> None:
    proc, groups = tree(tmp_path, cgroup, memory_max="max")
    assert memory.limit(proc, groups) == memory.limit(tmp_path / "no proc", tmp_path / "no groups")
    assert memory.available(proc, groups) == 1 << 50


def test_the_agent_lends_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROSTALL_HOST_BUDGET", raising=False)
    monkeypatch.setattr(memory, "limit", lambda: 64 * MIB)
    assert config.AgentSettings.from_environment().host_budget == 32 * MIB
