"""`flower-superlink` for an installation whose path has a blank or a percent sign.

Flower 1.41 passes the path of its database migrations to Alembic unescaped, in a list separated by blanks. With such a
path it creates a database without tables, and every call to the server fails.
"""

from __future__ import annotations

from alembic.config import Config
from flwr.supercore.state.alembic import utils
from flwr.superlink.cli import flower_superlink
from sqlalchemy import Engine


def mended(engine: Engine) -> Config:
    """The config that Flower's own function builds, with paths escaped."""
    config = Config()
    url = engine.url.render_as_string(hide_password=False)
    places = [utils.ALEMBIC_DIR / "versions", *utils._version_locations]
    options = {
        "path_separator": "newline",
        "script_location": str(utils.ALEMBIC_DIR),
        "sqlalchemy.url": url,
        "version_locations": "\n".join(map(str, places)),
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    return config


if __name__ == "__main__":
    utils.build_alembic_config = mended
    flower_superlink()
