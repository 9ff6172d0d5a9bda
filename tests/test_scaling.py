"""The arithmetic of docs/explanation/scaling.md against values computed by hand."""

from pathlib import Path

import pytest

from iresnet.results import Results, write
from tools import scaling
from tools.scaling import ETHERNET, INFINIBAND, Link, Step, all_reduce, ring, with_communication

STEP = Step("net", ms=10.0, gib=4.0, batch=128, parameters=2**26)  # weights, gradient and Adam: 1 GiB


def test_links():
    assert scaling.NVLINK.bandwidth == 450e9
    assert INFINIBAND.bandwidth == 50e9
    assert ETHERNET.bandwidth == 3.125e9


def test_ring():
    assert ring(1e9, 4, Link("", 1e9, 0.0)) == pytest.approx(1.5)  # 2 * 3/4 of a second
    assert ring(0, 4, Link("", 1e9, 1e-3)) == pytest.approx(6e-3)
    assert ring(1e9, 1, Link("", 1e9, 1.0)) == 0


def test_all_reduce_within_a_node():
    # 2 * 7/8 * 90 MB / 450 GB/s = 0.35 ms, and 14 messages of 3 µs
    assert all_reduce(90e6, 8, INFINIBAND) == pytest.approx(0.35e-3 + 42e-6)


def test_all_reduce_among_nodes():
    inside = 0.35e-3 + 42e-6
    # an eighth for every port: 2 * 1/2 * 11.25 MB / 50 GB/s = 0.225 ms, and 2 messages of 5 µs
    assert all_reduce(90e6, 16, INFINIBAND) == pytest.approx(inside + 0.225e-3 + 10e-6)
    # one port for all: 2 * 1/2 * 90 MB / 3.125 GB/s = 28.8 ms
    assert all_reduce(90e6, 16, ETHERNET) == pytest.approx(inside + 28.8e-3 + 60e-6)


def test_overlap():
    assert with_communication(9.0, 5.0, overlap=False) == 14.0
    assert with_communication(9.0, 5.0, overlap=True) == 9.0
    assert with_communication(9.0, 7.0, overlap=True) == 10.0


def test_memory():
    assert STEP.state_gib == 1.0
    assert STEP.larger().gib == 1 + 4 * 3
    assert STEP.larger().ms == 40.0
    assert STEP.larger().largest_batch == int((139 - 1) / 12 * 128)


def test_input():
    assert scaling.input_rate(STEP, 0.1) == 8 * 128 * 3 * 64 * 64 / 0.1


@pytest.mark.parametrize(
    ("ms", "gpus", "link", "first"),
    [
        (100.0, 1024, INFINIBAND, "arithmetic"),
        (0.1, 8, INFINIBAND, "gradients over NVLink 4"),
        (1.0, 64, INFINIBAND, "gradients over InfiniBand NDR"),
        (100.0, 64, ETHERNET, "gradients over 25 GbE"),
    ],
)
def test_the_first_bottleneck(ms, gpus, link, first):
    assert scaling.bottleneck(Step("net", ms, 4.0, 1, 2**26), gpus, link) == first


def test_input_can_be_the_bottleneck():
    assert scaling.bottleneck(Step("net", 1.0, 4.0, 4096, 1000), 8, INFINIBAND) == "input over 25 GbE"


@pytest.fixture
def results(tmp_path):
    """Results of a network whose steps take 1 ms and 0.1 ms per image."""
    step = [
        {"network": "iresnet164", "batch": n, "ms": 1 + n / 10, "memory GiB": 2.0, "parameters": 10**6, "run": 0}
        for n in (100, 200)
    ]
    flow = {"network": "flow", "batch": 100, "log-determinant": "PowerSeries(5)", "ms": 50.0, "memory GiB": 3.0}
    write(Results("step", step, [{}]), tmp_path)
    write(Results("flow", [{**flow, "parameters": 10**6, "run": 0}], [{}]), tmp_path)
    inverse = {"method": "Inverter, code residual: float64", "images": 100, "ms": 50.0, "run": 0}
    write(Results("inverse", [inverse], [{}]), tmp_path)
    sampling = {"method": "Flow.sample", "samples": 100, "ms": 100.0, "model": "f", "tolerance": 1e-4, "run": 0}
    write(Results("sampling", [sampling], [{}]), tmp_path)
    return tmp_path


def test_the_line_through_two_batches(results):
    assert scaling.step_of_batch(results, 50) == pytest.approx(6e-3)
    assert scaling.step_of_batch(results, 0) == pytest.approx(1e-3)


def test_tables(results):
    weak = scaling.weak(results)
    assert [row["GPUs"] for row in weak[:7]] == [8, 64, 64, 256, 256, 1024, 1024]
    assert weak[0]["images / s"] == pytest.approx(8 * 100 / 44e-3)  # 4 * 11 ms, communication hidden
    assert {row["network"] for row in weak} == {"iresnet164", "flow"}
    strong = scaling.strong(results)
    assert [row["images per GPU"] for row in strong] == [1024, 128, 32, 8]
    assert strong[-1]["step ms"] == pytest.approx(4 * 1.8)
    assert strong[-1]["of it independent of the batch"] == pytest.approx(1 / 1.8)
    solving = scaling.solving(results)
    assert [row["images / s, 8 GPUs"] for row in solving] == [8 * 100 / 0.2, 8 * 100 / 0.4]
    assert "gradient MB" in scaling.scaling_table("measured", results)


def test_an_unknown_table():
    with pytest.raises(ValueError, match="scaling must be one of measured, weak, strong, solving; got 'week'"):
        scaling.scaling_table("week", Path())


class TestThePage:
    """What the page says in words follows from the published results."""

    RESULTS = Path(__file__).parent.parent / "results"

    def test_memory_is_no_bottleneck(self):
        assert all(row["GiB at 64 x 64"] < scaling.GPU_GIB / 2 for row in scaling.measured(self.RESULTS))

    def test_with_infiniband_it_is_the_arithmetic(self):
        rows = [row for row in scaling.weak(self.RESULTS) if row["between nodes"] != ETHERNET.name]
        assert {row["first bottleneck"] for row in rows} == {"arithmetic"}
        assert all(row["efficiency with overlap"] == 1 and row["efficiency without"] > 0.9 for row in rows)

    def test_with_ethernet_it_is_the_gradients_of_the_classifier(self):
        rows = [row for row in scaling.weak(self.RESULTS) if row["between nodes"] == ETHERNET.name]
        limited = {row["network"] for row in rows if row["first bottleneck"] == "gradients over 25 GbE"}
        assert limited == {"iresnet164"}
        assert all(row["efficiency with overlap"] == 1 for row in rows if row["network"] != "iresnet164")

    def test_input_is_below_half_a_gigabyte_per_second(self):
        assert all(row["input GB / s and node"] < 0.5 for row in scaling.weak(self.RESULTS))

    def test_a_fixed_batch_is_limited_by_what_does_not_depend_on_it(self):
        shares = {row["GPUs"]: row["of it independent of the batch"] for row in scaling.strong(self.RESULTS)}
        assert shares[64] < 0.5 < shares[256]
