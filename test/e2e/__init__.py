"""A real SGLang server with the monokernel, against the same server without it."""
