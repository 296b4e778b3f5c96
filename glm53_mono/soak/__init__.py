"""Deep sessions against a server, for what shows only there: `plan.py` says what they hold, `run.py` runs them with a
warm prefix cache and passers-by, `report.py` counts what looks wrong."""
