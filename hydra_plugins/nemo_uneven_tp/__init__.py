"""Puts the config groups and recipes of nemo-uneven-tp on every Hydra app's search path.

Hydra imports each module below ``hydra_plugins`` when an app starts, so this one imports
nothing but Hydra. With the package installed, ``+uneven_tp=on`` works in any Hydra app.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class UnevenTPSearchPathPlugin(SearchPathPlugin):
    """Appends our configs behind those of the app, which therefore win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append ``conf/`` and ``recipes/``, which are installed as packages."""
        for package in ("nemo_uneven_tp.conf", "nemo_uneven_tp.recipes"):
            search_path.append(provider="nemo-uneven-tp", path=f"pkg://{package}")
