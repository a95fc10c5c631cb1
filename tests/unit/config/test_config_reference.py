"""The options page is generated and current."""

from pathlib import Path

from services.config.names import OPTIONS
from services.config.reference import options_markdown

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_the_page_is_what_the_schema_says():
    assert PAGE.read_text() == options_markdown(), "run `make docs`"


def test_every_option_is_on_the_page_with_all_its_names():
    page = options_markdown()
    assert [option.path for option in OPTIONS if option.variable not in page or option.flag not in page] == []
