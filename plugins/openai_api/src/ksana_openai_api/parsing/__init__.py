"""What the parsers of tool calls and of reasoning are made of.

A format is a generator that reads a :class:`~ksana_openai_api.parsing.source.Source` from its beginning to its end and
tells an :class:`~ksana_openai_api.parsing.emitter.Emitter` what it found. It yields where it needs more text, so it
reads like a parser of a whole text and works on pieces of any size.
"""

from ksana_openai_api.parsing.emitter import Emitter
from ksana_openai_api.parsing.scan_parser import ScanParser
from ksana_openai_api.parsing.source import Scan, Source, Tags

__all__ = ["Emitter", "Scan", "ScanParser", "Source", "Tags"]
