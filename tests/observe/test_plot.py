"""Figures: what is drawn is where it belongs, in SVG that parses and in text of a fixed width."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.observe.figure import Axis, Figure, Heatmap, Histogram, LineChart, svg_file
from bessemer.observe.page import html_page

ANY = st.floats(allow_nan=True, allow_infinity=True)  # the smallest and the largest doubles too


def parsed(figure: Figure) -> ET.Element:
    return ET.fromstring(figure.svg())


def test_a_line_goes_through_its_points() -> None:
    figure = LineChart("A <b> & c", [0, 1, 2], {"loss": [4.0, 2.0, 0.0]}, "step", marks={"here": 1.0})
    (path,) = parsed(figure).iter("path")
    xs = [float(x) for x, _ in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.attrib["d"])]
    ys = [float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.attrib["d"])]
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2) and xs == sorted(xs)
    assert ys == sorted(ys), "a falling loss falls on the page"
    lines = figure.text(width=21, height=5).splitlines()
    assert lines[1][11:] == "*         |" and lines[5][11:] == " " * 10 + "|" + " " * 9 + "*"
    assert "* loss" in lines[0] and "| here 1" in lines[0]


def test_values_that_are_not_finite_leave_a_gap() -> None:
    figure = LineChart("x", [1, 2, 3, 4, 5], {"y": [1.0, 2.0, math.nan, 2.0, 1.0]})
    (path,) = parsed(figure).iter("path")
    assert path.attrib["d"].count("M") == 2 and path.attrib["d"].count("L") == 2
    log = LineChart("x", [1, 10, 100], {"y": [0.0, 1.0, 10.0]}, log_x=True, log_y=True)
    (path,) = parsed(log).iter("path")
    assert path.attrib["d"].count("M") == 1 and path.attrib["d"].count("L") == 1


def test_axes() -> None:
    assert Axis.around([1e-4, 1.0], log=True).ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert Axis.around([0.0, 10.0]).ticks() == pytest.approx([0, 2, 4, 6, 8, 10])
    assert Axis.around([1e-6, 1.0], log=True).place(1e-3) == pytest.approx(0.5)
    assert Axis.around([5.0]).place(5.0) == pytest.approx(0.5) and Axis.around([]).place(1.0) == pytest.approx(0.5)
    assert Axis(0, 1).place(2.0) is None


@given(st.lists(ANY, min_size=1, max_size=20), st.booleans(), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], log_x: bool, log_y: bool) -> None:
    xs = [abs(value) for value in values]
    for figure in (
        LineChart("t", xs, {"a": values, "b": xs}, log_x=log_x, log_y=log_y, marks={"m": values[0]}),
        Heatmap("t", [0.0, 1.0], [0.0], [[values[0], values[-1]]]),
        Histogram("t", 0.0, 1.0, [value if math.isfinite(value) else 0.0 for value in xs]),
    ):
        parsed(figure)
        assert figure.text()


def test_a_heat_map_has_its_first_row_at_the_bottom() -> None:
    figure = Heatmap("h", [0, 1], [0, 1], [[0.0, 1.0], [2.0, 9.0]])
    top, bottom = figure.text().splitlines()[1:]
    assert top == "  ::@@" and bottom == "    .."
    cells = list(parsed(figure).iter("rect"))
    assert len(cells) == 4 and float(cells[0].attrib["y"]) > float(cells[3].attrib["y"])


def test_bars_have_heights_by_their_counts() -> None:
    bars = list(parsed(Histogram("b", -1.0, 1.0, [1, 0, 4])).iter("rect"))
    assert len(bars) == 2
    assert float(bars[1].attrib["height"]) == pytest.approx(4 * float(bars[0].attrib["height"]), rel=0.02)


def test_a_page_is_self_contained_and_escapes_its_title() -> None:
    text = html_page("a < b", [("", [LineChart("t", [0, 1], {"y": [0, 1]})])])
    assert "<h1>a &lt; b</h1>" in text and "http:" not in text and "<script" not in text


def test_the_band_and_the_flagged_points_follow_the_values() -> None:
    figure = LineChart("t", [0, 1, 2], {"y": [1.0, 2.0, 3.0]}, band=(1.0, 3.0), flagged=[1])
    (band,), (dot,) = parsed(figure).iter("rect"), parsed(figure).iter("circle")
    assert float(dot.attrib["cy"]) == pytest.approx(float(band.attrib["y"]) + float(band.attrib["height"]) / 2)


def test_a_figure_can_be_a_file_of_its_own() -> None:
    root = ET.fromstring(svg_file(LineChart("loss", [0, 1], {"a": [1.0, 2.0]}).svg()))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
