"""Chat templates are programs from elsewhere: none takes more time or memory than a rendering may."""

import time
from datetime import date

import pytest

from common.data import template
from common.data.encode import Encoder
from common.data.examples import examples_of_records
from common.errors import UserError
from tests.common.data.conftest import PLAIN_TEMPLATE, make_tokenizer, numbered

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "program",
    [
        NESTED,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = 7 ** 10 %}{% set x = 7 ** n %}",
        "{{ 'a' * 10 ** 10 }}",
        "{% set n = 10 ** 10 %}{{ ('a' * n)|length }}",
        "{{ 'a'|center(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{% set x = [0] * 10 ** 10 %}",
        "{{ (range(99999)|list * 100000)|join }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{% set n = 2 * 10 ** 6 %}{{ 'a' * n }}",
        "{% if add_generation_prompt %}{{ 'a' * 10 ** 10 }}{% endif %}",
    ],
)
def test_a_template_that_takes_too_much_is_refused_at_once(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "RENDERING_SECONDS", 0.2)
    encoder = Encoder(make_tokenizer(program + PLAIN_TEMPLATE))
    started = time.process_time()
    with pytest.raises(
        UserError, match=r"data\.jsonl, line 1: the chat template (takes|makes) .* for one conversation"
    ):
        list(encoder.encode(examples_of_records(numbered([CHAT]))))
    assert time.process_time() - started < 5


def test_a_long_text_is_no_reason_to_refuse_the_template_that_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "_WRITTEN_FREELY", 100)
    text = "the quick brown fox. " * 500
    chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "hello"}]}
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content|upper|lower }}{% endfor %}")
    [encoded] = Encoder(tokenizer).encode(examples_of_records(numbered([chat])))
    assert len(encoded.ids) > 500


def test_a_date_is_found_in_linear_time() -> None:
    started = time.process_time()
    template.dated('strftime_now("' * 20_000, date(2026, 1, 2))
    assert time.process_time() - started < 5
    written = template.dated(
        """{{ strftime_now('%d "of" %m') }}{{ strftime_now( "%Y" ) }}""", date(2026, 1, 2)
    )
    assert written == '{{ "02 \\"of\\" 01" }}{{ "2026" }}'
