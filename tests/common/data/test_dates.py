"""Chat templates that write the date: fixed to a day."""

from datetime import date
from pathlib import Path

import pytest

from cli.job.model import chat_template_named
from common.data.template import dated
from common.errors import UserError
from tests.common.data.conftest import make_tokenizer

DAY = date(2024, 7, 26)


@pytest.mark.parametrize(("template", "text"), [
    ("{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}", "26 Jul 2024"),
    ('{%- set d = strftime_now( "%Y-%m-%d" ) %}Date: {{ d }}.', "Date: 2024-07-26."),
    ("{{ strftime_now('%H \"o''clock') }}", "00 \"o''clock"),
])  # fmt: skip
def test_the_day_stands_where_the_current_one_would(template: str, text: str) -> None:
    tokenizer = make_tokenizer(dated(template, DAY))
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == text


def test_other_templates_stay_as_they_are() -> None:
    assert dated(None, DAY) is None
    assert dated("{{ x }}", DAY) == "{{ x }}"
    assert dated({"a": "{{ strftime_now('%Y') }}", "b": ""}, DAY) == {"a": '{{ "2024" }}', "b": ""}


def test_a_byte_order_mark_is_no_part_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("\ufeffa template")
    assert chat_template_named(str(file)) == "a template"
    for template in ("\ufeffa template", {"default": "a template", "tool_use": "\ufeffanother"}):
        # Of a tokenizer
        with pytest.raises(UserError, match="begins with a byte order mark"):
            dated(template, DAY)
