"""The comparison with other frameworks: no cell without a line of a release."""

from benchmarks.peers import __main__ as peers


def test_the_pages_are_as_generated() -> None:
    text = peers.PAGE.read_text(encoding="utf-8")
    assert text == peers.page(text), "run python -m benchmarks.peers"
    assert peers.RESULTS.read_text(encoding="utf-8") == peers.results(), "run python -m benchmarks.peers"
    assert all(f"{release['name']} {release['version']}" in text for release in peers.RELEASES.values())


def test_each_cell_is_a_line_of_a_known_release() -> None:
    for row in (row for name in peers.TABLES for row in peers.SOURCES[name]):
        cells = {package: cell for package, cell in row.items() if package not in {"can", "shoal"}}
        assert set(cells) <= set(peers.RELEASES)
        assert cells, row
        assert all(len(cell) == 2 and all(cell) for cell in cells.values()), row


def test_a_line_that_a_release_has_not_is_found() -> None:
    row = next(row for row in peers.SOURCES["lacks"] if "ray" in row)
    file, line = row["ray"]
    missing = peers.not_found("ray", {file: f"before {line} after"})
    assert f"ray: {row['can']}: {file}" not in missing
    assert f"ray: {row['can']}: {file}" in peers.not_found("ray", {file: "another line"})
