"""Stands in for IPython, which SGLang's frontend imports and a server never calls."""
