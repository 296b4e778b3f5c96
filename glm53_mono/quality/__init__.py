"""Is a model's output as it should be? What looks wrong in one answer (`detectors.py`), how two arms differ
(`divergence.py`), what counts say (`rates.py`), and records that outlive a run (`journal.py`)."""
