"""Probes of a step's inputs, for servers whose output looks wrong: `SGLANG_AMD_MONO_PROBE=1`.

They ask what the kernel takes for granted: that lengths, positions, slots and tables fit together, that no request
writes where another one reads, that nothing in the prefix is missing, and that all numbers are finite. `tables.py` asks
the step's tensors, `caches.py` the caches behind them; `findings.py` counts on the device and `report.py` prints from a
thread. `observer.py` puts them around a launch.
"""
