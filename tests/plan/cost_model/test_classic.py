"""The tables of the papers, to the digit they print."""

import pytest

from bessemer.plan.cost_model.operators import (
    gpt_parameters,
    hardware_flops,
    model_flops,
    stage_activations,
    zero_states,
    zero_traffic,
)

ZERO = {  # devices: stage 1, 2, 3 of 7.5B, 128B and 1T parameters, in GB
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}


@pytest.mark.parametrize("devices", ZERO)
def test_table_1_of_zero(devices: int) -> None:
    cells = [(size, stage) for size in (7.5e9, 128e9, 1e12) for stage in (1, 2, 3)]
    for (size, stage), printed in zip(cells, ZERO[devices], strict=True):
        found = zero_states(size, stage, devices) / 1e9  # type: ignore[arg-type]
        digits = len(printed.partition(".")[2])
        # Large cells were cut, not rounded (4187.5 is printed as 4187), and 41.25 is rounded up.
        assert abs(found - float(printed)) <= (1.0 if digits == 0 else 0.51 * 10**-digits), (size, stage, found)


def test_what_zero_sends() -> None:
    assert [zero_traffic(1.0, stage) for stage in (0, 1, 2, 3)] == [2, 2, 2, 3]  # type: ignore[arg-type]


# h, L, a, p, m, b, rows, devices; GiB of activations without and with sequence + selective; seconds; MFU and HFU
KORTHIKANTI = {
    "22B": ((6144, 48, 64, 1, 1, 4, 4, 8), 59.25, 9.5625, 1.10, 41.5, 43.7),
    "175B": ((12288, 96, 96, 8, 3, 1, 64, 64), 66.84375, 12.3515625, 13.75, 51.4, 52.8),
    "530B": ((20480, 105, 128, 35, 3, 1, 280, 280), 114.0234375, 23.076171875, 37.83, 56.0, 57.0),
    "1T": ((25600, 128, 160, 64, 1, 1, 512, 512), 131.25, 26.5625, 71.49, 56.3, 57.0),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_memory_and_use_of_korthikanti(name: str) -> None:
    (h, L, a, p, m, b, rows, devices), whole, lean, seconds, mfu, hfu = KORTHIKANTI[name]
    s, v = 2048, 51_200
    assert stage_activations(h, L, a, s, b, 8, p, m) / 2**30 == whole
    assert stage_activations(h, L, a, s, b, 8, p, m, sequence=True, how="selective") / 2**30 == lean
    peak = devices * 312e12 * seconds
    assert model_flops(h, L, s, v, rows) / peak * 100 == pytest.approx(mfu, abs=0.25)
    assert hardware_flops(h, L, s, v, rows, "selective") / peak * 100 == pytest.approx(hfu, abs=0.25)


def test_parameters_of_the_models_of_narayanan() -> None:
    """Table 1 of 2104.04473 prints billions with one digit."""
    table = {(2304, 24): 1.7, (3072, 30): 3.6, (4096, 36): 7.5, (6144, 40): 18.4, (8192, 48): 39.1, (10240, 60): 76.1}
    for (h, L), billions in table.items():
        assert round(gpt_parameters(h, L, 2048, 51_200) / 1e9, 1) == billions
