"""The step as a list of phases, and the tables and buffers that a launch of it reads."""
