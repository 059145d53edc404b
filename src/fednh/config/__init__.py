"""The settings of a run: what there is (`schema`), where they come from (`loading`), how values and short
options are spelled (`options`).

The names are imported when first used, so that the command line can read `SHORT_OPTIONS` without loading torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednh.config.loading import PRESETS, as_options, difference, dump, load, validate, with_settings
    from fednh.config.options import flat, parse_bytes, parse_value
    from fednh.config.schema import Config, PartitionConfig, Section, build_method, explain
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'fednh.config' has no attribute {name!r}")
        from fednh.config import loading, options, schema

        return next(vars(module)[name] for module in (loading, schema, options) if name in vars(module))


__all__ = [
    "PRESETS",
    "Config",
    "PartitionConfig",
    "Section",
    "as_options",
    "build_method",
    "difference",
    "dump",
    "explain",
    "flat",
    "load",
    "parse_bytes",
    "parse_value",
    "validate",
    "with_settings",
]
