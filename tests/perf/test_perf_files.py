"""The JSON files: what is refused, and that documentation and examples show valid ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ksana.errors import UsageError
from ksana.perf.config import BatchConfig, ModelPerfConfig
from ksana.perf.grid_command import make_grid
from ksana.perf.json_files import JsonPart, read_json, write_json
from ksana.perf.limits import check_step_limits
from ksana.perf.schema_command import SCHEMAS
from ksana.types.config import SchedulerConfig

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "perf.md").read_text()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("{", ModelPerfConfig, "is not valid JSON: Expecting property name"),
        ('{"batch_config_file": "b", "stat_round": 1, "stat_round": 2}', ModelPerfConfig, "'stat_round' appears twice"),
        ("{}", ModelPerfConfig, "batch_config_file is missing"),
        ('{"batch_config_file": "b", "stat_rounds": 1}', ModelPerfConfig, "stat_rounds; did you mean stat_round?"),
        ('{"batch_config_file": "b", "stat_round": 0}', ModelPerfConfig, "stat_round: must be greater than or equal"),
        ('{"batch_config_file": "b", "warmup_round": true}', ModelPerfConfig, "warmup_round: must be a valid integer"),
        ('{"batches": []}', BatchConfig, "batches: "),
        ('{"batches": [{"requests": [{}]}]}', BatchConfig, "batches[0].requests[0].forwarding_token_num is missing"),
        (
            '{"batches": [{"requests": [{"forwarding_token_num": "8"}]}]}',
            BatchConfig,
            'batches[0].requests[0].forwarding_token_num: must be a valid integer, not "8"',
        ),
        (
            '{"batches": [{"requests": [{"forwarding_token_num": 8}]}, {"requests": [{"forwarding_token_num": 8}]}]}',
            BatchConfig,
            "two batches are called 1x8",
        ),
        ("[]", BatchConfig, "must be an object"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, kind: type[JsonPart], words: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_json(file, kind)
    assert str(raised.value).startswith(str(file))
    assert words in str(raised.value)


def test_a_file_is_replaced_as_a_whole_and_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    config = ModelPerfConfig(batch_config_file="b.json")
    write_json(file, config)
    assert read_json(file, ModelPerfConfig) == config
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "plain"]


@pytest.mark.parametrize(("max_tokens", "max_context", "max_requests"), [(1024, 1024, 32), (7, 0, 1), (1, 3, 9)])
def test_a_grid_is_valid_and_stays_within_its_limits(max_tokens: int, max_context: int, max_requests: int) -> None:
    grid = make_grid(max_tokens, max_context, max_requests)
    BatchConfig.model_validate(grid.model_dump())  # that no name stands twice, for example
    check_step_limits(grid, Path("g"), SchedulerConfig(max_num_batched_tokens=max_tokens, max_num_seqs=max_requests))
    assert all(group.kv_cached_token_num <= max_context for batch in grid.batches for group in batch.requests)


def test_the_documented_files_are_valid() -> None:
    blocks = re.findall(r"<!-- (\w+) -->\n```json\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in blocks} == set(SCHEMAS)
    for name, text in blocks:
        SCHEMAS[name].model_validate_json(text)


def test_the_documented_files_are_those_of_the_example() -> None:
    for name in ("model_perf_config.json", "batch_config.json"):
        assert (ROOT / "examples" / "model_perf" / name).read_text() in DOCUMENT


def test_every_key_is_described_in_the_schema() -> None:
    for kind in (ModelPerfConfig, BatchConfig):
        schema = json.loads(json.dumps(kind.model_json_schema()))
        for part in [schema, *schema.get("$defs", {}).values()]:
            assert all("description" in value for value in part["properties"].values())
