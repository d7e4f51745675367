"""The model calls functions of this program, and answers with what they return.

Start a server with ``ksana-serve --model demo``, then ``python examples/tool_calling.py "How warm is it in Paris?"``.

The first turn must call a function (``tool_choice="required"``), the next one answers. A model that has learnt to call
tools by itself may be left the choice in every turn (``"auto"``); its server is started with
``--enable-auto-tool-choice --tool-call-parser NAME``. The demo model has not learnt it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI

DEGREES = {"Berlin": 17, "Oslo": 9, "Paris": 21, "Rome": 27}


def get_temperature(city: str) -> str:
    """The temperature in a city."""
    return f"It is {DEGREES[city]} degrees Celsius in {city}."


FUNCTIONS: dict[str, Callable[..., str]] = {"get_temperature": get_temperature}

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": get_temperature.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": sorted(DEGREES)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def answer(client: OpenAI, question: str, max_turns: int = 4) -> str:
    """Talk with the model until it answers ``question`` without a further call."""
    messages: list[Any] = [{"role": "user", "content": question}]
    tool_choice: Any = "required"
    for _ in range(max_turns):
        completion = client.chat.completions.create(
            model="ksana-llm",
            messages=messages,
            tools=TOOLS,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=60,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "none"
    raise RuntimeError(f"no answer in {max_turns} turns")


def main() -> None:
    """Ask the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="?", default="How warm is it in Paris?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    arguments = parser.parse_args()
    with OpenAI(base_url=arguments.base_url, api_key="none") as client:
        print(answer(client, arguments.question))


if __name__ == "__main__":
    main()
