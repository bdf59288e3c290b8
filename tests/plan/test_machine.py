"""What utilisation is counted against: data sheets for known GPUs, a measured product elsewhere. The plan's table."""

import pytest

from bessemer.plan.decision import Plan
from bessemer.plan.hardware import DataSheet, Machine, data_sheet, data_sheets


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI250X", 191.5),
    ],
)
def test_peaks_of_the_data_sheets(name: str, tflops: float) -> None:
    sheet = data_sheet(name)
    assert sheet and sheet.bf16 == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA A1000", "NVIDIA GeForce GTX 1080", "Quadro P400", "x86_64", ""])
def test_other_devices_are_not_mistaken_for_known_ones(name: str) -> None:
    assert data_sheet(name) is None


def test_every_entry_can_be_reached() -> None:
    for key, bf16, fp8, memory in data_sheets():
        found = data_sheet(f"NVIDIA {key}")
        assert found == DataSheet(bf16 * 1e12, fp8 and fp8 * 1e12, memory and memory * 1e9), key


def test_fp8_and_memory_of_the_data_sheets() -> None:
    for key, bf16, fp8, _ in data_sheets():
        assert fp8 is None or fp8 == pytest.approx(2 * bf16, rel=0.02), f"{key}: dense fp8 is twice dense bf16"
    assert data_sheet("NVIDIA H200") == DataSheet(989e12, 1979e12, 4.8e12)
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM-64GB")
    assert [data_sheet(name) for name in names] == [
        DataSheet(312e12, None, 2.039e12), DataSheet(312e12, None, 1.935e12), DataSheet(312e12,
        None, 1.555e12), DataSheet(312e12),
    ]  # fmt: skip


def test_the_peak_of_a_machine() -> None:
    rates = {"fp32": 50e12, "bf16": 600e12}
    assert Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 1, rates).peak("bf16")[0] == 989e12
    assert Machine("cuda", "NVIDIA H100 80GB HBM3", 1, 1, rates).peak("fp32")[0] == 50e12
    assert Machine("cuda", "Something New", 1, 1, rates).peak("bf16") == (
        600e12,
        "bf16 matmul of this machine, measured at start",
    )
    assert Machine("cpu", "A100 in its name", 1, 1, rates).peak("bf16")[0] == 600e12


def test_fp8_is_counted_against_bf16() -> None:
    rates = {"fp32": 50e12, "bf16": 600e12, "fp8": 1200e12}
    for precision in ("fp8", "fp8_rowwise", "fp16"):
        assert Machine("cuda", "NVIDIA H200", 1, 1, rates).peak(precision) == (989e12, "data sheet of NVIDIA H200")
        assert Machine("cuda", "Something New", 1, 1, rates).peak(precision)[0] == 600e12
    assert Machine("cuda", "NVIDIA H200", 1, 1, rates).peak("tf32")[0] == 989e12 / 2
    assert Machine("cuda", "Something New", 1, 1, rates | {"tf32": 300e12}).peak("tf32")[0] == 300e12
    assert Machine("cuda", "Something New", 1, 1, rates | {"fp16": 500e12}).peak("fp16")[0] == 500e12


def test_a_device_without_bf16_is_measured_in_fp32() -> None:
    """Zero would be divided by at the first step."""
    assert Machine("mps", "x", 1, 1, {"fp32": 5e12, "bf16": 0.0}).peak("bf16")[0] == 5e12
    assert Machine("mps", "x", 1, 1, {"fp32": 5e12}).peak("bf16")[0] == 5e12


def test_a_plan_keeps_the_users_values_and_prints_as_a_table() -> None:
    plan = Plan()
    assert plan.choose("a", "auto", (5, "because", "rule")) == 5
    assert plan.choose("b", None, (6, "because", "rule")) == 6
    assert plan.choose("c", 7, (8, "because", "rule")) == 7
    plan.add("d", 3.14159265, "pi", "rule")
    plan.add("e", 1_234_567, "", "")
    plan.add("f", {"web": 12_000, "on": True}, "", "")
    plan.add("a", 9, "changed its mind", "rule")
    assert plan.rows() == [
        ("a", "9", "changed its mind", "rule"),
        ("b", "6", "because", "rule"),
        ("c", "7", "written in the spec", "asked"),
        ("d", "3.142", "pi", "rule"),
        ("e", "1,234,567", "", ""),
        ("f", "web 12,000, on true", "", ""),
    ]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.value("c") == 7


def test_a_machine_is_plain_data() -> None:
    machine = Machine("cpu", "x", 1, 2, {"fp32": 1.0})
    assert Machine(**machine.to_json()) == machine
