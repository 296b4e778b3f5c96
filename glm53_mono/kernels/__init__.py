"""Device code: one file per layer part. Plain Triton that runs in the interpreter, on sm_90 and compiles for gfx950."""
