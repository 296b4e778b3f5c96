"""A model's weights by layer part (`model`), and what the launch knows of each matrix (`descriptor`).

A format is a member of `descriptor.Format` and a file with its `matrix` function.
"""
