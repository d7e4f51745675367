"""Facts out of a text, as an object of a class: the class is the JSON schema that the answer must follow.

Start a server with ``ksana-serve --model demo``, then ``python examples/extract.py "A text about a person."``.
"""

from __future__ import annotations

import argparse

from openai import OpenAI
from pydantic import BaseModel, Field

TEXT = "The painter Frida Kahlo was born in Coyoacan in 1907."


class Person(BaseModel):
    """Who a text is about."""

    name: str = Field(max_length=40)
    birth_place: str = Field(max_length=40)
    birth_year: int = Field(ge=0, le=2100)
    profession: str = Field(max_length=40)


def extract(client: OpenAI, text: str) -> Person:
    """The person whom ``text`` is about.

    The schema decides how the answer looks, but the model does not see it, so the question tells what is wanted.
    """
    wanted = ", ".join(Person.model_fields)
    question = f"{text}\n\nWrite the facts of this text as JSON with the keys {wanted}."
    completion = client.chat.completions.parse(
        model="ksana-llm",
        messages=[{"role": "user", "content": question}],
        response_format=Person,
        temperature=0,
        max_completion_tokens=100,
    )
    person = completion.choices[0].message.parsed
    assert person is not None  # None is for refusals, which this server does not know
    return person


def main() -> None:
    """Print the person whom the text of the command line is about."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    arguments = parser.parse_args()
    with OpenAI(base_url=arguments.base_url, api_key="none") as client:
        print(extract(client, arguments.text))


if __name__ == "__main__":
    main()
