"""What a plugin is told when it shall make a KV connector."""

from __future__ import annotations

from dataclasses import dataclass

from ksana.connectors.block_store import BlockNamespace
from ksana.types.config import KsanaConfig
from ksana.types.kv import KVCacheConfig
from ksana.types.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The engine that the connector is for.

    Attributes:
        config: everything that is configured.
        model: the loaded model.
        kv: blocks and groups of the cache.
        namespace: of this engine's blocks; makes the keys of a store.
    """

    config: KsanaConfig
    model: ModelConfig
    kv: KVCacheConfig
    namespace: BlockNamespace
