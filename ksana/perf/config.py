"""What is measured: the files ``model_perf_config.json`` and ``batch_config.json``."""

from __future__ import annotations

from pydantic import Field, field_validator

from ksana.perf.json_files import JsonPart


class ModelPerfConfig(JsonPart):
    """``model_perf_config.json``: how often, which batches, and where the result goes. Paths are relative to it."""

    warmup_round: int = Field(2, ge=0, description="rounds of each batch that are computed but not counted")
    stat_round: int = Field(10, ge=1, description="rounds of each batch that are counted")
    batch_config_file: str = Field(min_length=1, description="the batches; relative to the folder of this file")
    output_file: str = Field(
        "model_perf_result.json",
        min_length=1,
        description="where the result is written; relative to the folder of this file",
    )


class RequestGroup(JsonPart):
    """Equal requests of a batch."""

    forwarding_token_num: int = Field(ge=1, description="tokens that the step computes for each request")
    kv_cached_token_num: int = Field(
        0, ge=0, description="tokens of each request that are in the KV cache before the step"
    )
    request_num: int = Field(1, ge=1, description="how many such requests")

    def __str__(self) -> str:
        cached = f"@{self.kv_cached_token_num}" if self.kv_cached_token_num else ""
        return f"{self.request_num}x{self.forwarding_token_num}{cached}"


class Batch(JsonPart):
    """One step: everything in it is computed at once."""

    name: str = Field("", description="for people; default: made from the requests, such as 8x1@512")
    requests: list[RequestGroup] = Field(min_length=1, description="what the step computes")

    @property
    def label(self) -> str:
        """The name, or what stands in for it: requests x tokens @ cached tokens."""
        return self.name or "+".join(map(str, self.requests))

    @property
    def num_requests(self) -> int:
        """Requests in the step."""
        return sum(group.request_num for group in self.requests)

    @property
    def num_forwarding_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(group.request_num * group.forwarding_token_num for group in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the KV cache before the step."""
        return sum(group.request_num * group.kv_cached_token_num for group in self.requests)


class BatchConfig(JsonPart):
    """``batch_config.json``: the batches, measured one after the other."""

    batches: list[Batch] = Field(min_length=1, description="measured in this order")

    @field_validator("batches")
    @classmethod
    def _refuse_equal_labels(cls, batches: list[Batch]) -> list[Batch]:
        seen: set[str] = set()
        for batch in batches:
            if batch.label in seen:
                raise ValueError(f"two batches are called {batch.label}; give each a name of its own")
            seen.add(batch.label)
        return batches
