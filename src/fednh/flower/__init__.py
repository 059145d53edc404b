"""The same methods on Flower: a federation of real sites that keep their data."""

import os

# No telemetry, no update checks, no installing at run time. Flower and Ray read these when they are imported.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns if this is unset
}
for _name, _value in OFFLINE.items():
    os.environ.setdefault(_name, _value)
