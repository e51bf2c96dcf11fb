"""Every recipe puts the casts into the layers of two models that it put there when the files were made."""

import pytest

from golden import export_page, page, resolved
from narrowgauge.recipes import recipe_names


@pytest.mark.tier("thorough", keep=8)
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_resolves_to_what_it_did(name):
    file = resolved.FOLDER / f"{name}.txt"
    assert file.exists(), "nothing is kept of it: python tests/golden/make.py resolved"
    assert resolved.text_of(name) == file.read_text(encoding="utf-8")


def test_nothing_is_kept_of_recipes_that_do_not_exist():
    assert {file.stem for file in resolved.FOLDER.iterdir()} == set(recipe_names())


def test_the_tables_of_the_page_are_those_of_the_recipes():
    assert page.text() == page.PAGE.read_text(encoding="utf-8"), "python tests/golden/make.py page"


@pytest.mark.tier("nightly")  # a table of a page; tests/runs shows exports
def test_every_recipe_is_exported_exactly_or_with_a_stated_difference_or_refused():
    """An export that does not hold the weights is an error of `export_model`; the page has all outcomes."""
    assert export_page.text() == export_page.PAGE.read_text(encoding="utf-8"), (
        "python tests/golden/make.py page"
    )
