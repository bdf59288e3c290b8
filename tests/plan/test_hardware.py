"""The catalogue, and the words of users."""

import json
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.plan.hardware import (
    CeilingReading,
    Ceilings,
    data_sheet,
    find_gpu,
    gpu_catalogue,
    parse_cluster,
    parse_network,
    user_file,
    with_ceilings,
)


@pytest.mark.parametrize(
    ("words", "name", "count", "per_node"),
    [
        ("8xA100-80GB", "A100-80GB", 8, 8),
        ("64 x H100", "H100", 64, 8),
        ("2 nodes of 8 A100", "A100-80GB", 16, 8),
        ("2 nodes of 4 x L40S", "L40S", 8, 4),
        ("2x8xH100", "H100", 16, 8),
        ("8 A100s", "A100-80GB", 8, 8),
        ("H200", "H200", 1, 1),
        ("RTX 4090", "RTX 4090", 1, 1),
        ("4x3090", "RTX 3090", 4, 4),
        ("2 x NVIDIA GeForce RTX 5090", "RTX 5090", 2, 2),
        ("h100 x 8", "H100", 8, 8),
        ("1,024 H100", "H100", 1024, 8),
        ("12xH200", "H200", 12, 6),
        ("8xNVIDIA A100-SXM4-40GB", "A100-40GB", 8, 8),
    ],
)
def test_the_forms_that_users_write(words: str, name: str, count: int, per_node: int) -> None:
    found = parse_cluster(words)
    assert (found.gpu.name, found.count, found.per_node) == (name, count, per_node)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("8xA101", "A100-80GB"),
        ("8xH1000", "H100"),
        ("RTX 4099", "RTX 4090"),
        ("0xH100", "from 1 to"),
        ("-8xH100", "from 1 to"),
        ("2.5xH100", "from 1 to"),
        ("99999999xH100", "from 1 to"),
        ("8", "8xA100-80GB"),
        ("", "8xA100-80GB"),
    ],
)
def test_nonsense_is_refused_with_the_fix(words: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        parse_cluster(words)
    assert "\n" not in str(refused.value)


def test_networks() -> None:
    assert parse_network("400 Gb/s")[0] == 50e9
    assert parse_network("8 x HDR") == (200e9, "InfiniBand HDR")
    assert parse_cluster("16xH100", network="100GbE").network_bandwidth == 12.5e9
    with pytest.raises(UserError, match="NDR"):
        parse_network("infiniband ndx")


def test_the_catalogue_agrees_with_the_table_that_utilisation_is_counted_against() -> None:
    compared = 0
    for gpu in gpu_catalogue().values():
        sheet = data_sheet(gpu.name.replace("-80GB-PCIe", " 80GB PCIe").replace("-", " "))
        if sheet is None or "PCIe" in gpu.name or gpu.name == "V100-PCIe":
            continue
        half = gpu.peaks.get("bf16") or gpu.peaks["fp16"]
        assert half == pytest.approx(sheet.bf16, rel=0.01), gpu.name
        compared += 1
    assert compared >= 15


def test_every_entry_is_whole_and_has_a_source() -> None:
    for gpu in gpu_catalogue().values():
        assert gpu.source and gpu.memory_bandwidth > 1e11 and gpu.link_bandwidth > 1e9 and gpu.node >= 1
        order = [gpu.peaks[key] for key in ("fp32", "tf32", "bf16", "fp8", "fp4") if key in gpu.peaks]
        assert order == sorted(order), gpu.name


def test_old_cards_have_no_bf16() -> None:
    for name in ("P100", "V100", "T4"):
        with pytest.raises(UserError, match="fp16"):
            find_gpu(name).peak("bf16")


def test_a_users_file_adds_and_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    entry = {
        "name": "X9000", "generation": "hopper", "memory_gb": 100, "memory_gb_s": 5000, "watts": 500, "link": "PCIe",
        "link_gb_s": 50, "node": 8, "network": "Ethernet", "network_gbit_s": 100, "peaks_tflops": {"bf16": 500},
    }  # fmt: skip
    user_file().parent.mkdir(parents=True)
    user_file().write_text(json.dumps({"gpus": [entry]}))
    assert parse_cluster("8xX9000").gpu.peak("bf16") == 500e12
    assert parse_cluster("8xH100").count == 8
    user_file().write_text(json.dumps({"gpus": [entry | {"memory_gb": None}]}))
    with pytest.raises(UserError, match="X9000"):
        find_gpu("H100")
    user_file().write_text("{}")
    with pytest.raises(UserError, match="not a catalogue"):
        find_gpu("H100")


def test_what_was_measured_goes_before_the_data_sheet() -> None:
    cluster = parse_cluster("1xH200")
    reading = CeilingReading("matmul_bf16", "8192", 700e12, "FLOP/s")
    kept = Ceilings("cuda", "NVIDIA H200", 1, "2026-11-16", {}, (reading,))
    assert with_ceilings(cluster, kept).measured == {"matmul_bf16": 700e12}
    assert with_ceilings(parse_cluster("1xA100"), kept).measured == {}, "another kind of machine"
