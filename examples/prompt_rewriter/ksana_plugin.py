"""A prompt-rewriting preprocessor: expands abbreviations before the model reads them.

Put this file and ``glossary.json`` into the model's folder and start with ``--trust-remote-code``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


class KsanaPlugin:
    """Replaces every word of the glossary, in prompts and in chat messages."""

    def init_plugin(self, **kwargs: Any) -> None:
        """Read the glossary once, at the start of the server. What is raised here stops the start."""
        file = Path(kwargs["model_path"]) / "glossary.json"
        self.glossary: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        words = "|".join(map(re.escape, self.glossary))
        self.pattern = re.compile(rf"\b(?:{words})\b")

    def preprocess(self, **kwargs: Any) -> None:
        """Rewrite one request. ``additional_params: {"rewrite": false}`` leaves it as it is."""
        if not kwargs["additional_params"].get("rewrite", True):
            return
        python_input = kwargs["ksana_python_input"]
        if python_input.prompt is not None:
            python_input.prompt = self.rewrite(python_input.prompt)
        for message in kwargs["messages"] or ():
            if isinstance(message.get("content"), str):
                message["content"] = self.rewrite(message["content"])

    def rewrite(self, text: str) -> str:
        """Expand the abbreviations in ``text``."""
        return self.pattern.sub(lambda match: self.glossary[match.group()], text)
