"""Has Envoy's files follow the fleet."""

from collections.abc import Collection, Mapping, Sequence

from extproc.config import Config
from extproc.discovery.discovery import Discovery
from extproc.discovery.endpoint_files import EndpointFiles
from extproc.envoy_clusters import cluster_names
from extproc.envoy_endpoints import Lane
from extproc.workers.workers import Workers


async def envoy_follows(
    config: Config, directory: str, workers: Workers, discovery: Discovery
) -> EndpointFiles:
    """Keeps one file a model's cluster; they are to be closed."""
    clusters = cluster_names(model.name for model in config.models)

    def lanes() -> Mapping[str, Sequence[Lane]]:
        now = workers.lanes()
        return {
            name: [Lane(endpoint, is_open) for endpoint, is_open in now.get(model, [])]
            for model, name in clusters.items()
        }

    def unplaced() -> Collection[str] | None:
        return workers.unplaced() if discovery.is_complete else None

    files = EndpointFiles(directory, lanes, unplaced)
    workers.changed.append(files.note_change)
    await files.start()
    return files
