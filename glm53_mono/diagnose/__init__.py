"""Which part makes a server's output wrong? The same requests run through arms that differ from the server in one
variable each (`arms.py`, `command.py`); `trial.py` runs them, `verdict.py` says what they rule out."""
