"""The operator's chat template takes the place of the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ksana.engine.llm import LLM
from ksana.errors import UsageError
from ksana.types.sampling import SamplingParams

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
ASK = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_file_or_the_text_itself(
    tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], tmp_path: Path, as_file: bool
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    llm = start_llm(tiny_path(), chat_template=str(file) if as_file else TEMPLATE)
    [output] = llm.chat(ASK, SamplingParams(max_tokens=1))
    tokenizer = llm.engine.tokenizer
    assert output.prompt_token_ids == tokenizer.encode("<Hi>", add_special_tokens=False)


@pytest.mark.parametrize(("given", "message"), [("/no/such.jinja", "cannot be read: No such"), ("{{ oops", "Jinja")])
def test_what_cannot_be_used_is_named(tiny_path: Callable[..., Path], given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(tiny_path(), chat_template=given)
