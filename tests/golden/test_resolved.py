"""Every recipe puts the casts into the layers of two models that it put there when the files were made."""

import pytest

from golden import pages, resolved
from narrowgauge.recipes import recipe_names


@pytest.mark.tier("thorough", keep=8)
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_resolves_to_what_it_did(name):
    file = resolved.FOLDER / f"{name}.txt"
    assert file.exists(), "nothing is kept of it: python tests/golden/make.py resolved"
    assert resolved.text_of(name) == file.read_text(encoding="utf-8")


def test_nothing_is_kept_of_recipes_that_do_not_exist():
    assert {file.stem for file in resolved.FOLDER.iterdir()} == set(recipe_names())


# Exports take their time; that one which does not hold the weights is an error is shown in tests/runs.
@pytest.mark.tier("nightly", keep=("shipped", "keys", "written"))
@pytest.mark.parametrize("name", pages.TABLES)
def test_the_tables_of_pages_are_those_of_the_recipes(name):
    page, _ = pages.TABLES[name]
    assert pages.text(name) == page.read_text(encoding="utf-8"), "python tests/golden/make.py page"
