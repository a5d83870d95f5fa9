"""The table of shipped bugs."""

from benchmarks.shipped.__main__ import BUGS, HERE, PARTNERS

from shoal.programs.check import PHASES


def test_rows_name_releases_trainings_and_phases():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    releases = {release for bug in BUGS for release in (bug.broken, bug.mended) if release}
    assert all(release.count("==") == 1 for release in releases)
    assert set(PARTNERS) <= releases
    for bug in BUGS:
        assert (HERE / bug.training.split()[0]).exists()
        assert set(bug.phases) <= set(PHASES)
        assert bug.broken != bug.mended
