"""The planted bugs fit the sources as they are, so that ``python -m bench.mutations`` can run."""

import pytest

from bench.mutations import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_planted_bug_has_its_place_and_tests(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.old) == 1
    assert all((ROOT / f"tests/unit/test_{name}.py").is_file() for name in bug.tests.split())


def test_there_are_twenty() -> None:
    assert len({bug.name for bug in BUGS}) == 20
