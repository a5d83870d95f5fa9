"""A page is well-formed, escapes what it is given, and needs nothing else."""

import re
from xml.etree import ElementTree

from shoal.report.html import Bar, Page, Section, Series, Spot, Table, chart, render, waterfall

NASTY = "<script>alert('&')</script>"


def page() -> str:
    bars = [Bar(NASTY, 0.6, "6 s"), Bar("gradients", 0.4, "4 s")]
    spots = [Spot(1, 10.0, NASTY), Spot(8, 60.0, "eight", marked=True)]
    speed = chart("Speed", [Series("", spots)], ("devices", NASTY), ideal=True)
    parts = [
        Section("A step", [NASTY], drawing=waterfall("Seconds", bars), table=Table(["term", NASTY], [[NASTY, "1"]])),
        Section("Curve", drawing=speed, table=Table(["n"], [["1"]]), folded=True),
        Section("Plan", code=NASTY),
    ]
    return render(Page(NASTY, [NASTY], parts))


def test_well_formed_and_escaped() -> None:
    text = page()
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert root.tag == "html"
    assert root.get("lang") == "en"
    assert "<script" not in text
    assert text.count("alert") >= 7


def test_needs_nothing_from_elsewhere() -> None:
    text = page().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(|<link", text)


def test_drawings_are_named_and_tables_have_headers() -> None:
    text = page()
    for label in re.findall(r'aria-labelledby="([^"]+)"', text):
        assert f'<title id="{label}">' in text
    assert text.count('role="img"') == 2
    assert '<th scope="col">' in text
    assert '<th scope="row">' in text


def test_bars_follow_each_other() -> None:
    text = str(waterfall("Parts", [Bar("a", 0.25, ""), Bar("b", 0.75, "")]))
    (x0, w0), (x1, w1) = [
        (float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', text)
    ]
    assert abs(x0 + w0 - x1) < 0.2
    assert abs(w1 - 3 * w0) < 0.3


def test_a_curve_of_one_spot_or_none() -> None:
    assert str(chart("None", [Series("", [])], ("x", "y"))) == ""
    assert "circle" in chart("One", [Series("", [Spot(1, 1.0, "one")])], ("x", "y"), ideal=True)


def test_curves_share_axes_and_a_dashed_line_grows_as_x() -> None:
    slow, fast = Series("slow", [Spot(1, 1.0), Spot(4, 2.0)]), Series("fast", [Spot(1, 8.0), Spot(4, 8.0)])
    text = str(chart("Two", [slow, fast], ("x", "y"), ideal=True))
    lines = re.findall(r'<polyline points="([^"]+)" fill="none" stroke="([^"]+)"', text)
    spots = {colour: [tuple(map(float, p.split(","))) for p in points.split()] for points, colour in lines}
    assert spots["#0072B2"][0] == spots["#777"][0]
    assert spots["#777"][1][1] < spots["#0072B2"][1][1]  # 4 is above 2
    assert spots["#E69F00"][0][1] == spots["#E69F00"][1][1] < spots["#777"][1][1]
    assert [s[0] for s in spots["#0072B2"]] == [s[0] for s in spots["#E69F00"]]
    assert {"slow", "fast"} <= set(re.findall(r">(\w+)</text>", text))
