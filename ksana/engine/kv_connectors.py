"""The KV connectors of an engine: which ones, and for whose blocks."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ksana.errors import UsageError
from ksana.plugin.manager import KsanaPluginManager
from ksana.types.config import KsanaConfig
from ksana.types.kv import KVCacheConfig
from ksana.types.model import ModelConfig

if TYPE_CHECKING:
    from ksana.connectors.base import KVConnector
    from ksana.connectors.context import ConnectorContext

logger = logging.getLogger(__name__)

_HOST = "local"
_BUILTIN = (_HOST, "local_disk")


def create_kv_connector(
    config: KsanaConfig,
    model: ModelConfig,
    model_path: Path,
    kv: KVCacheConfig,
    layout: str,
    plugins: KsanaPluginManager,
) -> KVConnector | None:
    """Make the connectors that are configured, as one; None if there are none.

    Args:
        layout: how a block lies in the cache: the name of the kernel backend.

    Raises:
        UsageError: there is none of such a name, or one cannot work.
    """
    names = _names(config, plugins)
    if not names:
        return None
    idle = [name for name in names if name != _HOST]  # which requests that are swapped out need all the same
    if idle and not config.cache.enable_prefix_caching:
        logger.warning("without prefix caching, KV connectors store and find nothing: %s", ", ".join(idle))
    from ksana.connectors.block_store import BlockNamespace, describe_model
    from ksana.connectors.context import ConnectorContext
    from ksana.connectors.multi import MultiConnector
    from ksana.models.weights_digest import digest_weights

    described = describe_model(model, kv, digest_weights(model_path))
    # Another version may lay out blocks differently, and what was stored on a disk would be read by it.
    namespace = BlockNamespace(described, f"{layout} {metadata.version('ksana')}")
    context = ConnectorContext(config, model, kv, namespace)
    connectors = [_create(name, context, plugins) for name in names]
    return connectors[0] if len(connectors) == 1 else MultiConnector(connectors)


def _names(config: KsanaConfig, plugins: KsanaPluginManager) -> list[str]:
    """Nearest first, each once."""
    host = [_HOST] if config.cache.host_memory_factor > 0 else []
    contributed: list[list[str]] = plugins.hook.ksana_kv_connector_names(config=config)
    others = [name for own in reversed(contributed) for name in own]  # registered first, called last
    return list(dict.fromkeys([*host, *config.kv_transfer.connectors, *others]))


def _create(name: str, context: ConnectorContext, plugins: KsanaPluginManager) -> KVConnector:
    connector: KVConnector | None = plugins.hook.ksana_create_kv_connector(name=name, context=context)
    if connector is None:
        raise UsageError(
            f"--kv-connector {name or repr(name)}: no plugin has a connector of that name; "
            f"built in are {' and '.join(_BUILTIN)}"
        )
    return connector
